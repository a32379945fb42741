"""InfoNCE's two epilogues on the logits tile, and the merge of per-tile statistics.

Logarithms are to base 2 inside the kernels (the hardware's exponential); s2 = s log2(e).
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_common import (
    UNSPECIALIZED,
    exp2,
    inside,
    may_match,
    meets_diagonal,
    own,
    product,
    same,
    store_tile,
    tile_origin,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Forward: one exponential serves a tile's rows and columns while every sum stays above this. What float32 flushes to
# zero (< 2^-126 each) is then below 2^-28 of any sum.
SMALLEST_SUM = tl.constexpr(2.0**-90)
# Backward: likewise while the log-sum-exps of a tile lie within this many powers of two. With the reference in the
# middle, no probability overflows, and those below 2^-66 flush to zero.
WIDEST_SPREAD = tl.constexpr(120.0)


@triton.jit
def _exact_statistics(u, s2, AXIS: tl.constexpr):
    """Reference and sum of exponentials along an axis, each row (column) with its own maximum."""
    highest = tl.max(u, AXIS)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    if AXIS == 1:
        e = exp2(tl.fma(u, s2, -(anchor * s2)[:, None]))
    else:
        e = exp2(tl.fma(u, s2, -(anchor * s2)[None, :]))
    return highest, tl.sum(e, AXIS)


@triton.jit
def _add(to, value, mask, FRESH: tl.constexpr):
    """Adds to running statistics that no other program touches in this launch; FRESH: nothing stands there yet."""
    if FRESH:
        tl.store(to, value, mask=mask)
    else:
        tl.store(to, tl.load(to, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def _tile_statistics(
    tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts,
    ROWS: tl.constexpr, COLS: tl.constexpr, ID_COLUMNS: tl.constexpr, MASK: tl.constexpr, MANY_POSITIVES: tl.constexpr,
    SMOOTH: tl.constexpr, EXACT: tl.constexpr, REPAIR: tl.constexpr, FRESH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
    u = product(
        x, y, x_stride, y_stride, n_rows, n_cols, depth, row0, col0, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA
    )
    rows = row0 + tl.arange(0, BLOCK_M)
    cols = col0 + tl.arange(0, BLOCK_N)
    row_plane = tl.cdiv(n_cols, BLOCK_N).to(tl.int64) * n_rows
    col_plane = tl.cdiv(n_rows, BLOCK_M).to(tl.int64) * n_cols
    row_at = row_parts + (col0 // BLOCK_N).to(tl.int64) * n_rows + rows
    col_at = col_parts + (row0 // BLOCK_M).to(tl.int64) * n_cols + cols

    # A pair that is no candidate is marked by u = -inf, whose exponential is zero.
    if (row0 + BLOCK_M > n_rows) | (col0 + BLOCK_N > n_cols):
        u = tl.where(inside(rows, cols, n_rows, n_cols), u, float("-inf"))
    if MANY_POSITIVES:
        if not REPAIR:
            positive = own(rows, cols, shift)
            if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
                positive = positive | same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS)
            positive = positive & inside(rows, cols, n_rows, n_cols)
            at_positives = tl.where(positive, u, 0.0)
            counts = positive.to(tl.float32)
            if ROWS:
                tl.store(row_at + 2 * row_plane, tl.sum(at_positives, 1), mask=rows < n_rows)
                tl.store(row_at + 3 * row_plane, tl.sum(counts, 1), mask=rows < n_rows)
            if COLS:
                tl.store(col_at + 2 * col_plane, tl.sum(at_positives, 0), mask=cols < n_cols)
                tl.store(col_at + 3 * col_plane, tl.sum(counts, 0), mask=cols < n_cols)
    else:
        if not REPAIR:
            if meets_diagonal(row0, col0, shift, BLOCK_M, BLOCK_N):
                # A pair's row and column share the one entry, so that one reduction serves both.
                at_pair = tl.sum(tl.where(own(rows, cols, shift), u, 0.0), 1)
                partner = rows + shift
                paired = (rows < n_rows) & (partner >= col0) & (partner < tl.minimum(col0 + BLOCK_N, n_cols))
                if ROWS:
                    _add(row_stats + 2 * row_stats_stride + rows, at_pair, paired, FRESH)
                    _add(row_stats + 3 * row_stats_stride + rows, 1.0, paired, FRESH)
                if COLS:
                    _add(col_stats + 2 * col_stats_stride + partner, at_pair, paired, FRESH)
                    _add(col_stats + 3 * col_stats_stride + partner, 1.0, paired, FRESH)
    doubtful = False
    if MASK:
        if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
            if EXACT:
                others = same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS) & (own(rows, cols, shift) == 0)
                if SMOOTH and REPAIR:
                    others = others & inside(rows, cols, n_rows, n_cols)
                    at_others = tl.where(others, u, 0.0)
                    counts = others.to(tl.float32)
                    if ROWS:
                        tl.store(row_at + 2 * row_plane, -tl.sum(at_others, 1), mask=rows < n_rows)
                        tl.store(row_at + 3 * row_plane, -tl.sum(counts, 1), mask=rows < n_rows)
                    if COLS:
                        tl.store(col_at + 2 * col_plane, -tl.sum(at_others, 0), mask=cols < n_cols)
                        tl.store(col_at + 3 * col_plane, -tl.sum(counts, 0), mask=cols < n_cols)
                u = tl.where(others, float("-inf"), u)
            doubtful = True
    if SMOOTH and not REPAIR:
        candidate = u != float("-inf")
        at_candidates = tl.where(candidate, u, 0.0)
        counts = candidate.to(tl.float32)
        plane: tl.constexpr = 2 + 2 * MANY_POSITIVES
        if ROWS:
            tl.store(row_at + plane * row_plane, tl.sum(at_candidates, 1), mask=rows < n_rows)
            tl.store(row_at + (plane + 1) * row_plane, tl.sum(counts, 1), mask=rows < n_rows)
        if COLS:
            tl.store(col_at + plane * col_plane, tl.sum(at_candidates, 0), mask=cols < n_cols)
            tl.store(col_at + (plane + 1) * col_plane, tl.sum(counts, 0), mask=cols < n_cols)

    if EXACT:
        if ROWS:
            row_ref, row_sum = _exact_statistics(u, s2, 1)
        if COLS:
            col_ref, col_sum = _exact_statistics(u, s2, 0)
    else:
        highest = tl.max(u)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        e = exp2(tl.fma(u, s2, -(highest * s2)))
        smallest = 1.0
        if ROWS:
            row_ref = tl.full((BLOCK_M,), 0.0, tl.float32) + highest
            row_sum = tl.sum(e, 1)
            smallest = tl.min(tl.where(rows < n_rows, row_sum, 1.0))
        if COLS:
            col_ref = tl.full((BLOCK_N,), 0.0, tl.float32) + highest
            col_sum = tl.sum(e, 0)
            smallest = tl.minimum(smallest, tl.min(tl.where(cols < n_cols, col_sum, 1.0)))
        tl.store(doubts + tile, (doubtful | (smallest < SMALLEST_SUM)).to(tl.int32))
    if ROWS:
        tl.store(row_at, row_ref, mask=rows < n_rows)
        tl.store(row_at + row_plane, row_sum, mask=rows < n_rows)
    if COLS:
        tl.store(col_at, col_ref, mask=cols < n_cols)
        tl.store(col_at + col_plane, col_sum, mask=cols < n_cols)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def statistics_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, scale,
    row_stats, col_stats, row_stats_stride, col_stats_stride,
    row_parts, col_parts, doubts, n_programs,
    ROWS: tl.constexpr, COLS: tl.constexpr, ID_COLUMNS: tl.constexpr, MASK: tl.constexpr, MANY_POSITIVES: tl.constexpr,
    SMOOTH: tl.constexpr, EXACT: tl.constexpr, REPAIR: tl.constexpr, FRESH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Statistics of every tile: (reference, sum of 2^(s2 (u - reference))) of its rows and of its columns.

    row_parts: (K, column tiles, n_rows) float32, K = 2 + 2 MANY_POSITIVES + 2 SMOOTH: reference, sum, then sum and
    count of positives, then sum and count of candidates. col_parts: (K, row tiles, n_cols) likewise. Where every row
    has one positive at most, the one tile that holds it adds it to the running statistics itself (FRESH: sets it).

    One exponential per element serves the tile's row and column alike, relative to the tile's maximum. doubts: (tiles,)
    int32, set where some sum came out too small for that, or where ids may agree (MASK). A second launch (EXACT,
    REPAIR) does those tiles again: each row and column relative to its own maximum, and without the pairs left out,
    whose sum and count (SMOOTH) it writes with the sign turned. One launch for all would spill tiles from registers.
    """
    tiles_m = tl.cdiv(n_rows, BLOCK_M)
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, n_programs, flatten=FLATTEN):
        if REPAIR:
            wanted = tl.load(doubts + tile) != 0
        else:
            wanted = True
        if wanted:
            _tile_statistics(
                tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, s2,
                row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts,
                ROWS, COLS, ID_COLUMNS, MASK, MANY_POSITIVES, SMOOTH, EXACT, REPAIR, FRESH,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION, USE_TMA,
            )  # fmt: skip


@triton.jit
def _plane_sum(plane, at, there, n, tiles, BLOCK: tl.constexpr, STEP: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, tiles, STEP):
        steps = first + tl.arange(0, STEP)
        mask = (steps < tiles)[:, None] & there[None, :]
        total += tl.sum(tl.load(plane + steps.to(tl.int64)[:, None] * n + at[None, :], mask=mask, other=0.0), 0)
    return total


@triton.jit
def _merge(
    parts, stats, stats_stride, n, tiles, block, s, smoothing,
    MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, FRESH: tl.constexpr, LOSS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merges BLOCK rows; returns the sum of their losses (LOSS)."""
    s2 = s * LOG2_E
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    plane = tiles.to(tl.int64) * n
    if FRESH:
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
    else:
        highest = tl.load(stats + at, mask=there, other=float("-inf"))
        total = exp2(tl.load(stats + stats_stride + at, mask=there, other=float("-inf")) * LOG2_E)
    for first in range(0, tiles, STEP):
        steps = first + tl.arange(0, STEP)
        offset = steps.to(tl.int64)[:, None] * n + at[None, :]
        mask = (steps < tiles)[:, None] & there[None, :]
        reference = tl.load(parts + offset, mask=mask, other=float("-inf"))
        sums = tl.load(parts + plane + offset, mask=mask, other=0.0)
        new = tl.maximum(highest, tl.max(reference, 0))
        anchor = tl.where(new == float("-inf"), 0.0, new)
        # The tile subtracted s2 * reference as rounded to float32; what the rounding took is given back.
        lost = tl.where(reference == float("-inf"), 0.0, tl.fma(reference, -s2, reference * s2))
        sums *= exp2((reference - anchor[None, :]) * s2 + lost)
        total = total * exp2((highest - anchor) * s2) + tl.sum(sums, 0)
        highest = new
    log_sum = tl.log2(total) * LN_2
    tl.store(stats + at, highest, mask=there)
    tl.store(stats + stats_stride + at, log_sum, mask=there)
    if MANY_POSITIVES:
        _add(
            stats + 2 * stats_stride + at, _plane_sum(parts + 2 * plane, at, there, n, tiles, BLOCK, STEP), there, FRESH
        )
        _add(
            stats + 3 * stats_stride + at, _plane_sum(parts + 3 * plane, at, there, n, tiles, BLOCK, STEP), there, FRESH
        )
    if SMOOTH:
        extra = parts + (2 + 2 * MANY_POSITIVES) * plane
        _add(stats + 4 * stats_stride + at, _plane_sum(extra, at, there, n, tiles, BLOCK, STEP), there, FRESH)
        _add(stats + 5 * stats_stride + at, _plane_sum(extra + plane, at, there, n, tiles, BLOCK, STEP), there, FRESH)
    loss = 0.0
    if LOSS:
        target = tl.load(stats + 2 * stats_stride + at, mask=there, other=0.0)
        target /= tl.load(stats + 3 * stats_stride + at, mask=there, other=1.0)
        if SMOOTH:
            mean = tl.load(stats + 4 * stats_stride + at, mask=there, other=0.0)
            mean /= tl.load(stats + 5 * stats_stride + at, mask=there, other=1.0)
            target = (1 - smoothing) * target + smoothing * mean
        loss = tl.sum(tl.where(there, s * (highest - target) + log_sum, 0.0))
    return loss


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "row_tiles", "col_tiles", "row_blocks"])
def merge_kernel(
    row_parts, col_parts, row_stats, col_stats, row_stats_stride, col_stats_stride,
    n_rows, n_cols, row_tiles, col_tiles, row_blocks, scale, loss_parts, share, smoothing,
    ROWS: tl.constexpr, COLS: tl.constexpr,
    MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, FRESH: tl.constexpr, LOSS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merges the tiles' statistics into the running ones (FRESH: makes them), in the tiles' order.

    The first `row_blocks` programs each take BLOCK rows, the others BLOCK columns. LOSS: every program also writes its
    rows' loss, times `share`, to loss_parts (programs,).
    """
    program = tl.program_id(0)
    s = tl.load(scale).to(tl.float32)
    if not COLS:
        loss = _merge(
            row_parts, row_stats, row_stats_stride, n_rows, col_tiles, program, s, smoothing,
            MANY_POSITIVES, SMOOTH, FRESH, LOSS, BLOCK, STEP,
        )  # fmt: skip
    elif not ROWS:
        loss = _merge(
            col_parts, col_stats, col_stats_stride, n_cols, row_tiles, program, s, smoothing,
            MANY_POSITIVES, SMOOTH, FRESH, LOSS, BLOCK, STEP,
        )  # fmt: skip
    elif program < row_blocks:
        loss = _merge(
            row_parts, row_stats, row_stats_stride, n_rows, col_tiles, program, s, smoothing,
            MANY_POSITIVES, SMOOTH, FRESH, LOSS, BLOCK, STEP,
        )  # fmt: skip
    else:
        loss = _merge(
            col_parts, col_stats, col_stats_stride, n_cols, row_tiles, program - row_blocks, s, smoothing,
            MANY_POSITIVES, SMOOTH, FRESH, LOSS, BLOCK, STEP,
        )  # fmt: skip
    if LOSS:
        tl.store(loss_parts + program, loss * share)


@triton.jit
def _log_sum_exp(stats, stats_stride, at, there, s2):
    """A row's log-sum-exp over its candidates, base 2, in two parts: (largest u, log2 of the sum relative to it)."""
    highest = tl.load(stats + at, mask=there, other=0.0)
    return highest, tl.load(stats + stats_stride + at, mask=there, other=0.0) * LOG2_E


@triton.jit
def _range(stats, stats_stride, at, there, s2):
    """Lowest and highest log-sum-exp, base 2, of a tile's rows or columns."""
    highest, log_sum = _log_sum_exp(stats, stats_stride, at, there, s2)
    lse = highest * s2 + log_sum
    return tl.min(tl.where(there, lse, float("inf"))), tl.max(tl.where(there, lse, float("-inf")))


@triton.jit
def _tile_weights(
    tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, g, g_stride, sum_parts, doubts, smoothing, gain,
    ROWS: tl.constexpr, COLS: tl.constexpr, ID_COLUMNS: tl.constexpr, MASK: tl.constexpr, MANY_POSITIVES: tl.constexpr,
    SMOOTH: tl.constexpr, EXACT: tl.constexpr, WANT_SUM: tl.constexpr, DEFER: tl.constexpr,
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
    u = product(
        x, y, x_stride, y_stride, n_rows, n_cols, depth, row0, col0, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA
    )
    if ROWS:
        row_max, row_log = _log_sum_exp(row_stats, row_stats_stride, rows, rows < n_rows, s2)
        row_lse = row_max * s2 + row_log
    if COLS:
        col_max, col_log = _log_sum_exp(col_stats, col_stats_stride, cols, cols < n_cols, s2)
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
        if ROWS:
            w -= (smoothing / tl.load(row_stats + 5 * row_stats_stride + rows, mask=rows < n_rows, other=1.0))[:, None]
        if COLS:
            w -= (smoothing / tl.load(col_stats + 5 * col_stats_stride + cols, mask=cols < n_cols, other=1.0))[None, :]
    if MANY_POSITIVES:
        positive = own(rows, cols, shift)
        if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
            positive = positive | same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS)
        if ROWS:
            share = (1 - smoothing) / tl.load(row_stats + 3 * row_stats_stride + rows, mask=rows < n_rows, other=1.0)
            w -= tl.where(positive, share[:, None], 0.0)
        if COLS:
            share = (1 - smoothing) / tl.load(col_stats + 3 * col_stats_stride + cols, mask=cols < n_cols, other=1.0)
            w -= tl.where(positive, share[None, :], 0.0)
    else:
        if MASK and DEFER:
            tl.store(doubts + tile, may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS).to(tl.int32))
        elif MASK:
            if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
                others = same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS) & (own(rows, cols, shift) == 0)
                w = tl.where(others, 0.0, w)
        if meets_diagonal(row0, col0, shift, BLOCK_M, BLOCK_N):
            # Before rounding to g's dtype: a well-trained pair's weight is 2 - 2 + little.
            w = tl.where(own(rows, cols, shift), w - (ROWS + COLS) * (1 - smoothing), w)
    if WANT_SUM:
        tl.store(sum_parts + tile, gain * tl.sum(tl.where(inside(rows, cols, n_rows, n_cols), w * u, 0.0)))
    store_tile(g, g_stride, w * gain, row0, col0, n_rows, n_cols, USE_TMA)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def weights_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, scale,
    row_stats, col_stats, row_stats_stride, col_stats_stride,
    g, g_stride, sum_parts, doubts, n_programs, smoothing, gain,
    ROWS: tl.constexpr, COLS: tl.constexpr, ID_COLUMNS: tl.constexpr, MASK: tl.constexpr, MANY_POSITIVES: tl.constexpr,
    SMOOTH: tl.constexpr, EXACT: tl.constexpr, WANT_SUM: tl.constexpr, DEFER: tl.constexpr, REPAIR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """G = softmax over rows + softmax over columns - targets, times `gain`, rounded once to g's dtype.

    g: (n_rows, n_cols), row stride g_stride. sum_parts: (tiles,) float32, sum of G u over every tile (WANT_SUM).
    doubts: (tiles,) int32, set where ids may agree (MASK, DEFER); a second launch (REPAIR) does those tiles again.
    """
    tiles_m = tl.cdiv(n_rows, BLOCK_M)
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, n_programs, flatten=FLATTEN):
        if REPAIR:
            wanted = tl.load(doubts + tile) != 0
        else:
            wanted = True
        if wanted:
            _tile_weights(
                tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, s2,
                row_stats, col_stats, row_stats_stride, col_stats_stride, g, g_stride, sum_parts, doubts,
                smoothing, gain, ROWS, COLS, ID_COLUMNS, MASK, MANY_POSITIVES, SMOOTH, EXACT, WANT_SUM, DEFER,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION, USE_TMA,
            )  # fmt: skip
