"""The rank sweep over the blocks of the score matrix: every row's and column's rank, never the whole matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hf_infcl.evaluation.relations import Relation
from hf_infcl.ops import Side
from hf_infcl.ops.ranks import best_positive, count_beating, score_tile
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.rounds import Yield, around
from hf_infcl.ring.shards import Shard
from hf_infcl.ring.traversal import add_

# Scratch per tile is about 10 bytes an entry (scores, their masked copy, masks): 40 MiB at 2,048 on a CPU, 640 MiB at
# 8,192 on a GPU, where larger products pay.
CPU_BLOCK_SIZE = 2048
GPU_BLOCK_SIZE = 8192


class Ranks(NamedTuple):
    """Ranks from 1; 0 marks a query that has no positive at all."""

    rows: Tensor
    cols: Tensor


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Ranks must not depend on a training switch: neither autocast nor TF32 (bf16 on a CPU) may round the scores."""
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def _tiles(n: int, p: int, size: int) -> Iterator[tuple[slice, slice]]:
    for r in range(0, n, size):
        for c in range(0, p, size):
            yield slice(r, min(r + size, n)), slice(c, min(c + size, p))


def rank_sweep(
    rows: Tensor,
    cols: Tensor,
    relation: Relation,
    block_size: int | None = None,
    *,
    row_offset: int = 0,
    layout: Layout | None = None,
) -> Ranks:
    """Rank of the best positive of every row among the columns, and of every column among the rows.

    Two passes over the same blocks, so that a positive is compared with scores of the very same products. Scratch
    memory is one block; what is kept is O(n + p). Over several processes the columns travel round the rows.

    Args:
        rows: (n, d) embeddings of any floating dtype; half precision is raised to float32, block by block. With
            several processes this one's rows.
        cols: (p, d) embeddings on the same device, likewise.
        relation: which entries are positives, by global row and column numbers.
        block_size: rows and columns of a block; default 2,048 on a CPU, 8,192 elsewhere. The ranks do not depend on
            it, but for scores that differ in the last bit.
        row_offset: global number of this process's first row.
        layout: where all processes' columns stand; None for a process alone.

    Returns:
        int64 ranks (n,) and (p,), 1 is best. A rank counts every candidate that is not a positive and scores at least
        as high.
    """
    layout = Layout.alone(len(cols)) if layout is None else layout
    device = rows.device
    size = block_size or (CPU_BLOCK_SIZE if device.type == "cpu" else GPU_BLOCK_SIZE)
    dtype = torch.float64 if torch.float64 in (rows.dtype, cols.dtype) else torch.float32
    none = float("-inf")
    mine = Shard(Side(cols, layout.offset(layout.world.rank)))
    row_best = torch.full((len(rows),), none, dtype=dtype, device=device)
    row_count = torch.zeros(len(rows), dtype=torch.int64, device=device)

    def positives(r: slice, c: slice, visitors: Side) -> Tensor:
        offset = visitors.offset
        return relation.tile(slice(r.start + row_offset, r.stop + row_offset), slice(c.start + offset, c.stop + offset))

    def find_positives(visitors: Shard, _: tuple[Tensor, ...]) -> Yield:
        columns = visitors.batch
        col_best = torch.full((len(columns),), none, dtype=dtype, device=device)
        for r, c in _tiles(len(rows), len(columns), size):
            positive = positives(r, c, columns)
            if not positive.any():  # most blocks off the diagonal hold none: no product needed
                continue
            in_rows, in_cols = best_positive(score_tile(rows[r].to(dtype), columns.embeds[c].to(dtype)), positive)
            row_best[r] = torch.maximum(row_best[r], in_rows)
            col_best[c] = torch.maximum(col_best[c], in_cols)
        return (col_best,)

    def count(visitors: Shard, extra: tuple[Tensor, ...]) -> Yield:
        columns, (col_best,) = visitors.batch, extra
        col_count = torch.zeros(len(columns), dtype=torch.int64, device=device)
        for r, c in _tiles(len(rows), len(columns), size):
            scores = score_tile(rows[r].to(dtype), columns.embeds[c].to(dtype))
            in_rows, in_cols = count_beating(scores, positives(r, c, columns), row_best[r], col_best[c])
            row_count[r] += in_rows
            col_count[c] += in_cols
        return (col_count,)

    with _full_precision(device):
        (col_best,) = around(layout, mine, (), find_positives, _keep_larger)
        (col_count,) = around(layout, mine, (col_best,), count, add_)
    return Ranks((row_count + 1).masked_fill(row_best == none, 0), (col_count + 1).masked_fill(col_best == none, 0))


def _keep_larger(into: Yield, other: Yield) -> None:
    torch.maximum(into[0], other[0], out=into[0])
