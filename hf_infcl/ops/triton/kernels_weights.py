"""InfoNCE's backward epilogue on the logits tile: the tile of G, softmax less target.

Logarithms are to base 2 inside the kernels (the hardware's exponential); s2 = s log2(e).
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_common import (
    LOG2_E,
    SCAN,
    UNSPECIALIZED,
    exp2,
    inside,
    is_put_off,
    leave_out,
    meets_diagonal,
    own,
    product,
    relates,
    same,
    store_tile,
    tile_origin,
)

# One exponential serves rows and columns while the log-sum-exps of a tile lie within this many powers of two. With the
# reference in the middle, no probability overflows, and those below 2^-66 flush to zero.
WIDEST_SPREAD = tl.constexpr(120.0)


@triton.jit
def _log_sum_exp(stats, stats_stride, at, there):
    """A row's log-sum-exp over its candidates, base 2, in two parts: (largest u, log2 of the sum relative to it)."""
    highest = tl.load(stats + at, mask=there, other=0.0)
    return highest, tl.load(stats + stats_stride + at, mask=there, other=0.0) * LOG2_E


@triton.jit
def _range(stats, stats_stride, at, there, s2):
    """Lowest and highest log-sum-exp, base 2, of a tile's rows or columns."""
    highest, log_sum = _log_sum_exp(stats, stats_stride, at, there)
    lse = highest * s2 + log_sum
    return tl.min(tl.where(there, lse, float("inf"))), tl.max(tl.where(there, lse, float("-inf")))


@triton.jit
def _tile_weights(
    tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, g, g_stride, sum_parts, listed, smoothing, gain,
    ROWS: tl.constexpr, COLS: tl.constexpr, MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, EXACT: tl.constexpr,
    WANT_SUM: tl.constexpr, DEFER: tl.constexpr, REPAIR: tl.constexpr,
    ID_COLUMNS: tl.constexpr, CELLS: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
    rows = row0 + tl.arange(0, BLOCK_M)
    cols = col0 + tl.arange(0, BLOCK_N)
    # Before the product, so that the reductions across the program do not wait behind it.
    lowest = float("inf")
    highest = float("-inf")
    if not EXACT:
        if ROWS:
            lowest, highest = _range(row_stats, row_stats_stride, rows, rows < n_rows, s2)
        if COLS:
            low, high = _range(col_stats, col_stats_stride, cols, cols < n_cols, s2)
            lowest = tl.minimum(lowest, low)
            highest = tl.maximum(highest, high)
    # Whether ids are to be compared: in all tiles that were put off, in none of the others, else it is looked up.
    if ID_COLUMNS > 0 and not DEFER and not REPAIR:
        alike = (
            relates(
                related, related_stride, x_ids, y_ids, row0, col0, n_rows, n_cols, ID_COLUMNS, CELLS, BLOCK_M, BLOCK_N
            ) > 0
        )  # fmt: skip
    else:
        alike = REPAIR
    u = product(
        x, y, x_stride, y_stride, n_rows, n_cols, depth, row0, col0, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA
    )
    if ROWS:
        row_max, row_log = _log_sum_exp(row_stats, row_stats_stride, rows, rows < n_rows)
        row_lse = row_max * s2 + row_log
    if COLS:
        col_max, col_log = _log_sum_exp(col_stats, col_stats_stride, cols, cols < n_cols)
        col_lse = col_max * s2 + col_log
    if EXACT:
        w = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if ROWS:
            w += exp2((u - row_max[:, None]) * s2 - row_log[:, None])
        if COLS:
            w += exp2((u - col_max[None, :]) * s2 - col_log[None, :])
    elif highest - lowest <= WIDEST_SPREAD:
        # One exponential: 2^(s2 u - r) + 2^(s2 u - c) = 2^(s2 u - m) (2^(m - r) + 2^(m - c)).
        middle = 0.5 * (highest + lowest)
        e = exp2(tl.fma(u, s2, -middle))
        if ROWS and COLS:
            w = e * (exp2(middle - row_lse)[:, None] + exp2(middle - col_lse)[None, :])
        elif ROWS:
            w = e * exp2(middle - row_lse)[:, None]
        else:
            w = e * exp2(middle - col_lse)[None, :]
    else:
        if ROWS and COLS:
            w = exp2(tl.fma(u, s2, -row_lse[:, None])) + exp2(tl.fma(u, s2, -col_lse[None, :]))
        elif ROWS:
            w = exp2(tl.fma(u, s2, -row_lse[:, None]))
        else:
            w = exp2(tl.fma(u, s2, -col_lse[None, :]))

    if SMOOTH:
        if ID_COLUMNS == 0:
            # Nothing is left out: every row has as many candidates as the next, and so has every column.
            each = 0.0
            if ROWS:
                each += smoothing / tl.load(row_stats + 5 * row_stats_stride + row0)
            if COLS:
                each += smoothing / tl.load(col_stats + 5 * col_stats_stride + col0)
            w -= each
        else:
            if ROWS:
                counts = tl.load(row_stats + 5 * row_stats_stride + rows, mask=rows < n_rows, other=1.0)
                w -= (smoothing / counts)[:, None]
            if COLS:
                counts = tl.load(col_stats + 5 * col_stats_stride + cols, mask=cols < n_cols, other=1.0)
                w -= (smoothing / counts)[None, :]
    on_diagonal = meets_diagonal(row0, col0, shift, BLOCK_M, BLOCK_N)
    # Targets go before rounding to g's dtype: a well-trained pair's weight is 2 - 2 + little.
    if MANY_POSITIVES:
        if alike | on_diagonal:
            positive = own(rows, cols, shift)
            if alike:
                positive = positive | same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS)
            if ROWS:
                counts = tl.load(row_stats + 3 * row_stats_stride + rows, mask=rows < n_rows, other=1.0)
                w -= tl.where(positive, ((1 - smoothing) / counts)[:, None], 0.0)
            if COLS:
                counts = tl.load(col_stats + 3 * col_stats_stride + cols, mask=cols < n_cols, other=1.0)
                w -= tl.where(positive, ((1 - smoothing) / counts)[None, :], 0.0)
    else:
        if MASK:
            if alike:
                others = same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS) & (own(rows, cols, shift) == 0)
                w = tl.where(others, 0.0, w)
            elif DEFER and CELLS:
                if listed > 0:
                    w = leave_out(w, 0.0, related, related_stride, row0, col0, n_rows, n_cols, BLOCK_M, BLOCK_N)
        if on_diagonal:
            w = tl.where(own(rows, cols, shift), w - (ROWS + COLS) * (1 - smoothing), w)
    if WANT_SUM:
        tl.store(sum_parts + tile, gain * tl.sum(tl.where(inside(rows, cols, n_rows, n_cols), w * u, 0.0)))
    store_tile(g, g_stride, w * gain, row0, col0, n_rows, n_cols, USE_TMA)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def weights_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, scale,
    row_stats, col_stats, row_stats_stride, col_stats_stride,
    g, g_stride, sum_parts, doubts, smoothing, gain, n_programs,
    ROWS: tl.constexpr, COLS: tl.constexpr, MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, EXACT: tl.constexpr,
    WANT_SUM: tl.constexpr, DEFER: tl.constexpr, REPAIR: tl.constexpr,
    ID_COLUMNS: tl.constexpr, CELLS: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """G = softmax over rows + softmax over columns - targets, times `gain`, rounded once to g's dtype.

    g: (n_rows, n_cols), row stride g_stride. sum_parts: (tiles,) float32, sum of G u over every tile (WANT_SUM).
    doubts: (tiles,) int32, set where ids have to be compared (DEFER): tiles that a second launch (REPAIR) makes.
    """
    tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    if REPAIR:
        for start in range(tl.program_id(0), tiles, n_programs * SCAN):
            at = start + n_programs * tl.arange(0, SCAN)
            left = tl.load(doubts + at, mask=at < tiles, other=0) != 0
            tile = tl.min(tl.where(left, at, tiles), 0)
            while tile < tiles:
                _tile_weights(
                    tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride,
                    s2, row_stats, col_stats, row_stats_stride, col_stats_stride, g, g_stride, sum_parts, 0, smoothing,
                    gain,
                    ROWS, COLS, MANY_POSITIVES, SMOOTH, EXACT, WANT_SUM, DEFER, REPAIR, ID_COLUMNS, CELLS, MASK,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION, USE_TMA,
                )  # fmt: skip
                tile = tl.min(tl.where(left & (at > tile), at, tiles), 0)
        return
    for tile in range(tl.program_id(0), tiles, n_programs):
        listed = 0
        if DEFER:
            row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
            listed = relates(
                related, related_stride, x_ids, y_ids, row0, col0, n_rows, n_cols, ID_COLUMNS, CELLS, BLOCK_M, BLOCK_N
            )
            put_off = is_put_off(listed, MASK and CELLS)
            tl.store(doubts + tile, put_off.to(tl.int32))
            wanted = put_off == 0
        else:
            wanted = True
        if wanted:
            _tile_weights(
                tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride,
                s2, row_stats, col_stats, row_stats_stride, col_stats_stride, g, g_stride, sum_parts, listed, smoothing,
                gain,
                ROWS, COLS, MANY_POSITIVES, SMOOTH, EXACT, WANT_SUM, DEFER, REPAIR, ID_COLUMNS, CELLS, MASK,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION, USE_TMA,
            )  # fmt: skip
