"""InfoNCE's weights of large chunks by two groups of warps in turn; see `kernels_pingpong`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from hf_infcl.ops.triton import kernels_weights
from hf_infcl.ops.triton.kernels_pingpong import (
    BLOCK,
    LOADER_REGISTERS,
    LOG2_E,
    REGISTERS,
    SEVERAL,
    STEP,
    UNSPECIALIZED,
    WARPS,
    async_store,
    barriers,
    cells_of,
    exp2,
    leave_out,
    load,
    meets_diagonal,
    most,
    own_pairs,
    product,
    share_of,
)

WIDEST_SPREAD = gl.constexpr(kernels_weights.WIDEST_SPREAD.value)


@gluon.jit
def _extremes(a_low, a_high, b_low, b_high):
    return gl.minimum(a_low, b_low), gl.maximum(a_high, b_high)


@gluon.jit
def _log_sum_exp(stats, stats_stride, at):
    """(largest u, logarithm of the sum relative to it) of rows or columns."""
    return gl.load(stats + at), gl.load(stats + stats_stride + at)


@gluon.jit
def _by_row(values, L: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(1, L)), 1)


@gluon.jit
def _by_col(values, L: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(0, L)), 0)


@gluon.jit
def _store_quarter(g, room, w, row0, col0):
    """Writes 32 columns of a tile of G, when the store before the last has left its room."""
    tma.store_wait(1)
    room.store(w)
    fence_async_shared()
    async_store(g, [row0, col0], room)


@gluon.jit
def _halves(w):
    """Left and right half of a tile."""
    return gl.split(gl.permute(gl.reshape(w, (BLOCK, 2, w.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _weights_group(
    boxes, gs, g, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related, related_stride, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, doubts, smoothing, gain,
    MINE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr,
    MANY_POSITIVES: gl.constexpr, SMOOTH: gl.constexpr, GROUP: gl.constexpr, L: gl.constexpr, STEPS: gl.constexpr,
    KEPT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    each = gl.arange(0, BLOCK, layout=EACH)
    pairs_n = n_cols // (2 * BLOCK)
    row_max = gl.zeros((BLOCK,), gl.float32, EACH)
    row_log, col_max, col_log = row_max, row_max, row_max
    next_row0, next_col0 = first // pairs_n * BLOCK, (2 * (first % pairs_n) + MINE) * BLOCK
    following = (0, 0, 0, 0)
    if ROWS:
        row_max, row_log = _log_sum_exp(row_stats, row_stats_stride, next_row0 + each)
    if COLS:
        col_max, col_log = _log_sum_exp(col_stats, col_stats_stride, next_col0 + each)
    if IDS:
        following = cells_of(related, related_stride, next_row0, next_col0)
    share = 0.0
    if SMOOTH and not IDS:
        # Nothing is left out: every row of the chunk has as many candidates as its first, and so has every column.
        if ROWS:
            share += smoothing / gl.load(row_stats + 5 * row_stats_stride)
        if COLS:
            share += smoothing / gl.load(col_stats + 5 * col_stats_stride)
    for pair in range(first, last):
        row, col = pair // pairs_n, pair % pairs_n
        row0, col0 = row * BLOCK, (2 * col + MINE) * BLOCK
        row_lse, col_lse = row_max * s2 + row_log * LOG2_E, col_max * s2 + col_log * LOG2_E
        if ROWS and COLS:
            lows, highs = gl.minimum(row_lse, col_lse), gl.maximum(row_lse, col_lse)
        elif ROWS:
            lows, highs = row_lse, row_lse
        else:
            lows, highs = col_lse, col_lse
        lowest, highest = gl.reduce((lows, highs), 0, _extremes)
        u = product(
            boxes, x_full, x_empty, full, empty, turn, pair - first, row - first // pairs_n, col == pairs_n - 1,
            MINE, L, STEPS, KEPT, STAGES,
        )  # fmt: skip
        # The next tile's arrive while this one is finished. Nothing may use them before: it would wait.
        then = gl.minimum(pair + 1, last - 1)
        next_row0, next_col0 = then // pairs_n * BLOCK, (2 * (then % pairs_n) + MINE) * BLOCK
        cells = following
        if ROWS:
            row_max, row_log = _log_sum_exp(row_stats, row_stats_stride, next_row0 + each)
        if COLS:
            col_max, col_log = _log_sum_exp(col_stats, col_stats_stride, next_col0 + each)
        if IDS:
            following = cells_of(related, related_stride, next_row0, next_col0)

        if highest - lowest <= WIDEST_SPREAD:
            # One exponential: 2^(s2 u - r) + 2^(s2 u - c) = 2^(s2 u - m) (2^(m - r) + 2^(m - c)).
            middle = 0.5 * (highest + lowest)
            e = exp2(gl.fma(u, s2, -middle))
            if ROWS and COLS:
                w = e * (_by_row(exp2(middle - row_lse), L) + _by_col(exp2(middle - col_lse), L))
            elif ROWS:
                w = e * _by_row(exp2(middle - row_lse), L)
            else:
                w = e * _by_col(exp2(middle - col_lse), L)
        else:
            if ROWS and COLS:
                w = exp2(gl.fma(u, s2, -_by_row(row_lse, L))) + exp2(gl.fma(u, s2, -_by_col(col_lse, L)))
            elif ROWS:
                w = exp2(gl.fma(u, s2, -_by_row(row_lse, L)))
            else:
                w = exp2(gl.fma(u, s2, -_by_col(col_lse, L)))

        if SMOOTH:
            if IDS:
                if ROWS:
                    w -= _by_row(smoothing / gl.load(row_stats + 5 * row_stats_stride + row0 + each), L)
                if COLS:
                    w -= _by_col(smoothing / gl.load(col_stats + 5 * col_stats_stride + col0 + each), L)
            else:
                w -= share
        if IDS:
            found = most(cells)
            put_off = found >= SEVERAL if BY_PLACE else found > 0
            tiles_n = n_cols // BLOCK
            group = row // GROUP * GROUP
            height = gl.minimum(n_rows // BLOCK - group, GROUP)
            gl.store(doubts + group * tiles_n + (2 * col + MINE) * height + row - group, put_off.to(gl.int32))
            if BY_PLACE:
                if found > 0:
                    w = leave_out(w, 0.0, cells, row0, col0)
        # Targets go before rounding to g's dtype: a well-trained pair's weight is 2 - 2 + little.
        if meets_diagonal(row0, col0, shift):
            own = own_pairs(row0, col0, shift, L)
            if MANY_POSITIVES:
                if ROWS:
                    counts = gl.load(row_stats + 3 * row_stats_stride + row0 + each)
                    w -= gl.where(own, _by_row((1 - smoothing) / counts, L), 0.0)
                if COLS:
                    counts = gl.load(col_stats + 3 * col_stats_stride + col0 + each)
                    w -= gl.where(own, _by_col((1 - smoothing) / counts, L), 0.0)
            else:
                w = gl.where(own, w - (ROWS + COLS) * (1 - smoothing), w)
        left, right = _halves((w * gain).to(g.dtype))
        a, b = _halves(left)
        _store_quarter(g, gs.index(2 * MINE), a, row0, col0)
        _store_quarter(g, gs.index(2 * MINE + 1), b, row0, col0 + BLOCK // 4)
        a, b = _halves(right)
        _store_quarter(g, gs.index(2 * MINE), a, row0, col0 + BLOCK // 2)
        _store_quarter(g, gs.index(2 * MINE + 1), b, row0, col0 + 3 * BLOCK // 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def weights_pingpong_kernel(
    x, y, g, n_rows, n_cols, shift, related, related_stride, scale, row_stats, col_stats, row_stats_stride,
    col_stats_stride, doubts, smoothing, gain, n_programs,
    ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr, MANY_POSITIVES: gl.constexpr,
    SMOOTH: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, KEPT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What `kernels_weights.weights_kernel` writes when it neither is EXACT nor a REPAIR nor wants a sum.

    g: a descriptor, (BLOCK, BLOCK / 4) at a time. Tiles that are put off are written too, and again by the second
    launch; doubts tell which. The rest as for `statistics_pingpong_kernel`.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    boxes = gl.allocate_shared_memory(x.dtype, [KEPT + STAGES, BLOCK, STEP], x.layout)
    gs = gl.allocate_shared_memory(g.dtype, [4, BLOCK, BLOCK // 4], g.layout)
    x_full, x_empty = barriers(1, 1), barriers(1, 2)
    full, empty, turn = barriers(STAGES, 1), barriers(STAGES, 1), barriers(2, 1)
    fence_async_shared()
    first, last = share_of(n_rows, n_cols, n_programs)
    s2 = gl.load(scale).to(gl.float32) * LOG2_E
    gl.warp_specialize(
        [
            (_weights_group, (
                boxes, gs, g, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related,
                related_stride, s2, row_stats, col_stats, row_stats_stride, col_stats_stride, doubts, smoothing, gain,
                0, ROWS, COLS, IDS, BY_PLACE, MANY_POSITIVES, SMOOTH, GROUP, L, STEPS, KEPT, STAGES,
            )),
            (_weights_group, (
                boxes, gs, g, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related,
                related_stride, s2, row_stats, col_stats, row_stats_stride, col_stats_stride, doubts, smoothing, gain,
                1, ROWS, COLS, IDS, BY_PLACE, MANY_POSITIVES, SMOOTH, GROUP, L, STEPS, KEPT, STAGES,
            )),
            (load, (
                x, y, boxes, x_full, x_empty, full, empty, first, last, n_cols // (2 * BLOCK), STEPS, KEPT, STAGES,
            )),
        ],
        [WARPS, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
