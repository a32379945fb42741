"""The top-k sweep's chunk arithmetic in plain PyTorch: the reference, and the path of devices without Triton."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hf_infcl.ops.chunks import chunk_shape as plain_chunk_shape
from hf_infcl.ops.chunks import parts
from hf_infcl.ops.ranks import score_tile
from hf_infcl.ops.sides import Side, diagonal, same
from hf_infcl.ops.topk import Links, TopK
from hf_infcl.ops.torch_tiles import accumulator_dtype, products


def chunk_shape(device: torch.device, block_size: int | None) -> tuple[int, int]:
    """Rows and columns of a chunk: as ever, rounded to whole blocks of `block_size` rows and columns."""
    height, width = plain_chunk_shape(device, None)
    if block_size is None:
        return height, width
    return max(height // block_size, 1) * block_size, max(width // block_size, 1) * block_size


def offer(
    rows: Side,
    cols: Side,
    row_best: TopK | None,
    col_best: TopK | None,
    exclude_pairs: bool,
    row_ceiling: Tensor | None,
    col_ceiling: Tensor | None,
    precision: str,
    block_size: int | None,
) -> None:
    """Offers a chunk's candidates to the best k of its rows and columns, `block_size` of the other side at a time."""
    if rows.embeds.device.type == "cpu":
        dtype = accumulator_dtype(rows.embeds.dtype)
        scores = score_tile(
            rows.embeds.to(dtype), cols.embeds.to(dtype)
        )  # copies get equal scores, wherever they stand
    else:
        scores = products(rows, cols, precision)
    excluded = same(rows, cols)
    shift = diagonal(rows, cols) if exclude_pairs else None
    if shift is not None:
        if excluded is None:
            excluded = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        torch.diagonal(excluded, shift).fill_(True)
    candidates = scores if excluded is None else scores.masked_fill(excluded, -torch.inf)
    for best, offered, ceiling, others in (
        (row_best, candidates, row_ceiling, cols),
        (col_best, candidates.T, col_ceiling, rows),
    ):
        if best is None:
            continue
        if ceiling is not None:
            # "Above the ceiling", not "not below": a NaN passes, and is seen in the loss.
            offered = offered.masked_fill(offered > ceiling[:, None], -torch.inf)
        for part in parts(len(others), block_size or len(others)):
            best.offer_(offered[:, part], others.offset + part.start)


def link_gradient(
    from_target: Links | None, from_source: Links | None, source: Tensor, factor: Tensor, out: Tensor
) -> None:
    """out_i += factor times the sum over both kinds of links. Indices are positions; those outside are left out."""
    source = source.to(accumulator_dtype(source.dtype))
    total = torch.zeros(out.shape, device=out.device, dtype=source.dtype)
    if from_target is not None:
        inside = (from_target.indices >= 0) & (from_target.indices < len(source))
        bags, shares = torch.where(inside, from_target.indices, 0), torch.where(inside, from_target.weights, 0.0)
        total += embedding_bag(bags, source, per_sample_weights=shares, mode="sum")
    if from_source is not None:
        inside = (from_source.indices >= 0) & (from_source.indices < len(out))
        # A sum over sorted entries: `index_add_` would add them in the order in which threads get to them.
        targets, order = torch.where(inside, from_source.indices, len(out)).flatten().sort(stable=True)
        starts = torch.searchsorted(targets, torch.arange(len(out), device=out.device))
        # The last target's bag holds the entries beyond it too: they weigh nothing.
        shares = torch.where(inside, from_source.weights, 0.0).flatten()[order]
        sources = order.div_(inside.shape[1], rounding_mode="floor")
        total += embedding_bag(sources, source, starts, per_sample_weights=shares, mode="sum")
    out += total.mul_(factor)
