"""G from exponentials that the forward sweep kept, instead of from the product once more.

Logarithms are to base 2 inside the kernel; s2 = s log2(e).
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_common import LOG2_E, exp2, inside, meets_diagonal, own, product, tile_origin


@triton.jit
def _log_sum_exp(stats, stats_stride, at, there, s2):
    highest = tl.load(stats + at, mask=there, other=0.0)
    return highest * s2 + tl.load(stats + stats_stride + at, mask=there, other=0.0) * LOG2_E


@triton.jit(do_not_specialize=["n_rows", "row_stats_stride", "col_stats_stride", "all_rows"])
def reweigh_kernel(
    x, y, x_stride, y_stride, depth, g, g_stride, n_rows, n_cols, scale, references, row_stats, col_stats,
    row_stats_stride, col_stats_stride, doubts, all_rows,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PART: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """G_ij = e_ij (2^(s2 m - r_i) + 2^(s2 m - c_j)) - target, for the first n_rows of all_rows rows.

    g: (n_rows, n_cols) bfloat16, row stride g_stride, holds e_ij = 2^(s2 (u_ij - m)) relative to the tile's m and
    receives G. references: where `statistics_kernel` leaves the tiles' m, row_parts (ROWS) or col_parts. A pair's
    own e is of no use, for its weight may be 2 - 2 + little: it comes from u_ii, which the statistics hold in float32.
    doubts: tiles whose e are of no use; they are few, and made from the product of x and y, as they are read anywhere
    else by pointers. A program makes PART rows of a tile: memory, the bound, is kept busy by many small programs.
    """
    tile = tl.program_id(0) // (BLOCK_M // PART)
    part = tl.program_id(0) % (BLOCK_M // PART)
    row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
    first = row0 + part * PART
    rows, cols = first + tl.arange(0, PART), col0 + tl.arange(0, BLOCK_N)
    place = rows.to(tl.int64)[:, None] * g_stride + cols[None, :]
    there = inside(rows, cols, n_rows, n_cols)
    # Nothing that is read here depends on anything else that is: to wait once is what a program mostly does.
    e = tl.load(g + place, mask=there, other=0.0)
    doubt = tl.load(doubts + tile)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    if ROWS:
        m = tl.load(references + (col0 // BLOCK_N).to(tl.int64) * all_rows + row0) * s2
        r = _log_sum_exp(row_stats, row_stats_stride, rows, rows < n_rows, s2)
    else:
        m = tl.load(references + (row0 // BLOCK_M).to(tl.int64) * n_cols + col0) * s2
    if COLS:
        c = _log_sum_exp(col_stats, col_stats_stride, cols, cols < n_cols, s2)
    w = tl.zeros((PART, BLOCK_N), tl.float32)
    if doubt == 0:
        if ROWS:
            w += exp2(m - r)[:, None]
        if COLS:
            w += exp2(m - c)[None, :]
        w *= e.to(tl.float32)
    else:
        z = s2 * product(
            x, y, x_stride, y_stride, n_rows, n_cols, depth, first, col0, PART, BLOCK_N, BLOCK_K, "ieee", False
        )
        if ROWS:
            w += exp2(z - r[:, None])
        if COLS:
            w += exp2(z - c[None, :])
    if meets_diagonal(row0, col0, 0, BLOCK_M, BLOCK_N):
        weight = tl.zeros((PART, BLOCK_N), tl.float32)
        if ROWS:
            u = tl.load(row_stats + 2 * row_stats_stride + rows, mask=rows < n_rows, other=0.0)
            weight += exp2(tl.fma(u, s2, -r))[:, None]
        if COLS:
            u = tl.load(col_stats + 2 * col_stats_stride + cols, mask=cols < n_cols, other=0.0)
            weight += exp2(tl.fma(u, s2, -c))[None, :]
        w = tl.where(own(rows, cols, 0), weight - (ROWS + COLS), w)
    tl.store(g + place, w.to(g.dtype.element_ty), mask=there)
