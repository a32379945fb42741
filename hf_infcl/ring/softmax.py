"""InfoNCE over the ring: its forward and backward traversals, and their place in autograd.

With l_ij = s x_i.y_j, r_i and c_j the log-sum-exp of row i and column j over their candidates:

    L = sum_i (r_i - t_i) / 2N + sum_j (c_j - t_j) / 2N            t: the target's share of the logits
    G_ij = exp(l_ij - r_i) + exp(l_ij - c_j) - target_ij           dX = s G Y / 2N,  dY = s G'X / 2N,  ds = sum G u / 2N

(Inf-CL, arXiv 2410.17243, sections 3.2 and 3.3.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops import Engine, Pieces, Statistics, Weights, block_statistics
from hf_infcl.ring.derivatives import first_derivative_only, without_autocast
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.rounds import Yield, around
from hf_infcl.ring.shards import Block, Shard, blocks
from hf_infcl.ring.spec import Spec, agreement
from hf_infcl.ring.traversal import Banks, gradient_traversal, shards
from hf_infcl.ring.world import World

Needs = tuple[bool, bool, bool]  # gradient of images, texts, scale
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _wanted(block: Block, rows: Statistics | None, cols: Statistics | None) -> tuple[Statistics | None, ...]:
    return rows if block.for_rows else None, cols if block.for_cols else None


def _unpacked(travelled: Tensor) -> Statistics:
    """Statistics of (n, fields), as they travel, in the layout that kernels read; a copy only where they travelled."""
    return Statistics(travelled.T.contiguous())


def _engine(images: Tensor, scale: Tensor, spec: Spec) -> tuple[Engine, Tensor]:
    """How the sweep is computed, and the scale as a scalar to compute with."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    s = scale.detach()
    if s.ndim:  # what changes nothing costs the host all the same
        s = s.reshape(())
    return engine, s if s.dtype == engine.accumulator else s.to(engine.accumulator)


def _small(
    engine: Engine,
    images: Tensor,
    texts: Tensor,
    s: Tensor,
    ids: Tensor | None,
    banks: Banks,
    spec: Spec,
    layout: Layout,
) -> Any:
    """The backend's own way for a small batch alone, if it has one."""
    return engine.batch(images, texts, s, ids, spec.rule) if layout.world.is_alone and banks[0] is None else None


def softmax_forward(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the statistics of rows and of columns (empty where a direction is not wanted)."""
    return _forward(images, texts, scale, ids, banks, spec, layout)[1]


def _forward(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    banks: Banks,
    spec: Spec,
    layout: Layout,
    keep: bool = False,
) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """The way of a small batch, or None where the forward traversal was taken; what `softmax_forward` returns.

    keep: the gradient of a small batch's images follows.
    """
    engine, s = _engine(images, scale, spec)
    small = _small(engine, images, texts, s, ids, banks, spec, layout)
    if small is not None:
        return small, small.loss(spec.for_rows, spec.for_cols, keep)
    mine, travelling = shards(layout, images, texts, ids, banks)

    def empty(n: int) -> Statistics:
        return Statistics.empty(n, spec.rule, device=engine.device, dtype=engine.accumulator)

    row_stats = empty(len(images)) if spec.for_rows else None

    def visit(visitors: Shard, _: tuple[Tensor, ...]) -> Yield:
        col_stats = empty(len(visitors.batch)) if spec.for_cols else None
        for block in blocks(mine, visitors):
            rows, cols = _wanted(block, row_stats, col_stats)
            if rows is not None or cols is not None:
                block_statistics(engine, block.rows, block.cols, s, spec.rule, rows, cols)
        return () if col_stats is None else (col_stats.data.T,)

    def merge(into: Yield, other: Yield) -> None:
        Statistics(into[0].T).merge_(Statistics(other[0].T), s)

    made = around(layout, travelling, (), visit, merge)
    col_stats = _unpacked(made[0]) if made else None
    total = torch.zeros((), device=engine.device, dtype=engine.accumulator)
    for stats in (row_stats, col_stats):
        if stats is not None:
            total += stats.losses(s, spec.rule).sum()
    row_data, col_data = (s.new_empty(0) if stats is None else stats.data for stats in (row_stats, col_stats))
    return None, (layout.world.sum_(total) / (spec.directions * layout.rows), row_data, col_data)


def softmax_backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    banks: Banks,
    row_data: Tensor,
    col_data: Tensor,
    spec: Spec,
    layout: Layout,
    needs: Needs,
) -> Gradients:
    """Gradients of the image embeddings, the text embeddings and the scale, None where not needed.

    At the embeddings it is the mean's times the number of processes, which DDP's averaging takes back.
    """
    engine, s = _engine(images, scale, spec)
    small = _small(engine, images, texts, s, ids, banks, spec, layout)
    if small is not None:
        return _finished(*_made(small, row_data, col_data, spec, needs), grad, scale)
    mine, travelling = shards(layout, images, texts, ids, banks)
    share = grad.to(engine.accumulator) / (spec.directions * layout.rows * engine.gain)
    all_rows = Statistics(row_data) if spec.for_rows else None

    def weights_of(block: Block, col_data: tuple[Tensor, ...]) -> Weights | None:
        rows, cols = _wanted(block, all_rows, _unpacked(col_data[0]) if col_data else None)
        if rows is None and cols is None:
            return None
        related, rule = engine.relate(block.rows, block.cols, spec.rule), spec.rule
        mine, theirs, of_mine, of_theirs = map(Pieces, (block.rows, block.cols, rows, cols))

        def weights(r: slice, c: slice, want_sum: bool) -> tuple[Tensor, Tensor | None]:
            chunk = mine[r], theirs[c], s, rule, of_mine[r], of_theirs[c], engine.precision, want_sum, related(r, c)
            return engine.tiles.softmax_weights(*chunk)  # type: ignore[no-any-return]

        return weights

    factor = s * share * layout.world.size
    extra = (col_data.T,) if spec.for_cols else ()
    d_images, d_texts, sum_gu = gradient_traversal(engine, layout, mine, travelling, extra, weights_of, factor, needs)
    if not needs[2]:
        return d_images, d_texts, None
    return d_images, d_texts, (share * layout.world.sum_(sum_gu)).to(scale.dtype).reshape(scale.shape)


# A small batch's gradients as the backend keeps them until the incoming one is known, and what finishes them then.
Made = tuple[Tensor | None, ...]
Finish = Callable[[Made, Tensor, Tensor], Made]


def _made(small: Any, row_data: Tensor, col_data: Tensor, spec: Spec, needs: Needs) -> tuple[Made, Finish]:
    return small.gradients(row_data if spec.for_rows else None, col_data if spec.for_cols else None, needs)  # type: ignore[no-any-return]


def _finished(made: Made, finish: Finish, grad: Tensor, scale: Tensor) -> Gradients:
    d_images, d_texts, d_scale = finish(made, grad, scale)
    return d_images, d_texts, d_scale if d_scale is None or scale.ndim == 0 else d_scale.reshape(scale.shape)


class _SoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        texts: Tensor,
        scale: Tensor,
        ids: Tensor | None,
        bank_images: Tensor | None,
        bank_texts: Tensor | None,
        bank_ids: Tensor | None,
        spec: Spec,
        layout: Layout,
        differentiated: bool,
    ) -> Tensor:
        banks = bank_images, bank_texts, bank_ids
        ctx.spec, ctx.layout = spec, layout
        with without_autocast(images.device):
            keep = differentiated and ctx.needs_input_grad[0]
            small, (loss, rows, cols) = _forward(images, texts, scale, ids, banks, spec, layout, keep)
            # A small batch waits for Python: what can be made here is kept out of autograd's thread.
            ctx.is_ready = small is not None and differentiated and any(ctx.needs_input_grad)
            if ctx.is_ready:
                made, ctx.finish = _made(small, rows, cols, spec, ctx.needs_input_grad[:3])
                ctx.save_for_backward(scale, *made)
                return loss
        ctx.save_for_backward(images, texts, scale, ids, bank_images, bank_texts, bank_ids, rows, cols)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_ready:
            scale, *made = ctx.saved_tensors
            return *_finished(tuple(made), ctx.finish, grad, scale), *[None] * 7
        images, texts, scale, ids, bank_images, bank_texts, bank_ids, rows, cols = ctx.saved_tensors
        banks = bank_images, bank_texts, bank_ids
        with without_autocast(images.device):
            gradients = softmax_backward(
                grad, images, texts, scale, ids, banks, rows, cols, ctx.spec, ctx.layout, ctx.needs_input_grad[:3]
            )
        return *gradients, *[None] * 7


def softmax_loss(images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec) -> Tensor:
    """The InfoNCE loss of the global batch, differentiable in both embeddings and the scale."""
    if not torch.compiler.is_compiling():
        return _softmax_loss(images, texts, scale, ids, banks, spec)
    if World.of(spec.group).is_alone:
        from hf_infcl.ring.compiled import compiled_softmax_loss

        return compiled_softmax_loss(images, texts, scale, ids, banks, spec)
    # Messages between processes are no part of a graph.
    return torch.compiler.disable(_softmax_loss)(images, texts, scale, ids, banks, spec)


def _softmax_loss(images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec) -> Tensor:
    options = agreement("contrastive_loss", spec, images, ids, images=images, texts=texts, logit_scale=scale)
    bank_rows = 0 if banks[0] is None else len(banks[0])
    layout = Layout.of(spec.group, len(images), bank_rows, images.device, options)
    return _SoftmaxLoss.apply(images, texts, scale, ids, *banks, spec, layout, torch.is_grad_enabled())
