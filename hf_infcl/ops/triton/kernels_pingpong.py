"""The common tiles of large chunks on Hopper: two groups of warps take turns on the tensor cores (Gluon).

One warp loads. Of two groups of four warps each makes every other tile: while one multiplies, the other takes
exponentials, sums and stores, so that the tensor cores hardly wait. A program keeps its rows of X in shared memory and
streams Y past them, which halves what it reads: plain tiles are bound by the shared memory, which products read and the
copy engine fills. Where the rows do not fit, as many steps of their depth stay as leave room for the loads under way,
and the others are loaded for every tile. What comes out is, bit for bit, what the first launches of
`kernels_statistics` and `kernels_weights` write, whose second launches follow here too. Whole tiles only: rows divide
by 128, columns by 256.

Barriers count what has happened, and a wait tells one phase from the next by its parity alone. So nobody may be two
phases behind: a group waits for its turn, which it gets when the other has seen all the data that came before its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hf_infcl.ops.triton import kernels_common

# Rows and columns of a tile, and the depth of a step of its product.
BLOCK = gl.constexpr(128)
STEP = gl.constexpr(64)
WARPS = gl.constexpr(4)
# Registers of a thread that makes tiles and of one that loads: with twice the first, all that a multiprocessor has.
REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)

LOG2_E = gl.constexpr(kernels_common.LOG2_E.value)
CELL = gl.constexpr(kernels_common.CELL.value)
SEVERAL = gl.constexpr(kernels_common.SEVERAL.value)

UNSPECIALIZED = [
    "n_rows", "n_cols", "shift", "related_stride", "row_stats_stride", "col_stats_stride", "n_programs",
]  # fmt: skip

# Renamed after Triton 3.6.
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def share_of(n_rows, n_cols, n_programs):
    """Pairs of tiles, side by side, that this program makes: [first, last), row of tiles by row of tiles."""
    pairs = (n_rows // BLOCK) * (n_cols // (2 * BLOCK))
    program = gl.program_id(0).to(gl.int64)
    return (program * pairs // n_programs).to(gl.int32), ((program + 1) * pairs // n_programs).to(gl.int32)


@gluon.jit
def _streamed(k, STEPS: gl.constexpr, KEPT: gl.constexpr):
    """How many of the first k steps of the depth bring their part of X anew: as evenly among all as can be."""
    return k * (STEPS - KEPT) // STEPS


@gluon.jit
def load(
    x, y, boxes, x_full, x_empty, full, empty, first, last, pairs_n,
    STEPS: gl.constexpr, KEPT: gl.constexpr, STAGES: gl.constexpr,
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
            mbarrier.expect(x_full.index(0), KEPT * BYTES)
            for k in range(STEPS):
                before = _streamed(k, STEPS, KEPT)
                stays = _streamed(k + 1, STEPS, KEPT) == before
                _async_load(x, [at * BLOCK, k * STEP], x_full.index(0), boxes.index(k - before), pred=stays)
            run += 1
        row = at
        col0 = (pair % pairs_n) * 2 * BLOCK
        for step in range(2 * STEPS):
            k = step % STEPS
            if _streamed(k + 1, STEPS, KEPT) > _streamed(k, STEPS, KEPT):
                stage = count % STAGES
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), BYTES)
                _async_load(x, [at * BLOCK, k * STEP], full.index(stage), boxes.index(KEPT + stage))
                count += 1
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            corner = [col0 + (step // STEPS) * BLOCK, k * STEP]
            _async_load(y, corner, full.index(stage), boxes.index(KEPT + stage))
            count += 1


@gluon.jit
def product(
    boxes, x_full, x_empty, full, empty, turn, place, run, ends_row,
    MINE: gl.constexpr, L: gl.constexpr, STEPS: gl.constexpr, KEPT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """u of a group's next tile, of the program's `place`th pair; ends_row: the last one of these rows of X.

    boxes: (KEPT + STAGES, BLOCK, STEP), the steps of X that stay, then what is under way: in turn of X, where it does
    not stay, and of Y. So a tile takes 2 STEPS - KEPT loads; four at least are under way, since those of a step stay
    until the next has begun.
    """
    u = gl.zeros((BLOCK, BLOCK), gl.float32, L)
    count = (2 * place + MINE) * (2 * STEPS - KEPT)
    x_stage = 0
    y_stage = 0
    streams = 0
    mbarrier.wait(x_full.index(0), run & 1)
    mbarrier.wait(turn.index(MINE), (place & 1) ^ (1 - MINE))
    for k in range(STEPS):
        x_before, y_before, streamed = x_stage, y_stage, streams
        box = k
        if KEPT < STEPS:
            before = _streamed(k, STEPS, KEPT)
            streams = _streamed(k + 1, STEPS, KEPT) - before
            x_stage = count % STAGES
            mbarrier.wait(full.index(x_stage), (count // STAGES) & 1, pred=streams > 0)
            box = gl.where(streams > 0, KEPT + x_stage, k - before)
            count += streams
        y_stage = count % STAGES
        mbarrier.wait(full.index(y_stage), (count // STAGES) & 1)
        count += 1
        y = boxes.index(KEPT + y_stage).permute((1, 0))
        u = warpgroup_mma(boxes.index(box), y, u, use_acc=k > 0, is_async=True)
        # One product stays under way; that before it, with what it read, is done, in all warps beyond the barrier.
        u = warpgroup_mma_wait(1, deps=[u])
        _barrier()
        mbarrier.arrive(empty.index(y_before), pred=k > 0)
        if KEPT < STEPS:
            mbarrier.arrive(empty.index(x_before), pred=streamed > 0)
        mbarrier.arrive(turn.index(1 - MINE), pred=k == STEPS - 1)
    u = warpgroup_mma_wait(0, deps=[u])
    _barrier()
    mbarrier.arrive(empty.index(y_stage))
    if KEPT < STEPS:
        mbarrier.arrive(empty.index(x_stage))  # the last step always streams
    if ends_row:
        mbarrier.arrive(x_empty.index(0))
    return u


@gluon.jit
def cells_of(related, related_stride, row0, col0):
    """What the map says of a tile's cells, row by row."""
    corner = related + (row0 // CELL).to(gl.int64) * related_stride + col0 // CELL
    return (
        gl.load(corner), gl.load(corner + 1), gl.load(corner + related_stride), gl.load(corner + related_stride + 1)
    )  # fmt: skip


@gluon.jit
def most(cells):
    """The most that it says of any; see `kernels_common.relates`."""
    return gl.maximum(gl.maximum(cells[0], cells[1]), gl.maximum(cells[2], cells[3])).to(gl.int32)


@gluon.jit
def leave_out(tile, value, cells, row0, col0):
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
def meets_diagonal(row0, col0, shift):
    return (row0 + shift < col0 + BLOCK) & (col0 < row0 + shift + BLOCK)


@gluon.jit
def own_pairs(row0, col0, shift, L: gl.constexpr):
    """Where a tile meets the pairs' diagonal."""
    rows = row0 + shift + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    cols = col0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))
    return gl.expand_dims(rows, 1) == gl.expand_dims(cols, 0)
