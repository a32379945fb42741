"""Sweeps over one rectangular block: the chunk loop with an objective's epilogue, on either backend."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops.chunks import Pieces, chunks, parts
from hf_infcl.ops.dispatch import resolve_backend, resolve_precision, tiles
from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.statistics import COUNT, TOTAL, Statistics
from hf_infcl.ops.torch_tiles import accumulator_dtype

_WIDENED_ROWS = 16_384  # 32 MiB at d = 512 in float32


@dataclass(frozen=True)
class Engine:
    """How a sweep is computed: a backend's chunk functions, the precision of products, and the chunk sizes."""

    backend: str
    precision: str
    device: torch.device
    dtype: torch.dtype
    block_size: int | None = None

    @classmethod
    def of(cls, embeds: Tensor, backend: str, precision: str, block_size: int | None) -> "Engine":
        """The engine for embeddings of a device and dtype; the names are resolved here, once."""
        return cls(
            resolve_backend(backend, embeds.device, embeds.dtype),
            resolve_precision(precision, embeds.dtype),
            embeds.device,
            embeds.dtype,
            block_size,
        )

    @property
    def tiles(self) -> ModuleType:
        return tiles(self.backend)

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator_dtype(self.dtype)

    @property
    def gain(self) -> float:
        """Power of two that G is multiplied by, so that a half-precision G does not underflow."""
        return self.tiles.gain(self.dtype)

    def batch(self, images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, rule: Rule) -> Any:
        """The backend's shorter way for a small batch alone, with `loss` and `gradients`; None where it has none."""
        way = self.tiles.whole
        if way is None:
            return None
        has_ids = ids is not None and rule.duplicates != "keep"
        if not way.suits(images.shape[0], self.dtype, has_ids, self.block_size):
            return None
        return way.Batch(images, texts, scale, ids, rule, self.precision)

    def relate(self, rows: Side, cols: Side, rule: Rule) -> Callable[[slice, slice], Tensor | None]:
        """(row part, column part) -> what the chunk functions need to know of a block's ids."""
        related = self.tiles.relate(rows, cols, rule)
        return related.chunk if related is not None else lambda r, c: None

    def chunk_shape(self, forward: bool = False) -> tuple[int, int]:
        """Rows and columns of a chunk. Forward keeps nothing of a chunk but its statistics, so it may be larger."""
        return self.tiles.chunk_shape(self.device, self.block_size, forward)


def block_statistics(
    engine: Engine,
    rows: Side,
    cols: Side,
    scale: Tensor,
    rule: Rule,
    row_stats: Statistics | None,
    col_stats: Statistics | None,
) -> None:
    """Merges a block into the running statistics of its rows and columns; None where a side is not wanted.

    InfoNCE's forward: one product of 2 N^2 D operations (Inf-CL, arXiv 2410.17243, section 3).
    """
    related, statistics = engine.relate(rows, cols, rule), engine.tiles.statistics
    mine, theirs, of_mine, of_theirs = map(Pieces, (rows, cols, row_stats, col_stats))
    for r, c in chunks(rows, cols, engine.chunk_shape(forward=True)):
        statistics(mine[r], theirs[c], scale, rule, of_mine[r], of_theirs[c], engine.precision, related(r, c))
    if rule.label_smoothing:
        for stats, own, others in ((row_stats, rows, cols), (col_stats, cols, rows)):
            if stats is not None:
                _count_all(stats, own, others)


def _count_all(stats: Statistics, mine: Side, theirs: Side) -> None:
    """Counts all of theirs as candidates of mine; what a mask leaves out the chunks have taken back.

    sum_j x_i . y_j = x_i . sum_j y_j costs n d operations, where adding up products would burden every tile.
    """
    dtype = stats.data.dtype
    total = theirs.embeds.sum(0, dtype=dtype)
    for part in parts(len(mine), _WIDENED_ROWS):
        stats.data[TOTAL, part] += mine.embeds[part].to(dtype) @ total
    stats.data[COUNT] += len(theirs)


# (row part, column part, want sum of G u) -> the chunk of G, and sum of G u where wanted. Both carry `Engine.gain`.
Weights = Callable[[slice, slice, bool], tuple[Tensor, Tensor | None]]


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """sum_ij a_ij b_ij of (n, d) tensors, a scalar in b's dtype."""
    total = torch.zeros((), device=b.device, dtype=b.dtype)
    for part in parts(len(a), _WIDENED_ROWS):
        total += (a[part] * b[part]).sum()
    return total


def block_gradient(
    engine: Engine,
    rows: Side,
    cols: Side,
    weights: Weights,
    factor: Tensor,
    d_rows: Tensor | None,
    d_cols: Tensor | None,
    want_sum: bool,
) -> Tensor:
    """Adds a block's share of both sides' gradients, chunk by chunk; G is made and dropped.

    Args:
        weights: makes a chunk of G.
        factor: scalar that is common to all of G (the scale, 1/n, the incoming gradient, 1/gain).
        d_rows: (n_rows, d), receives factor G Y, rounded to its dtype once per call. None: not wanted.
        d_cols: (n_cols, d) in the accumulator dtype, receives G' X *without* the factor. None: not wanted.
        want_sum: whether the sum of G u is wanted, for the scale's gradient.

    Returns:
        sum_ij G_ij u_ij (0 if not wanted) without the factor, a scalar. It equals sum_i x_i . (G Y)_i, so that it costs
        n d operations where G Y is computed anyway.
    """
    accumulator, matmul = engine.accumulator, engine.tiles.matmul
    height, width = engine.chunk_shape()
    sum_gu = torch.zeros((), device=engine.device, dtype=accumulator)
    g: Tensor | None = None
    columns, d_columns = Pieces(cols.embeds), Pieces(d_cols)
    for r in parts(len(rows), height):
        x = rows.embeds[r]
        d_x: Tensor | None = None
        for c in parts(len(cols), width):
            g = None  # before the next is made, so that there is one at a time
            g, gu = weights(r, c, want_sum and d_rows is None)
            if d_rows is not None:
                d_x = matmul(g, columns[c], engine.precision, out=d_x)
            if gu is not None:
                sum_gu += gu
            if d_cols is not None:
                matmul(g.T, x, engine.precision, out=d_columns[c])
        g = None
        if d_x is not None and d_rows is not None:
            if want_sum:
                sum_gu += (x * d_x).sum()
            d_rows[r] += d_x.mul_(factor)
    return sum_gu
