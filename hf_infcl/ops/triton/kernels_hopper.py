"""The sweep's two InfoNCE kernels for Hopper, in Gluon: the epilogue of one tile hides under the product of the next.

A program holds BLOCK rows of X in shared memory and streams tiles of Y past them. Its warps have roles: one warp loads
(bulk tensor copies into a ring of stages), two groups of four warps take tiles in turn, so that one multiplies while
the other takes exponentials. With all warps in step, as in plain Triton, the tensor cores rest a quarter of the time
at depth 512.

The arithmetic is that of `kernels_softmax`; see there for the formulas.
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

LOG2_E = gl.constexpr(1.4426950408889634)
SMALLEST_SUM = gl.constexpr(2.0**-90)
WIDEST_SPREAD = gl.constexpr(120.0)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


# A tile's vectors are read and written with one entry a thread. Spread as the tile spreads them, a thread would hold 32
# columns and their 64-bit addresses, and the tile would spill.
@gluon.constexpr_function
def _flat():
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, layout: gl.constexpr, ID_COLUMNS: gl.constexpr):
    """Whether any row of a tile may be the same as any of its columns, by the low halves of their ids."""
    found = False
    for c in gl.static_range(ID_COLUMNS):
        a = gl.load(x_ids + rows.to(gl.int64) * ID_COLUMNS + c, mask=rows < n_rows, other=0).to(gl.int32)
        b = gl.load(y_ids + cols.to(gl.int64) * ID_COLUMNS + c, mask=cols < n_cols, other=0).to(gl.int32)
        hit = _by_row(a, layout)[:, None] == _by_col(b, layout)[None, :]
        found = found | gl.reduce(gl.reduce(hit, 1, _either), 0, _either)
    return found


@gluon.jit
def _by_row(v, layout: gl.constexpr):
    return gl.convert_layout(v, gl.SliceLayout(1, layout))


@gluon.jit
def _by_col(v, layout: gl.constexpr):
    return gl.convert_layout(v, gl.SliceLayout(0, layout))


@gluon.jit
def _load(
    x_desc, y_desc, xs, ys, x_full, x_free, y_full, y_free, first, last, tiles_n,
    BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings in each row block of X once, and the tiles of Y in the order in which they are multiplied."""
    count = 0
    for tile in range(first, last):
        row_block = tile // tiles_n
        col_block = tile - row_block * tiles_n
        if (tile == first) | (col_block == 0):
            turn = row_block - first // tiles_n
            mbarrier.wait(x_free, (turn & 1) ^ 1)
            for k in gl.static_range(STEPS):
                mbarrier.expect(x_full.index(k), x_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(x_desc, [row_block * BLOCK, k * BLOCK_K], x_full.index(k), xs.index(k))
        for k in range(STEPS):
            stage = count % STAGES
            mbarrier.wait(y_free.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(y_full.index(stage), y_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                y_desc, [col_block * BLOCK, k * BLOCK_K], y_full.index(stage), ys.index(stage)
            )
            count += 1


@gluon.jit
def _multiply(
    group: gl.constexpr, tile, first, last, tiles_n, released, xs, ys, x_full, x_free, y_full, y_free, order,
    layout: gl.constexpr, BLOCK: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """u of one tile, and how many row blocks of X this group of warps has let go so far."""
    row_block = tile // tiles_n
    turn = row_block - first // tiles_n
    # The groups multiply in the tiles' order. It also keeps every wait below within one phase of its barrier: a barrier
    # tells a phase only from the next, not from the one after.
    mbarrier.wait(order.index(group), (((tile - first) // 2) & 1) ^ (1 - group))
    while released < turn:  # a row block that had no tile for this group
        mbarrier.arrive(x_free)
        released += 1
    count = (tile - first) * STEPS
    u = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
    for k in range(STEPS):
        stage = (count + k) % STAGES
        mbarrier.wait(x_full.index(k), turn & 1)
        mbarrier.wait(y_full.index(stage), ((count + k) // STAGES) & 1)
        u = warpgroup_mma(xs.index(k), ys.index(stage).permute((1, 0)), u, use_acc=k > 0, is_async=True)
        # The product before this one is done, and with it its stage of Y.
        u = warpgroup_mma_wait(1, (u,))
        mbarrier.arrive(y_free.index((count + k + STAGES - 1) % STAGES), pred=k > 0)
    mbarrier.arrive(order.index(1 - group))
    u = warpgroup_mma_wait(0, (u,))
    mbarrier.arrive(y_free.index((count + STEPS - 1) % STAGES))
    following = tile + 2
    if (following < last) & (following // tiles_n > row_block):
        mbarrier.arrive(x_free)
        released += 1
    return u, released


@gluon.jit
def _statistics(
    group: gl.constexpr, xs, ys, x_full, x_free, y_full, y_free, order, first, last, tiles_m, tiles_n,
    n_rows, n_cols, shift, x_ids, y_ids, scale, row_stats, col_stats, row_stats_stride, col_stats_stride,
    row_parts, col_parts, doubts,
    ROWS: gl.constexpr, COLS: gl.constexpr, ID_COLUMNS: gl.constexpr,
    BLOCK: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    flat: gl.constexpr = _flat()
    s2 = gl.load(scale).to(gl.float32) * LOG2_E
    released = 0
    for tile in range(first + group, last, 2):
        u, released = _multiply(
            group, tile, first, last, tiles_n, released, xs, ys, x_full, x_free, y_full, y_free, order,
            layout, BLOCK, STEPS, STAGES,
        )  # fmt: skip
        row_block = tile // tiles_n
        col_block = tile - row_block * tiles_n
        row0 = row_block * BLOCK
        col0 = col_block * BLOCK
        rows = row0 + gl.arange(0, BLOCK, flat)
        cols = col0 + gl.arange(0, BLOCK, flat)

        if (row0 + BLOCK > n_rows) | (col0 + BLOCK > n_cols):
            inside = (_by_row(rows, layout) < n_rows)[:, None] & (_by_col(cols, layout) < n_cols)[None, :]
            u = gl.where(inside, u, float("-inf"))
        if (row0 + shift < col0 + BLOCK) & (col0 < row0 + shift + BLOCK):
            partner = rows + shift
            pairs = _by_row(partner, layout)[:, None] == _by_col(cols, layout)[None, :]
            at_pair = gl.convert_layout(gl.sum(gl.where(pairs, u, 0.0), 1), flat)
            paired = (rows < n_rows) & (partner >= col0) & (partner < gl.minimum(col0 + BLOCK, n_cols))
            if ROWS:
                at = row_stats + 2 * row_stats_stride + rows
                gl.store(at, gl.load(at, mask=paired, other=0.0) + at_pair, mask=paired)
                at += row_stats_stride
                gl.store(at, gl.load(at, mask=paired, other=0.0) + 1.0, mask=paired)
            if COLS:
                at = col_stats + 2 * col_stats_stride + partner
                gl.store(at, gl.load(at, mask=paired, other=0.0) + at_pair, mask=paired)
                at += col_stats_stride
                gl.store(at, gl.load(at, mask=paired, other=0.0) + 1.0, mask=paired)

        highest = gl.max(gl.max(u, 1), 0)
        highest = gl.where(highest == float("-inf"), 0.0, highest)
        e = _exp2(gl.fma(u, s2, -(highest * s2)))
        smallest = 1.0
        if ROWS:
            row_sum = gl.convert_layout(gl.sum(e, 1), flat)
            row_sum_or_one = gl.where(rows < n_rows, row_sum, 1.0)
            smallest = gl.min(row_sum_or_one, 0)
            at = row_parts + col_block.to(gl.int64) * n_rows + rows
            gl.store(at, gl.full((BLOCK,), 0.0, gl.float32, flat) + highest, mask=rows < n_rows)
            gl.store(at + tiles_n.to(gl.int64) * n_rows, row_sum, mask=rows < n_rows)
        if COLS:
            col_sum = gl.convert_layout(gl.sum(e, 0), flat)
            col_sum_or_one = gl.where(cols < n_cols, col_sum, 1.0)
            smallest = gl.minimum(smallest, gl.min(col_sum_or_one, 0))
            at = col_parts + row_block.to(gl.int64) * n_cols + cols
            gl.store(at, gl.full((BLOCK,), 0.0, gl.float32, flat) + highest, mask=cols < n_cols)
            gl.store(at + tiles_m.to(gl.int64) * n_cols, col_sum, mask=cols < n_cols)
        doubtful = smallest < SMALLEST_SUM
        if ID_COLUMNS > 0:
            doubtful = doubtful | _may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, layout, ID_COLUMNS)
        gl.store(doubts + tile, doubtful.to(gl.int32))


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "shift"])
def hopper_statistics_kernel(
    x_desc, y_desc, n_rows, n_cols, shift, x_ids, y_ids, scale,
    row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts,
    ROWS: gl.constexpr, COLS: gl.constexpr, ID_COLUMNS: gl.constexpr,
    BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(n_rows, BLOCK)
    tiles_n = gl.cdiv(n_cols, BLOCK)
    # Every program takes a run of tiles along the rows, so that it changes its block of X seldom.
    tiles = tiles_m * tiles_n
    first = (gl.program_id(0).to(gl.int64) * tiles // gl.num_programs(0)).to(gl.int32)
    last = ((gl.program_id(0) + 1).to(gl.int64) * tiles // gl.num_programs(0)).to(gl.int32)

    xs = gl.allocate_shared_memory(x_desc.dtype, [STEPS, BLOCK, BLOCK_K], x_desc.layout)
    ys = gl.allocate_shared_memory(y_desc.dtype, [STAGES, BLOCK, BLOCK_K], y_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STEPS):
        mbarrier.init(x_full.index(k), count=1)
    for k in gl.static_range(STAGES):
        mbarrier.init(y_full.index(k), count=1)
        mbarrier.init(y_free.index(k), count=1)
    mbarrier.init(x_free, count=2)
    for group in gl.static_range(2):
        mbarrier.init(order.index(group), count=1)
    fence_async_shared()

    first_group: gl.constexpr = 0
    second_group: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_statistics, (
                first_group, xs, ys, x_full, x_free, y_full, y_free, order, first, last, tiles_m, tiles_n,
                n_rows, n_cols, shift, x_ids, y_ids, scale, row_stats, col_stats, row_stats_stride, col_stats_stride,
                row_parts, col_parts, doubts, ROWS, COLS, ID_COLUMNS, BLOCK, STEPS, STAGES)),
            (_statistics, (
                second_group, xs, ys, x_full, x_free, y_full, y_free, order, first, last, tiles_m, tiles_n,
                n_rows, n_cols, shift, x_ids, y_ids, scale, row_stats, col_stats, row_stats_stride, col_stats_stride,
                row_parts, col_parts, doubts, ROWS, COLS, ID_COLUMNS, BLOCK, STEPS, STAGES)),
            (_load, (
                x_desc, y_desc, xs, ys, x_full, x_free, y_full, y_free, first, last, tiles_n,
                BLOCK, BLOCK_K, STEPS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _lse(stats, stats_stride, at, n, s2):
    lse = gl.load(stats + at, mask=at < n, other=0.0) * s2
    return lse + gl.load(stats + stats_stride + at, mask=at < n, other=0.0) * LOG2_E


@gluon.jit
def _weights(
    group: gl.constexpr, xs, ys, out, x_full, x_free, y_full, y_free, order,
    first, last, tiles_m, tiles_n, g_desc,
    n_rows, n_cols, shift, x_ids, y_ids, scale, row_stats, col_stats, row_stats_stride, col_stats_stride,
    sum_parts, doubts, smoothing, gain,
    ROWS: gl.constexpr, COLS: gl.constexpr, ID_COLUMNS: gl.constexpr, SMOOTH: gl.constexpr, WANT_SUM: gl.constexpr,
    BLOCK: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    flat: gl.constexpr = _flat()
    s2 = gl.load(scale).to(gl.float32) * LOG2_E
    released = 0
    for tile in range(first + group, last, 2):
        u, released = _multiply(
            group, tile, first, last, tiles_n, released, xs, ys, x_full, x_free, y_full, y_free, order,
            layout, BLOCK, STEPS, STAGES,
        )  # fmt: skip
        row_block = tile // tiles_n
        col_block = tile - row_block * tiles_n
        row0 = row_block * BLOCK
        col0 = col_block * BLOCK
        rows = row0 + gl.arange(0, BLOCK, flat)
        cols = col0 + gl.arange(0, BLOCK, flat)
        lowest = float("inf")
        highest = float("-inf")
        if ROWS:
            row_lse = _lse(row_stats, row_stats_stride, rows, n_rows, s2)
            lowest = gl.min(gl.where(rows < n_rows, row_lse, float("inf")), 0)
            highest = gl.max(gl.where(rows < n_rows, row_lse, float("-inf")), 0)
        if COLS:
            col_lse = _lse(col_stats, col_stats_stride, cols, n_cols, s2)
            lowest = gl.minimum(lowest, gl.min(gl.where(cols < n_cols, col_lse, float("inf")), 0))
            highest = gl.maximum(highest, gl.max(gl.where(cols < n_cols, col_lse, float("-inf")), 0))
        doubtful = (highest - lowest <= WIDEST_SPREAD) == 0
        if ID_COLUMNS > 0:
            doubtful = doubtful | _may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, layout, ID_COLUMNS)
        gl.store(doubts + tile, doubtful.to(gl.int32))

        middle = 0.5 * (highest + lowest)
        w = _exp2(gl.fma(u, s2, -middle))
        if ROWS and COLS:
            of_rows = _by_row(_exp2(middle - row_lse), layout)
            w = w * (of_rows[:, None] + _by_col(_exp2(middle - col_lse), layout)[None, :])
        elif ROWS:
            w = w * _by_row(_exp2(middle - row_lse), layout)[:, None]
        else:
            w = w * _by_col(_exp2(middle - col_lse), layout)[None, :]
        if SMOOTH:
            if ROWS:
                count = gl.load(row_stats + 5 * row_stats_stride + rows, mask=rows < n_rows, other=1.0)
                w -= _by_row(smoothing / count, layout)[:, None]
            if COLS:
                count = gl.load(col_stats + 5 * col_stats_stride + cols, mask=cols < n_cols, other=1.0)
                w -= _by_col(smoothing / count, layout)[None, :]
        if (row0 + shift < col0 + BLOCK) & (col0 < row0 + shift + BLOCK):
            pairs = _by_row(rows + shift, layout)[:, None] == _by_col(cols, layout)[None, :]
            w = gl.where(pairs, w - (ROWS + COLS) * (1 - smoothing), w)
        if WANT_SUM:
            inside = (_by_row(rows, layout) < n_rows)[:, None] & (_by_col(cols, layout) < n_cols)[None, :]
            gl.store(sum_parts + tile, gain * gl.sum(gl.sum(gl.where(inside, w * u, 0.0), 1), 0))
        half: gl.constexpr = BLOCK // 2
        left, right = gl.split(gl.permute(gl.reshape((w * gain).to(g_desc.dtype), (BLOCK, 2, half)), (0, 2, 1)))
        tma.store_wait(0)
        out.index(group).store(left)
        fence_async_shared()
        tma.async_copy_shared_to_global(g_desc, [row0, col0], out.index(group))
        tma.store_wait(0)
        out.index(group).store(right)
        fence_async_shared()
        tma.async_copy_shared_to_global(g_desc, [row0, col0 + half], out.index(group))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_rows", "n_cols", "shift"])
def hopper_weights_kernel(
    x_desc, y_desc, g_desc, n_rows, n_cols, shift, x_ids, y_ids, scale,
    row_stats, col_stats, row_stats_stride, col_stats_stride, sum_parts, doubts, smoothing, gain,
    ROWS: gl.constexpr, COLS: gl.constexpr, ID_COLUMNS: gl.constexpr, SMOOTH: gl.constexpr, WANT_SUM: gl.constexpr,
    BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(n_rows, BLOCK)
    tiles_n = gl.cdiv(n_cols, BLOCK)
    tiles = tiles_m * tiles_n
    first = (gl.program_id(0).to(gl.int64) * tiles // gl.num_programs(0)).to(gl.int32)
    last = ((gl.program_id(0) + 1).to(gl.int64) * tiles // gl.num_programs(0)).to(gl.int32)

    xs = gl.allocate_shared_memory(x_desc.dtype, [STEPS, BLOCK, BLOCK_K], x_desc.layout)
    ys = gl.allocate_shared_memory(y_desc.dtype, [STAGES, BLOCK, BLOCK_K], y_desc.layout)
    out = gl.allocate_shared_memory(g_desc.dtype, [2, BLOCK, BLOCK // 2], g_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STEPS):
        mbarrier.init(x_full.index(k), count=1)
    for k in gl.static_range(STAGES):
        mbarrier.init(y_full.index(k), count=1)
        mbarrier.init(y_free.index(k), count=1)
    mbarrier.init(x_free, count=2)
    for group in gl.static_range(2):
        mbarrier.init(order.index(group), count=1)
    fence_async_shared()

    first_group: gl.constexpr = 0
    second_group: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_weights, (
                first_group, xs, ys, out, x_full, x_free, y_full, y_free, order,
                first, last, tiles_m, tiles_n, g_desc, n_rows, n_cols, shift, x_ids, y_ids, scale,
                row_stats, col_stats, row_stats_stride, col_stats_stride,
                sum_parts, doubts, smoothing, gain, ROWS, COLS, ID_COLUMNS, SMOOTH, WANT_SUM, BLOCK, STEPS, STAGES)),
            (_weights, (
                second_group, xs, ys, out, x_full, x_free, y_full, y_free, order,
                first, last, tiles_m, tiles_n, g_desc, n_rows, n_cols, shift, x_ids, y_ids, scale,
                row_stats, col_stats, row_stats_stride, col_stats_stride,
                sum_parts, doubts, smoothing, gain, ROWS, COLS, ID_COLUMNS, SMOOTH, WANT_SUM, BLOCK, STEPS, STAGES)),
            (_load, (
                x_desc, y_desc, xs, ys, x_full, x_free, y_full, y_free, first, last, tiles_n,
                BLOCK, BLOCK_K, STEPS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
