"""The rank sweep over the blocks of the score matrix: every row's and column's rank, never the whole matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hf_infcl.evaluation.relations import Relation
from hf_infcl.ops.ranks import best_positive, count_beating, score_tile

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


def rank_sweep(rows: Tensor, cols: Tensor, relation: Relation, block_size: int | None = None) -> Ranks:
    """Rank of the best positive of every row among the columns, and of every column among the rows.

    Two passes over the same blocks, so that a positive is compared with scores of the very same products. Scratch
    memory is one block; what is kept is O(n + p).

    Args:
        rows: (n, d) embeddings of any floating dtype; half precision is raised to float32, block by block.
        cols: (p, d) embeddings on the same device.
        relation: which entries are positives.
        block_size: rows and columns of a block; default 2,048 on a CPU, 8,192 elsewhere. The ranks do not depend on
            it, but for scores that differ in the last bit.

    Returns:
        int64 ranks (n,) and (p,), 1 is best. A rank counts every candidate that is not a positive and scores at least
        as high.
    """
    n, p, device = rows.shape[0], cols.shape[0], rows.device
    size = block_size or (CPU_BLOCK_SIZE if device.type == "cpu" else GPU_BLOCK_SIZE)
    dtype = torch.float64 if torch.float64 in (rows.dtype, cols.dtype) else torch.float32

    row_best = torch.full((n,), float("-inf"), dtype=dtype, device=device)
    col_best = torch.full((p,), float("-inf"), dtype=dtype, device=device)
    row_count = torch.zeros(n, dtype=torch.int64, device=device)
    col_count = torch.zeros(p, dtype=torch.int64, device=device)
    with _full_precision(device):
        for r, c in _tiles(n, p, size):
            positive = relation.tile(r, c)
            if not positive.any():  # most blocks off the diagonal hold none: no product needed
                continue
            in_rows, in_cols = best_positive(score_tile(rows[r].to(dtype), cols[c].to(dtype)), positive)
            row_best[r] = torch.maximum(row_best[r], in_rows)
            col_best[c] = torch.maximum(col_best[c], in_cols)
        for r, c in _tiles(n, p, size):
            scores = score_tile(rows[r].to(dtype), cols[c].to(dtype))
            in_rows, in_cols = count_beating(scores, relation.tile(r, c), row_best[r], col_best[c])
            row_count[r] += in_rows
            col_count[c] += in_cols
    none = float("-inf")
    return Ranks((row_count + 1).masked_fill(row_best == none, 0), (col_count + 1).masked_fill(col_best == none, 0))
