"""The common tiles of large chunks on Hopper: two groups of warps take turns on the tensor cores (Gluon).

One warp loads. Of two groups of four warps each makes every other tile: while one multiplies, the other takes
exponentials, sums and stores, so that the tensor cores hardly wait. A program keeps its rows of X in shared memory and
streams Y past them, which halves what it reads: plain tiles are bound by the shared memory, which products read and the
copy engine fills. What comes out is, bit for bit, what the first launches of `kernels_statistics` and `kernels_weights`
write, whose second launches follow here too. Whole tiles only: rows divide by 128, columns by 256.

Barriers count what has happened, and a wait tells one phase from the next by its parity alone. So nobody may be two
phases behind: a group waits for its turn, which it gets when the other has seen all the data that came before its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hf_infcl.ops.triton import kernels_common, kernels_statistics, kernels_weights

# Rows and columns of a tile, and the depth of a step of its product.
BLOCK = gl.constexpr(128)
STEP = gl.constexpr(64)
WARPS = gl.constexpr(4)
# Registers of a thread that makes tiles and of one that loads: with twice the first, all that a multiprocessor has.
_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)

LOG2_E = gl.constexpr(kernels_common.LOG2_E.value)
CELL = gl.constexpr(kernels_common.CELL.value)
SEVERAL = gl.constexpr(kernels_common.SEVERAL.value)
SMALLEST_SUM = gl.constexpr(kernels_statistics.SMALLEST_SUM.value)
WIDEST_SPREAD = gl.constexpr(kernels_weights.WIDEST_SPREAD.value)

_UNSPECIALIZED = [
    "n_rows", "n_cols", "shift", "related_stride", "row_stats_stride", "col_stats_stride", "n_programs",
]  # fmt: skip

# Renamed after Triton 3.6.
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def _share(n_rows, n_cols, n_programs):
    """Pairs of tiles, side by side, that this program makes: [first, last), row of tiles by row of tiles."""
    pairs = (n_rows // BLOCK) * (n_cols // (2 * BLOCK))
    program = gl.program_id(0).to(gl.int64)
    return (program * pairs // n_programs).to(gl.int32), ((program + 1) * pairs // n_programs).to(gl.int32)


@gluon.jit
def _load(
    x, y, xs, ys, x_full, x_empty, full, empty, first, last, pairs_n, STEPS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Brings, tile after tile, what the two groups multiply; waits for whoever still reads what is there."""
    BYTES: gl.constexpr = BLOCK * STEP * x.dtype.primitive_bitwidth // 8
    count = 0
    run = 0
    row = -1
    for pair in range(first, last):
        at = pair // pairs_n
        if at != row:
            mbarrier.wait(x_empty.index(0), (run & 1) ^ 1)
            mbarrier.expect(x_full.index(0), STEPS * BYTES)
            for k in range(STEPS):
                _async_load(x, [at * BLOCK, k * STEP], x_full.index(0), xs.index(k))
            run += 1
        row = at
        col0 = (pair % pairs_n) * 2 * BLOCK
        for step in range(2 * STEPS):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            corner = [col0 + (step // STEPS) * BLOCK, (step % STEPS) * STEP]
            _async_load(y, corner, full.index(stage), ys.index(stage))
            count += 1


@gluon.jit
def _product(
    xs, ys, x_full, x_empty, full, empty, turn, place, run, ends_row,
    MINE: gl.constexpr, L: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """u of a group's next tile, of the program's `place`th pair; ends_row: the last one of these rows of X."""
    u = gl.zeros((BLOCK, BLOCK), gl.float32, L)
    count = (2 * place + MINE) * STEPS
    stage = count % STAGES
    mbarrier.wait(x_full.index(0), run & 1)
    mbarrier.wait(turn.index(MINE), (place & 1) ^ (1 - MINE))
    for k in range(STEPS):
        before = stage
        stage = (count + k) % STAGES
        mbarrier.wait(full.index(stage), ((count + k) // STAGES) & 1)
        u = warpgroup_mma(xs.index(k), ys.index(stage).permute((1, 0)), u, use_acc=k > 0, is_async=True)
        # One product stays under way; that before it, with what it read, is done, in all warps beyond the barrier.
        u = warpgroup_mma_wait(1, deps=[u])
        _barrier()
        mbarrier.arrive(empty.index(before), pred=k > 0)
        mbarrier.arrive(turn.index(1 - MINE), pred=k == STEPS - 1)
    u = warpgroup_mma_wait(0, deps=[u])
    _barrier()
    mbarrier.arrive(empty.index(stage))
    if ends_row:
        mbarrier.arrive(x_empty.index(0))
    return u


@gluon.jit
def _cells(related, related_stride, row0, col0):
    """What the map says of a tile's cells, row by row."""
    corner = related + (row0 // CELL).to(gl.int64) * related_stride + col0 // CELL
    return (
        gl.load(corner), gl.load(corner + 1), gl.load(corner + related_stride), gl.load(corner + related_stride + 1)
    )  # fmt: skip


@gluon.jit
def _most(cells):
    """The most that it says of any; see `kernels_common.relates`."""
    return gl.maximum(gl.maximum(cells[0], cells[1]), gl.maximum(cells[2], cells[3])).to(gl.int32)


@gluon.jit
def _leave_out(tile, value, cells, row0, col0):
    """The tile with `value` at the places that its cells name; see `kernels_common.leave_out`."""
    L: gl.constexpr = tile.type.layout
    rows = row0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    cols = col0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))
    for i in gl.static_range(2):
        for j in gl.static_range(2):
            place = cells[2 * i + j].to(gl.int32) - 1
            if place >= 0:
                at_row = rows == row0 + i * CELL + place // CELL
                at_col = cols == col0 + j * CELL + place % CELL
                tile = gl.where(gl.expand_dims(at_row, 1) & gl.expand_dims(at_col, 0), value, tile)
    return tile


@gluon.jit
def _meets_diagonal(row0, col0, shift):
    return (row0 + shift < col0 + BLOCK) & (col0 < row0 + shift + BLOCK)


@gluon.jit
def _own(row0, col0, shift, L: gl.constexpr):
    """Where a tile meets the pairs' diagonal."""
    rows = row0 + shift + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    cols = col0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))
    return gl.expand_dims(rows, 1) == gl.expand_dims(cols, 0)


@gluon.jit
def _add(to, value, mask, FRESH: gl.constexpr):
    if FRESH:
        gl.store(to, value, mask=mask)
    else:
        gl.store(to, gl.load(to, mask=mask, other=0.0) + value, mask=mask)


@gluon.jit
def _tile_statistics(
    u, row0, col0, cells, n_rows, n_cols, shift, s2, row_stats, col_stats, row_stats_stride, col_stats_stride,
    row_parts, col_parts, doubts,
    ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr, FRESH: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = u.type.layout
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    each = gl.arange(0, BLOCK, layout=EACH)
    tiles_m, tiles_n = n_rows // BLOCK, n_cols // BLOCK
    i, j = row0 // BLOCK, col0 // BLOCK
    group = i // GROUP * GROUP
    tile = group * tiles_n + j * gl.minimum(tiles_m - group, GROUP) + i - group
    wanted = True
    if IDS:
        found = _most(cells)
        wanted = found < SEVERAL if BY_PLACE else found == 0
        if wanted == 0:
            gl.store(doubts + tile, 1)
    if wanted:
        if _meets_diagonal(row0, col0, shift):
            # A pair's row and column share the one entry, so that one reduction serves both.
            at_pair = gl.convert_layout(gl.sum(gl.where(_own(row0, col0, shift, L), u, 0.0), 1), EACH)
            partner = row0 + shift + each
            paired = (partner >= col0) & (partner < col0 + BLOCK)
            if ROWS:
                _add(row_stats + 2 * row_stats_stride + row0 + each, at_pair, paired, FRESH)
                _add(row_stats + 3 * row_stats_stride + row0 + each, 1.0, paired, FRESH)
            if COLS:
                _add(col_stats + 2 * col_stats_stride + partner, at_pair, paired, FRESH)
                _add(col_stats + 3 * col_stats_stride + partner, 1.0, paired, FRESH)
        if IDS and BY_PLACE:
            if found > 0:
                u = _leave_out(u, float("-inf"), cells, row0, col0)
        highest = gl.max(gl.max(u, 1), 0)
        e = _exp2(gl.fma(u, s2, -(highest * s2)))
        reference = gl.full((BLOCK,), 0.0, gl.float32, EACH) + highest
        smallest = gl.full((BLOCK,), 1.0, gl.float32, EACH)
        if ROWS:
            to = row_parts + j.to(gl.int64) * n_rows + row0 + each
            total = gl.convert_layout(gl.sum(e, 1), EACH)
            gl.store(to, reference)
            gl.store(to + tiles_n.to(gl.int64) * n_rows, total)
            smallest = gl.minimum(smallest, total)
        if COLS:
            to = col_parts + i.to(gl.int64) * n_cols + col0 + each
            total = gl.convert_layout(gl.sum(e, 0), EACH)
            gl.store(to, reference)
            gl.store(to + tiles_m.to(gl.int64) * n_cols, total)
            smallest = gl.minimum(smallest, total)
        gl.store(doubts + tile, (gl.min(smallest, 0) < SMALLEST_SUM).to(gl.int32))


@gluon.jit
def _statistics_group(
    xs, ys, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related, related_stride, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts,
    MINE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr,
    FRESH: gl.constexpr, GROUP: gl.constexpr, L: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    pairs_n = n_cols // (2 * BLOCK)
    following = (0, 0, 0, 0)
    if IDS:
        following = _cells(related, related_stride, first // pairs_n * BLOCK, (2 * (first % pairs_n) + MINE) * BLOCK)
    for pair in range(first, last):
        row, col = pair // pairs_n, pair % pairs_n
        u = _product(
            xs, ys, x_full, x_empty, full, empty, turn, pair - first, row - first // pairs_n, col == pairs_n - 1,
            MINE, L, STEPS, STAGES,
        )  # fmt: skip
        cells = following
        if IDS:
            # The next tile's arrive while this one is finished. Nothing may use them before: it would wait.
            then = gl.minimum(pair + 1, last - 1)
            following = _cells(related, related_stride, then // pairs_n * BLOCK, (2 * (then % pairs_n) + MINE) * BLOCK)
        _tile_statistics(
            u, row * BLOCK, (2 * col + MINE) * BLOCK, cells, n_rows, n_cols, shift, s2, row_stats, col_stats,
            row_stats_stride, col_stats_stride, row_parts, col_parts, doubts, ROWS, COLS, IDS, BY_PLACE, FRESH, GROUP,
        )  # fmt: skip


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def statistics_pingpong_kernel(
    x, y, n_rows, n_cols, shift, related, related_stride, scale, row_stats, col_stats, row_stats_stride,
    col_stats_stride, row_parts, col_parts, doubts, n_programs,
    ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr, FRESH: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What `kernels_statistics.statistics_kernel` writes when it is neither EXACT nor a REPAIR.

    x, y: descriptors, (BLOCK, STEP) at a time. related: the chunk's map (IDS). BY_PLACE: what the map names one by one
    is left out here, else all tiles in which ids may agree are left to the second launch. FRESH: the chunk is all there
    is. STEPS: of the depth. STAGES: loads of Y under way. There are at most as many programs as pairs of tiles.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    xs = gl.allocate_shared_memory(x.dtype, [STEPS, BLOCK, STEP], x.layout)
    ys = gl.allocate_shared_memory(y.dtype, [STAGES, BLOCK, STEP], y.layout)
    x_full, x_empty = _barriers(1, 1), _barriers(1, 2)
    full, empty, turn = _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(2, 1)
    fence_async_shared()
    first, last = _share(n_rows, n_cols, n_programs)
    s2 = gl.load(scale).to(gl.float32) * LOG2_E
    gl.warp_specialize(
        [
            (_statistics_group, (
                xs, ys, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related,
                related_stride, s2, row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts,
                doubts, 0, ROWS, COLS, IDS, BY_PLACE, FRESH, GROUP, L, STEPS, STAGES,
            )),
            (_statistics_group, (
                xs, ys, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related,
                related_stride, s2, row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts,
                doubts, 1, ROWS, COLS, IDS, BY_PLACE, FRESH, GROUP, L, STEPS, STAGES,
            )),
            (_load, (
                x, y, xs, ys, x_full, x_empty, full, empty, first, last, n_cols // (2 * BLOCK), STEPS, STAGES,
            )),
        ],
        [WARPS, 1],
        [_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


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
    _async_store(g, [row0, col0], room)


@gluon.jit
def _halves(w):
    """Left and right half of a tile."""
    return gl.split(gl.permute(gl.reshape(w, (BLOCK, 2, w.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _weights_group(
    xs, ys, gs, g, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related, related_stride, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, doubts, smoothing, gain,
    MINE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr,
    MANY_POSITIVES: gl.constexpr, SMOOTH: gl.constexpr, GROUP: gl.constexpr, L: gl.constexpr, STEPS: gl.constexpr,
    STAGES: gl.constexpr,
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
        following = _cells(related, related_stride, next_row0, next_col0)
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
        u = _product(
            xs, ys, x_full, x_empty, full, empty, turn, pair - first, row - first // pairs_n, col == pairs_n - 1,
            MINE, L, STEPS, STAGES,
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
            following = _cells(related, related_stride, next_row0, next_col0)

        if highest - lowest <= WIDEST_SPREAD:
            # One exponential: 2^(s2 u - r) + 2^(s2 u - c) = 2^(s2 u - m) (2^(m - r) + 2^(m - c)).
            middle = 0.5 * (highest + lowest)
            e = _exp2(gl.fma(u, s2, -middle))
            if ROWS and COLS:
                w = e * (_by_row(_exp2(middle - row_lse), L) + _by_col(_exp2(middle - col_lse), L))
            elif ROWS:
                w = e * _by_row(_exp2(middle - row_lse), L)
            else:
                w = e * _by_col(_exp2(middle - col_lse), L)
        else:
            if ROWS and COLS:
                w = _exp2(gl.fma(u, s2, -_by_row(row_lse, L))) + _exp2(gl.fma(u, s2, -_by_col(col_lse, L)))
            elif ROWS:
                w = _exp2(gl.fma(u, s2, -_by_row(row_lse, L)))
            else:
                w = _exp2(gl.fma(u, s2, -_by_col(col_lse, L)))

        if SMOOTH:
            if IDS:
                if ROWS:
                    w -= _by_row(smoothing / gl.load(row_stats + 5 * row_stats_stride + row0 + each), L)
                if COLS:
                    w -= _by_col(smoothing / gl.load(col_stats + 5 * col_stats_stride + col0 + each), L)
            else:
                # Nothing is left out: every row has as many candidates as the next, and so has every column.
                share = 0.0
                if ROWS:
                    share += smoothing / gl.load(row_stats + 5 * row_stats_stride + row0)
                if COLS:
                    share += smoothing / gl.load(col_stats + 5 * col_stats_stride + col0)
                w -= share
        if IDS:
            found = _most(cells)
            put_off = found >= SEVERAL if BY_PLACE else found > 0
            tiles_n = n_cols // BLOCK
            group = row // GROUP * GROUP
            height = gl.minimum(n_rows // BLOCK - group, GROUP)
            gl.store(doubts + group * tiles_n + (2 * col + MINE) * height + row - group, put_off.to(gl.int32))
            if BY_PLACE:
                if found > 0:
                    w = _leave_out(w, 0.0, cells, row0, col0)
        # Targets go before rounding to g's dtype: a well-trained pair's weight is 2 - 2 + little.
        if _meets_diagonal(row0, col0, shift):
            own = _own(row0, col0, shift, L)
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


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def weights_pingpong_kernel(
    x, y, g, n_rows, n_cols, shift, related, related_stride, scale, row_stats, col_stats, row_stats_stride,
    col_stats_stride, doubts, smoothing, gain, n_programs,
    ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr, MANY_POSITIVES: gl.constexpr,
    SMOOTH: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What `kernels_weights.weights_kernel` writes when it neither is EXACT nor a REPAIR nor wants a sum.

    g: a descriptor, (BLOCK, BLOCK / 4) at a time. Tiles that are put off are written too, and again by the second
    launch; doubts tell which. The rest as for `statistics_pingpong_kernel`.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    xs = gl.allocate_shared_memory(x.dtype, [STEPS, BLOCK, STEP], x.layout)
    ys = gl.allocate_shared_memory(y.dtype, [STAGES, BLOCK, STEP], y.layout)
    gs = gl.allocate_shared_memory(g.dtype, [4, BLOCK, BLOCK // 4], g.layout)
    x_full, x_empty = _barriers(1, 1), _barriers(1, 2)
    full, empty, turn = _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(2, 1)
    fence_async_shared()
    first, last = _share(n_rows, n_cols, n_programs)
    s2 = gl.load(scale).to(gl.float32) * LOG2_E
    gl.warp_specialize(
        [
            (_weights_group, (
                xs, ys, gs, g, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related,
                related_stride, s2, row_stats, col_stats, row_stats_stride, col_stats_stride, doubts, smoothing, gain,
                0, ROWS, COLS, IDS, BY_PLACE, MANY_POSITIVES, SMOOTH, GROUP, L, STEPS, STAGES,
            )),
            (_weights_group, (
                xs, ys, gs, g, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related,
                related_stride, s2, row_stats, col_stats, row_stats_stride, col_stats_stride, doubts, smoothing, gain,
                1, ROWS, COLS, IDS, BY_PLACE, MANY_POSITIVES, SMOOTH, GROUP, L, STEPS, STAGES,
            )),
            (_load, (
                x, y, xs, ys, x_full, x_empty, full, empty, first, last, n_cols // (2 * BLOCK), STEPS, STAGES,
            )),
        ],
        [WARPS, 1],
        [_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
