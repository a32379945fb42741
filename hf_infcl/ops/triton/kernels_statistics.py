"""InfoNCE's forward epilogue on the logits tile: statistics of its rows and columns, and their merge.

Logarithms are to base 2 inside the kernels (the hardware's exponential); s2 = s log2(e).
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_common import (
    LN_2,
    LOG2_E,
    SCAN,
    SEVERAL,
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

# One exponential serves a tile's rows and columns while every sum stays above this. What float32 flushes to
# zero (< 2^-126 each) is then below 2^-28 of any sum.
SMALLEST_SUM = tl.constexpr(2.0**-90)


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
def _store_sums(
    row_at, row_plane, col_at, col_plane, first, sign, u, chosen, there_rows, there_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes, to planes `first` and the next, `sign` times the sum of u over a tile's chosen pairs and their number."""
    at_chosen = tl.where(chosen, sign * u, 0.0)
    counts = tl.where(chosen, sign, 0.0)
    if ROWS:
        tl.store(row_at + first * row_plane, tl.sum(at_chosen, 1), mask=there_rows)
        tl.store(row_at + (first + 1) * row_plane, tl.sum(counts, 1), mask=there_rows)
    if COLS:
        tl.store(col_at + first * col_plane, tl.sum(at_chosen, 0), mask=there_cols)
        tl.store(col_at + (first + 1) * col_plane, tl.sum(counts, 0), mask=there_cols)


@triton.jit
def _tile_statistics(
    tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts, kept, kept_stride,
    kept_rows, listed,
    ROWS: tl.constexpr, COLS: tl.constexpr, MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, EXACT: tl.constexpr,
    REPAIR: tl.constexpr, FRESH: tl.constexpr, KEEP: tl.constexpr, ID_COLUMNS: tl.constexpr, CELLS: tl.constexpr,
    MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
    # Where ids are to be compared: in none of the tiles that share an exponential.
    found = 0
    if ID_COLUMNS > 0 and EXACT:
        if MANY_POSITIVES and FRESH:
            found = SEVERAL
        else:
            found = relates(
                related, related_stride, x_ids, y_ids, row0, col0, n_rows, n_cols, ID_COLUMNS, CELLS, BLOCK_M, BLOCK_N
            )
    alike = found > 0
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
        # Positives of tiles in which ids may agree go through the planes, those of the others straight in.
        if alike:
            positive = own(rows, cols, shift) | same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS)
            positive = positive & inside(rows, cols, n_rows, n_cols)
            _store_sums(
                row_at, row_plane, col_at, col_plane, 2, 1.0, u, positive, rows < n_rows, cols < n_cols, ROWS, COLS
            )
        pairs_are_due = (alike == 0) and not REPAIR
    elif REPAIR:
        # A first launch takes the pairs of the tiles that it does, also where the second does them again.
        pairs_are_due = is_put_off(found, MASK and CELLS and not SMOOTH)
    else:
        pairs_are_due = True
    if pairs_are_due:
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
    if MASK and EXACT:
        if alike:
            others = same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS) & (own(rows, cols, shift) == 0)
            if SMOOTH and not FRESH:
                left_out = others & inside(rows, cols, n_rows, n_cols)
                _store_sums(
                    row_at, row_plane, col_at, col_plane, 2, -1.0, u, left_out, rows < n_rows, cols < n_cols, ROWS, COLS
                )
            u = tl.where(others, float("-inf"), u)
    elif MASK and CELLS:
        if listed > 0:
            u = leave_out(u, float("-inf"), related, related_stride, row0, col0, n_rows, n_cols, BLOCK_M, BLOCK_N)
    if SMOOTH and FRESH:
        first: tl.constexpr = 2 + 2 * MANY_POSITIVES
        there = u != float("-inf")
        _store_sums(
            row_at, row_plane, col_at, col_plane, first, 1.0, u, there, rows < n_rows, cols < n_cols, ROWS, COLS
        )

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
        if KEEP:
            if row0 < kept_rows:
                store_tile(kept, kept_stride, e, row0, col0, n_rows, n_cols, USE_TMA)
    if ROWS:
        tl.store(row_at, row_ref, mask=rows < n_rows)
        tl.store(row_at + row_plane, row_sum, mask=rows < n_rows)
    if COLS:
        tl.store(col_at, col_ref, mask=cols < n_cols)
        tl.store(col_at + col_plane, col_sum, mask=cols < n_cols)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "kept_rows"])
def statistics_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, scale,
    row_stats, col_stats, row_stats_stride, col_stats_stride,
    row_parts, col_parts, doubts, counter, kept, kept_stride, kept_rows, n_programs,
    ROWS: tl.constexpr, COLS: tl.constexpr, MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, EXACT: tl.constexpr,
    REPAIR: tl.constexpr, FRESH: tl.constexpr, KEEP: tl.constexpr, ID_COLUMNS: tl.constexpr, CELLS: tl.constexpr,
    MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Statistics of every tile: (reference, sum of 2^(s2 (u - reference))) of its rows and of its columns.

    row_parts: (K, column tiles, n_rows) float32: reference, sum, then with MANY_POSITIVES sum and count of positives,
    then with SMOOTH sum and count of candidates. col_parts: (K, row tiles, n_cols) likewise.

    One exponential per element serves the tile's row and column alike, relative to the tile's maximum. doubts: (tiles,)
    int32, set where some sum came out too small for that, or where ids have to be compared: tiles that the first launch
    leaves out. A second launch (EXACT, REPAIR) does them: each row and column relative to its own maximum, with its
    positives and without the pairs left out. One launch for all would spill tiles from registers.

    KEEP: the shared exponentials of the first kept_rows rows are stored too. kept: (kept_rows, n_cols) bfloat16, row
    stride kept_stride, or its descriptor (USE_TMA). Those of tiles in doubt are of no use.

    counter: what `merge_kernel` counts in, set to zero by the launch that is EXACT (FRESH).

    FRESH: the chunk is all there is. What every row has one of is set instead of added to, and the planes hold all
    candidates. Else they hold, with the sign turned, those left out, and are zero where a tile writes none.
    """
    tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    if FRESH and EXACT:
        if tl.program_id(0) == 0:
            tl.store(counter, 0.0)
    if REPAIR:
        for start in range(tl.program_id(0), tiles, n_programs * SCAN):
            at = start + n_programs * tl.arange(0, SCAN)
            left = tl.load(doubts + at, mask=at < tiles, other=0) != 0
            tile = tl.min(tl.where(left, at, tiles), 0)
            while tile < tiles:
                _tile_statistics(
                    tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride,
                    s2, row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts, kept,
                    kept_stride, kept_rows, 0,
                    ROWS, COLS, MANY_POSITIVES, SMOOTH, EXACT, REPAIR, FRESH, KEEP, ID_COLUMNS, CELLS, MASK,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION, USE_TMA,
                )  # fmt: skip
                tile = tl.min(tl.where(left & (at > tile), at, tiles), 0)
        return
    for tile in range(tl.program_id(0), tiles, n_programs):
        listed = 0
        if ID_COLUMNS > 0 and not EXACT:
            row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
            listed = relates(
                related, related_stride, x_ids, y_ids, row0, col0, n_rows, n_cols, ID_COLUMNS, CELLS, BLOCK_M, BLOCK_N
            )
            wanted = is_put_off(listed, MASK and CELLS and not SMOOTH) == 0
            if wanted == 0:
                tl.store(doubts + tile, 1)
        else:
            wanted = True
        if wanted:
            _tile_statistics(
                tile, x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride,
                s2, row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts, kept,
                kept_stride, kept_rows, listed,
                ROWS, COLS, MANY_POSITIVES, SMOOTH, EXACT, REPAIR, FRESH, KEEP, ID_COLUMNS, CELLS, MASK,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION, USE_TMA,
            )  # fmt: skip


PARTS = tl.constexpr(256)  # of the loss, added up at a time


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
    n_rows, n_cols, row_tiles, col_tiles, row_blocks, scale, loss_parts, loss, share, smoothing,
    ROWS: tl.constexpr, COLS: tl.constexpr,
    MANY_POSITIVES: tl.constexpr, SMOOTH: tl.constexpr, FRESH: tl.constexpr, LOSS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merges the tiles' statistics into the running ones (FRESH: makes them), in the tiles' order.

    The first `row_blocks` programs each take BLOCK rows, the others BLOCK columns. LOSS: every program also writes its
    rows' loss, times `share`, to loss_parts (1 + programs,) float32, whose first counts them from zero on, and the last
    to do so their sum to loss: in their order, so that it is the same whoever comes last.
    """
    program = tl.program_id(0)
    s = tl.load(scale).to(tl.float32)
    if not COLS:
        mine = _merge(
            row_parts, row_stats, row_stats_stride, n_rows, col_tiles, program, s, smoothing,
            MANY_POSITIVES, SMOOTH, FRESH, LOSS, BLOCK, STEP,
        )  # fmt: skip
    elif not ROWS:
        mine = _merge(
            col_parts, col_stats, col_stats_stride, n_cols, row_tiles, program, s, smoothing,
            MANY_POSITIVES, SMOOTH, FRESH, LOSS, BLOCK, STEP,
        )  # fmt: skip
    elif program < row_blocks:
        mine = _merge(
            row_parts, row_stats, row_stats_stride, n_rows, col_tiles, program, s, smoothing,
            MANY_POSITIVES, SMOOTH, FRESH, LOSS, BLOCK, STEP,
        )  # fmt: skip
    else:
        mine = _merge(
            col_parts, col_stats, col_stats_stride, n_cols, row_tiles, program - row_blocks, s, smoothing,
            MANY_POSITIVES, SMOOTH, FRESH, LOSS, BLOCK, STEP,
        )  # fmt: skip
    if LOSS:
        tl.store(loss_parts + 1 + program, mine * share)
        if tl.atomic_add(loss_parts, 1.0) == tl.num_programs(0) - 1:
            total = tl.zeros((PARTS,), tl.float32)
            for start in range(0, tl.num_programs(0), PARTS):
                at = start + tl.arange(0, PARTS)
                # Past this multiprocessor's own cache, which knows nothing of what others write.
                total += tl.load(loss_parts + 1 + at, mask=at < tl.num_programs(0), other=0.0, cache_modifier=".cg")
            tl.store(loss, tl.sum(total, 0))
