"""InfoNCE's two epilogues on the logits tile, and the merge of per-tile statistics.

Logarithms are to base 2 inside the kernels (the hardware's exponential); s2 = s log2(e).
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_common import (
    exp2,
    inside,
    may_match,
    meets_diagonal,
    own,
    product,
    same,
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
def _add(to, value, mask):
    """Adds to running statistics that no other program touches in this launch."""
    tl.store(to, tl.load(to, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def _tile_statistics(
    tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts,
    ROWS: tl.constexpr, COLS: tl.constexpr, ID_COLUMNS: tl.constexpr, MASK: tl.constexpr, MANY_POSITIVES: tl.constexpr,
    SMOOTH: tl.constexpr, EXACT: tl.constexpr, REPAIR: tl.constexpr,
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
                    _add(row_stats + 2 * row_stats_stride + rows, at_pair, paired)
                    _add(row_stats + 3 * row_stats_stride + rows, 1.0, paired)
                if COLS:
                    _add(col_stats + 2 * col_stats_stride + partner, at_pair, paired)
                    _add(col_stats + 3 * col_stats_stride + partner, 1.0, paired)
        if MASK:
            if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
                others = same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS) & (own(rows, cols, shift) == 0)
                u = tl.where(others, float("-inf"), u)
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
        tl.store(doubts + tile, (smallest < SMALLEST_SUM).to(tl.int32))
    if ROWS:
        tl.store(row_at, row_ref, mask=rows < n_rows)
        tl.store(row_at + row_plane, row_sum, mask=rows < n_rows)
    if COLS:
        tl.store(col_at, col_ref, mask=cols < n_cols)
        tl.store(col_at + col_plane, col_sum, mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift"])
def statistics_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, scale,
    row_stats, col_stats, row_stats_stride, col_stats_stride,
    row_parts, col_parts, doubts, n_programs,
    ROWS: tl.constexpr, COLS: tl.constexpr, ID_COLUMNS: tl.constexpr, MASK: tl.constexpr, MANY_POSITIVES: tl.constexpr,
    SMOOTH: tl.constexpr, EXACT: tl.constexpr, REPAIR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Statistics of every tile: (reference, sum of 2^(s2 (u - reference))) of its rows and of its columns.

    row_parts: (K, column tiles, n_rows) float32, K = 2 + 2 MANY_POSITIVES + 2 SMOOTH: reference, sum, then sum and count
    of positives, then sum and count of candidates. col_parts: (K, row tiles, n_cols) likewise. Where every row has one
    positive at most, the one tile that holds it adds it to the running statistics itself.

    One exponential per element serves the tile's row and column alike, relative to the tile's maximum. doubts: (tiles,)
    int32, set where some sum came out too small for that; a second launch (EXACT, REPAIR) does those tiles again, each
    row and column relative to its own maximum. To keep both in one launch would spill the tile from registers.
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
                ROWS, COLS, ID_COLUMNS, MASK, MANY_POSITIVES, SMOOTH, EXACT, REPAIR,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION, USE_TMA,
            )  # fmt: skip


@triton.jit
def _merge(
    parts, stats, stats_stride, n, tiles, block, s2,
    MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    plane = tiles.to(tl.int64) * n
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
    tl.store(stats + at, highest, mask=there)
    tl.store(stats + stats_stride + at, tl.log2(total) * LN_2, mask=there)
    # Planes 2 and 3 of the parts go to the statistics' rows 2 and 3 (positives), the last two to rows 4 and 5.
    for extra in tl.static_range(2 * MANY_POSITIVES + 2 * SMOOTH):
        more = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, tiles, STEP):
            steps = first + tl.arange(0, STEP)
            mask = (steps < tiles)[:, None] & there[None, :]
            offset = steps.to(tl.int64)[:, None] * n + at[None, :]
            more += tl.sum(tl.load(parts + (2 + extra) * plane + offset, mask=mask, other=0.0), 0)
        to = stats + (extra + (2 if MANY_POSITIVES else 4)) * stats_stride + at
        tl.store(to, tl.load(to, mask=there, other=0.0) + more, mask=there)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "row_tiles", "col_tiles", "row_blocks"])
def merge_kernel(
    row_parts, col_parts, row_stats, col_stats, row_stats_stride, col_stats_stride,
    n_rows, n_cols, row_tiles, col_tiles, row_blocks, scale,
    MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merges the tiles' statistics into the running ones, in the tiles' order: rows first, then columns.

    The first `row_blocks` programs each take BLOCK rows, the others BLOCK columns.
    """
    block = tl.program_id(0)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    if block < row_blocks:
        _merge(
            row_parts, row_stats, row_stats_stride, n_rows, col_tiles, block, s2, MANY_POSITIVES, SMOOTH, BLOCK, STEP
        )
    else:
        _merge(
            col_parts, col_stats, col_stats_stride, n_cols, row_tiles, block - row_blocks, s2,
            MANY_POSITIVES, SMOOTH, BLOCK, STEP,
        )  # fmt: skip


@triton.jit
def _log_sum_exp(stats, stats_stride, at, there, s2):
    """A row's log-sum-exp over its candidates, base 2, in two parts: (largest u, log2 of the sum relative to it)."""
    highest = tl.load(stats + at, mask=there, other=0.0)
    return highest, tl.load(stats + stats_stride + at, mask=there, other=0.0) * LOG2_E


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift"])
def weights_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, scale,
    row_stats, col_stats, row_stats_stride, col_stats_stride,
    g, g_stride, sum_parts, n_programs, smoothing, gain,
    ROWS: tl.constexpr, COLS: tl.constexpr, ID_COLUMNS: tl.constexpr, MASK: tl.constexpr, MANY_POSITIVES: tl.constexpr,
    SMOOTH: tl.constexpr, EXACT: tl.constexpr, WANT_SUM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """G = softmax over rows + softmax over columns - targets, times `gain`, rounded once to g's dtype.

    g: (n_rows, n_cols), row stride g_stride. sum_parts: (tiles,) float32, sum of G u over every tile (WANT_SUM).
    """
    tiles_m = tl.cdiv(n_rows, BLOCK_M)
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, n_programs, flatten=FLATTEN):
        row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
        u = product(
            x, y, x_stride, y_stride, n_rows, n_cols, depth, row0, col0, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA
        )
        rows = row0 + tl.arange(0, BLOCK_M)
        cols = col0 + tl.arange(0, BLOCK_N)
        lowest = float("inf")
        highest = float("-inf")
        if ROWS:
            row_max, row_log = _log_sum_exp(row_stats, row_stats_stride, rows, rows < n_rows, s2)
            row_lse = row_max * s2 + row_log
            lowest = tl.min(tl.where(rows < n_rows, row_lse, float("inf")))
            highest = tl.max(tl.where(rows < n_rows, row_lse, float("-inf")))
        if COLS:
            col_max, col_log = _log_sum_exp(col_stats, col_stats_stride, cols, cols < n_cols, s2)
            col_lse = col_max * s2 + col_log
            lowest = tl.minimum(lowest, tl.min(tl.where(cols < n_cols, col_lse, float("inf"))))
            highest = tl.maximum(highest, tl.max(tl.where(cols < n_cols, col_lse, float("-inf"))))

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
                w -= (smoothing / tl.load(row_stats + 5 * row_stats_stride + rows, mask=rows < n_rows, other=1.0))[
                    :, None
                ]
            if COLS:
                w -= (smoothing / tl.load(col_stats + 5 * col_stats_stride + cols, mask=cols < n_cols, other=1.0))[
                    None, :
                ]
        if MANY_POSITIVES:
            positive = own(rows, cols, shift)
            if ID_COLUMNS > 0:
                if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
                    positive = positive | same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS)
            if ROWS:
                share = (1 - smoothing) / tl.load(
                    row_stats + 3 * row_stats_stride + rows, mask=rows < n_rows, other=1.0
                )
                w -= tl.where(positive, share[:, None], 0.0)
            if COLS:
                share = (1 - smoothing) / tl.load(
                    col_stats + 3 * col_stats_stride + cols, mask=cols < n_cols, other=1.0
                )
                w -= tl.where(positive, share[None, :], 0.0)
        else:
            if MASK:
                if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
                    others = same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS) & (own(rows, cols, shift) == 0)
                    w = tl.where(others, 0.0, w)
            if meets_diagonal(row0, col0, shift, BLOCK_M, BLOCK_N):
                # Before rounding to g's dtype: a well-trained pair's weight is 2 - 2 + little.
                w = tl.where(own(rows, cols, shift), w - (ROWS + COLS) * (1 - smoothing), w)
        if WANT_SUM:
            tl.store(sum_parts + tile, gain * tl.sum(tl.where(inside(rows, cols, n_rows, n_cols), w * u, 0.0)))
        at = g + rows.to(tl.int64)[:, None] * g_stride + cols[None, :]
        tl.store(at, (w * gain).to(g.dtype.element_ty), mask=inside(rows, cols, n_rows, n_cols))
