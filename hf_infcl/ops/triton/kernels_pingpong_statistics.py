"""InfoNCE's statistics of large chunks by two groups of warps in turn; see `kernels_pingpong`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from hf_infcl.ops.triton import kernels_statistics
from hf_infcl.ops.triton.kernels_pingpong import (
    BLOCK,
    LOADER_REGISTERS,
    LOG2_E,
    REGISTERS,
    SEVERAL,
    STEP,
    UNSPECIALIZED,
    WARPS,
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

SMALLEST_SUM = gl.constexpr(kernels_statistics.SMALLEST_SUM.value)


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
        found = most(cells)
        wanted = found < SEVERAL if BY_PLACE else found == 0
        if wanted == 0:
            gl.store(doubts + tile, 1)
    if wanted:
        if meets_diagonal(row0, col0, shift):
            # A pair's row and column share the one entry, so that one reduction serves both.
            at_pair = gl.convert_layout(gl.sum(gl.where(own_pairs(row0, col0, shift, L), u, 0.0), 1), EACH)
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
                u = leave_out(u, float("-inf"), cells, row0, col0)
        highest = gl.max(gl.max(u, 1), 0)
        e = exp2(gl.fma(u, s2, -(highest * s2)))
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
    boxes, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related, related_stride, s2,
    row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts, doubts,
    MINE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr,
    FRESH: gl.constexpr, GROUP: gl.constexpr, L: gl.constexpr, STEPS: gl.constexpr, KEPT: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    pairs_n = n_cols // (2 * BLOCK)
    following = (0, 0, 0, 0)
    if IDS:
        following = cells_of(related, related_stride, first // pairs_n * BLOCK, (2 * (first % pairs_n) + MINE) * BLOCK)
    for pair in range(first, last):
        row, col = pair // pairs_n, pair % pairs_n
        u = product(
            boxes, x_full, x_empty, full, empty, turn, pair - first, row - first // pairs_n, col == pairs_n - 1,
            MINE, L, STEPS, KEPT, STAGES,
        )  # fmt: skip
        cells = following
        if IDS:
            # The next tile's arrive while this one is finished. Nothing may use them before: it would wait.
            then = gl.minimum(pair + 1, last - 1)
            following = cells_of(
                related, related_stride, then // pairs_n * BLOCK, (2 * (then % pairs_n) + MINE) * BLOCK
            )
        _tile_statistics(
            u, row * BLOCK, (2 * col + MINE) * BLOCK, cells, n_rows, n_cols, shift, s2, row_stats, col_stats,
            row_stats_stride, col_stats_stride, row_parts, col_parts, doubts, ROWS, COLS, IDS, BY_PLACE, FRESH, GROUP,
        )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def statistics_pingpong_kernel(
    x, y, n_rows, n_cols, shift, related, related_stride, scale, row_stats, col_stats, row_stats_stride,
    col_stats_stride, row_parts, col_parts, doubts, n_programs,
    ROWS: gl.constexpr, COLS: gl.constexpr, IDS: gl.constexpr, BY_PLACE: gl.constexpr, FRESH: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, KEPT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What `kernels_statistics.statistics_kernel` writes when it is neither EXACT nor a REPAIR.

    x, y: descriptors, (BLOCK, STEP) at a time. related: the chunk's map (IDS). BY_PLACE: what the map names one by one
    is left out here, else all tiles in which ids may agree are left to the second launch. FRESH: the chunk is all there
    is. STEPS: of the depth. KEPT: of them, those whose part of X stays. STAGES: loads under way.
    There are at most as many programs as pairs of tiles.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    boxes = gl.allocate_shared_memory(x.dtype, [KEPT + STAGES, BLOCK, STEP], x.layout)
    x_full, x_empty = barriers(1, 1), barriers(1, 2)
    full, empty, turn = barriers(STAGES, 1), barriers(STAGES, 1), barriers(2, 1)
    fence_async_shared()
    first, last = share_of(n_rows, n_cols, n_programs)
    s2 = gl.load(scale).to(gl.float32) * LOG2_E
    gl.warp_specialize(
        [
            (_statistics_group, (
                boxes, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related,
                related_stride, s2, row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts,
                doubts, 0, ROWS, COLS, IDS, BY_PLACE, FRESH, GROUP, L, STEPS, KEPT, STAGES,
            )),
            (_statistics_group, (
                boxes, x_full, x_empty, full, empty, turn, first, last, n_rows, n_cols, shift, related,
                related_stride, s2, row_stats, col_stats, row_stats_stride, col_stats_stride, row_parts, col_parts,
                doubts, 1, ROWS, COLS, IDS, BY_PLACE, FRESH, GROUP, L, STEPS, KEPT, STAGES,
            )),
            (load, (
                x, y, boxes, x_full, x_empty, full, empty, first, last, n_cols // (2 * BLOCK), STEPS, KEPT, STAGES,
            )),
        ],
        [WARPS, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
