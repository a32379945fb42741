"""Chunk arithmetic in plain PyTorch: the reference, and the path of every device without Triton.

Each function takes one chunk (rows x columns) and does what one epilogue does with it. `hf_infcl.ops.triton` offers the
same functions, fused; `hf_infcl.ops.blocks` drives either through the one chunk loop.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_infcl.ops.chunks import chunk_shape as chunk_shape  # the PyTorch path's own sizes
from hf_infcl.ops.chunks import parts
from hf_infcl.ops.sides import Rule, Side, diagonal, relations
from hf_infcl.ops.statistics import COUNT, LOG_SUM, MAX, POSITIVE_COUNT, POSITIVE_SUM, TOTAL, Statistics

# Terms of a float32 sum that are added up before they join the others: rounding errors of many equal rows all point one
# way, and in one long chain of additions they grow with its length.
_CPU_RUN = 64
# A result of fewer columns is made apart and then added: for it some libraries add term by term to what stands there,
# which for 1,000 equal rows of 8 features costs 8e-5 of the gradient instead of 2e-5.
_CPU_NARROW = 32

whole = None  # no shorter way for a batch that fits in one chunk


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 embeddings."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gain(dtype: torch.dtype) -> float:
    """G is kept in float32 here, which needs no guard against underflow."""
    return 1.0


@contextmanager
def _float32_products(precision: str, device: torch.device) -> Iterator[None]:
    """Lets CUDA's float32 products use tf32 where the caller asked for it, and only there."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def matmul(a: Tensor, b: Tensor, precision: str, out: Tensor | None = None) -> Tensor:
    """a @ b, added to `out` where that is given.

    Operands and result are float32 (or float64): half-precision inputs are widened first, which is exact.
    """
    dtype = accumulator_dtype(a.dtype)
    a, b = a.to(dtype), b.to(dtype)
    on_cpu = a.device.type == "cpu"
    with _float32_products(precision, a.device):
        for part in parts(len(b), _CPU_RUN if on_cpu else max(len(b), 1)):
            if out is None:
                out = a[:, part] @ b[part]
            elif on_cpu and b.shape[1] < _CPU_NARROW:
                out += a[:, part] @ b[part]
            else:
                out.addmm_(a[:, part], b[part])
    assert out is not None, "a product of nothing"
    return out


def relate(rows: Side, cols: Side, rule: Rule) -> None:
    """What the chunk functions need to know of a whole block's ids: nothing, they compare each chunk's own."""


def products(rows: Side, cols: Side, precision: str) -> Tensor:
    """(n_rows, n_cols) u_ij = x_i . y_j, before the scale."""
    dtype = accumulator_dtype(rows.embeds.dtype)
    with _float32_products(precision, rows.embeds.device):
        return rows.embeds.to(dtype) @ cols.embeds.to(dtype).T


def statistics(
    rows: Side,
    cols: Side,
    scale: Tensor,
    rule: Rule,
    row_stats: Statistics | None,
    col_stats: Statistics | None,
    precision: str,
    related: None = None,
) -> None:
    """Merges a chunk's candidates into the running statistics of its rows and of its columns (None: not wanted)."""
    u = products(rows, cols, precision)
    valid, positive = relations(rows, cols, rule)
    for stats, along in ((row_stats, 1), (col_stats, 0)):
        if stats is not None:
            stats.merge_(_chunk_statistics(u, valid, positive, diagonal(rows, cols), along, scale, rule), scale)


def _chunk_statistics(
    u: Tensor, valid: Tensor | None, positive: Tensor | None, shift: int | None, along: int, scale: Tensor, rule: Rule
) -> Statistics:
    n = u.shape[1 - along]
    stats = Statistics.empty(n, rule, device=u.device, dtype=u.dtype)
    candidates = u if valid is None else u.masked_fill(~valid, -torch.inf)
    highest = candidates.amax(along)
    anchor = torch.where(highest == -torch.inf, 0.0, highest)  # a row without candidates: exp(-inf - 0) = 0, not NaN
    stats.data[MAX] = highest
    stats.data[LOG_SUM] = (candidates - anchor.unsqueeze(along)).mul_(scale).exp_().sum(along).log_()
    if positive is not None:
        stats.data[POSITIVE_SUM] = torch.where(positive, u, 0.0).sum(along)
        stats.data[POSITIVE_COUNT] = positive.sum(along)
    elif shift is not None:
        pairs = torch.diagonal(u, shift)
        first = max(-shift, 0) if along == 1 else max(shift, 0)
        stats.data[POSITIVE_SUM, first : first + len(pairs)] = pairs
        stats.data[POSITIVE_COUNT, first : first + len(pairs)] = 1
    if rule.label_smoothing and valid is not None:  # the block has counted all of its columns
        stats.data[TOTAL] = -torch.where(valid, 0.0, u).sum(along)
        stats.data[COUNT] = valid.sum(along) - u.shape[along]
    return stats


def softmax_weights(
    rows: Side,
    cols: Side,
    scale: Tensor,
    rule: Rule,
    row_stats: Statistics | None,
    col_stats: Statistics | None,
    precision: str,
    want_sum: bool,
    related: None = None,
) -> tuple[Tensor, Tensor | None]:
    """The chunk of G, dL/dl_ij without its factor 1/n: softmax less target, over rows plus over columns.

    Returns:
        G (n_rows, n_cols), and sum_ij G_ij u_ij (the scale's gradient) if wanted.
    """
    u = products(rows, cols, precision)
    valid, positive = relations(rows, cols, rule)
    shift = diagonal(rows, cols)
    e = rule.label_smoothing
    g = None
    for stats, along in ((row_stats, 1), (col_stats, 0)):
        if stats is None:
            continue
        data = stats.data.unsqueeze(1 + along)
        part = (u - data[MAX]).mul_(scale).sub_(data[LOG_SUM]).exp_()
        if e:
            part.sub_(e / data[COUNT])
        if valid is not None:
            part.masked_fill_(~valid, 0.0)
        if positive is not None:
            part.sub_(torch.where(positive, (1 - e) / data[POSITIVE_COUNT], 0.0))
        elif shift is not None:
            # Every row's own pair is its one positive here, so the target's weight on the diagonal is 1 - e.
            torch.diagonal(part, shift).sub_(1 - e)
        g = part if g is None else g.add_(part)
    assert g is not None, "a chunk without row or column statistics has no gradient"
    return g, (g * u).sum() if want_sum else None


def _sigmoid_logits(
    rows: Side, cols: Side, scale: Tensor, bias: Tensor, rule: Rule, precision: str
) -> tuple[Tensor, Tensor, int | None]:
    """The chunk of u, of -z (s u + b), -inf where a pair is left out, and the diagonal on which z is +1."""
    u = products(rows, cols, precision)
    logits = u * scale + bias
    valid, _ = relations(rows, cols, rule)
    if valid is not None:
        logits.masked_fill_(~valid, -torch.inf)
    shift = diagonal(rows, cols)
    if shift is not None:
        torch.diagonal(logits, shift).neg_()
    return u, logits, shift


def sigmoid_loss(
    rows: Side, cols: Side, scale: Tensor, bias: Tensor, rule: Rule, precision: str, related: None = None
) -> Tensor:
    """Sum over the chunk of -log sigmoid(z (s u + b)), z = +1 on pairs and -1 elsewhere."""
    _, logits, _ = _sigmoid_logits(rows, cols, scale, bias, rule, precision)
    return torch.nn.functional.softplus(logits).sum()


def sigmoid_weights(
    rows: Side,
    cols: Side,
    scale: Tensor,
    bias: Tensor,
    rule: Rule,
    precision: str,
    want_sum: bool,
    related: None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The chunk of G = -z sigmoid(-z (s u + b)), and its share of the loss.

    Returns:
        G (n_rows, n_cols); sum of G u if wanted (the scale's gradient); sum of G (the bias's); what `sigmoid_loss`
        returns.
    """
    u, logits, shift = _sigmoid_logits(rows, cols, scale, bias, rule, precision)
    loss = torch.nn.functional.softplus(logits).sum()
    g = logits.sigmoid_()
    if shift is not None:
        torch.diagonal(g, shift).neg_()
    return g, (g * u).sum() if want_sum else None, g.sum(), loss
