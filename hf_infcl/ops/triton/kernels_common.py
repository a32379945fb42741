"""The logits tile, which every kernel of the sweep shares: BLOCK_M x BLOCK_N entries of u = X Y'."""

import triton
import triton.language as tl

# Sizes that vary from call to call: one compiled kernel serves them all. Not so the depth: that it divides by 16 lets
# masked rows be read 16 bytes at a time.
UNSPECIALIZED = [
    "n_rows", "n_cols", "shift", "n_programs", "row_stats_stride", "col_stats_stride", "related_stride",
]  # fmt: skip

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Rows and columns of a cell of `hf_infcl.ops.triton.related`'s map, and its word for ids that may agree anywhere there.
CELL = tl.constexpr(64)
SEVERAL = tl.constexpr(0x7FFF)
# Tiles whose marks a program of a second launch reads at a time. One by one costs a microsecond and a half each.
SCAN = tl.constexpr(32)

# The transcendentals of the inner loops, one instruction each. Without `.ftz` the compiler adds three or more per
# element to be right about subnormal numbers, which count for nothing in any of our sums.
if triton.knobs.runtime.interpret:

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def log2(x):
        return tl.log2(x)

else:

    @triton.jit
    def exp2(x):
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def log2(x):
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def tile_origin(tile, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile; GROUP rows of tiles are walked together, so that they share columns in L2."""
    tiles_m = tl.cdiv(n_rows, BLOCK_M)
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    group = tile // (GROUP * tiles_n)
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tile - group * GROUP * tiles_n
    return (first + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def product(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, row0, col0,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """u[row0:, col0:] in float32. Beyond the ragged edge operands read as zero.

    x, y: tensor descriptors (USE_TMA), or pointers to row-major matrices with unit stride along the depth.
    """
    u = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    rows = row0 + tl.arange(0, BLOCK_M)
    cols = col0 + tl.arange(0, BLOCK_N)
    for k in range(0, depth, BLOCK_K):
        if USE_TMA:
            a = x.load([row0, k])
            b = y.load([col0, k])
        else:
            ks = k + tl.arange(0, BLOCK_K)
            inside = (ks < depth)[None, :]
            a = tl.load(
                x + rows.to(tl.int64)[:, None] * x_stride + ks[None, :],
                mask=(rows < n_rows)[:, None] & inside,
                other=0.0,
            )
            b = tl.load(
                y + cols.to(tl.int64)[:, None] * y_stride + ks[None, :],
                mask=(cols < n_cols)[:, None] & inside,
                other=0.0,
            )
        u = tl.dot(a, b.T, u, input_precision=PRECISION)
    return u


@triton.jit
def store_tile(g, g_stride, w, row0, col0, n_rows, n_cols, USE_TMA: tl.constexpr):
    """Writes a tile of G in g's dtype. g: a tensor descriptor (USE_TMA), or a pointer to rows g_stride apart."""
    if USE_TMA:
        # In halves: a whole tile in shared memory beside the operands would leave one program a multiprocessor.
        half: tl.constexpr = w.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(w, (w.shape[0], 2, half)), (0, 2, 1)))
        g.store([row0, col0], left.to(g.dtype))
        g.store([row0, col0 + half], right.to(g.dtype))
    else:
        rows = tl.arange(0, w.shape[0])
        cols = tl.arange(0, w.shape[1])
        corner = g + row0.to(tl.int64) * g_stride + col0
        inside_tile = (rows < n_rows - row0)[:, None] & (cols < n_cols - col0)[None, :]
        tl.store(corner + rows[:, None] * g_stride + cols[None, :], w.to(g.dtype.element_ty), mask=inside_tile)


@triton.jit
def inside(rows, cols, n_rows, n_cols):
    return (rows < n_rows)[:, None] & (cols < n_cols)[None, :]


@triton.jit
def own(rows, cols, shift):
    """Where a tile meets the pairs' diagonal: row i and column i + shift belong to one pair."""
    return (rows + shift)[:, None] == cols[None, :]


@triton.jit
def meets_diagonal(row0, col0, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    return (row0 + shift < col0 + BLOCK_N) & (col0 < row0 + shift + BLOCK_M)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS: tl.constexpr):
    """Whether any row of a tile may be the same as any of its columns, by the low halves of their ids.

    One 32-bit comparison per element: nearly all tiles hold no duplicates, and stop here.
    """
    hit = tl.zeros((rows.shape[0], cols.shape[0]), dtype=tl.int1)
    for c in tl.static_range(ID_COLUMNS):
        a = tl.load(x_ids + rows.to(tl.int64) * ID_COLUMNS + c, mask=rows < n_rows, other=0).to(tl.int32)
        b = tl.load(y_ids + cols.to(tl.int64) * ID_COLUMNS + c, mask=cols < n_cols, other=0).to(tl.int32)
        hit = hit | (a[:, None] == b[None, :])
    return tl.reduce(hit, None, _either)


@triton.jit
def _cell(related, related_stride, at_row, at_col, n_rows, n_cols):
    """What the map says of cells."""
    there = (at_row < tl.cdiv(n_rows, CELL)) & (at_col < tl.cdiv(n_cols, CELL))
    return tl.load(related + at_row.to(tl.int64) * related_stride + at_col, mask=there, other=0).to(tl.int32)


@triton.jit
def relates(
    related, related_stride, x_ids, y_ids, row0, col0, n_rows, n_cols,
    ID_COLUMNS: tl.constexpr, CELLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whether a row of the tile may be the same as a column that is not its own pair: 0, 1 or more, up to SEVERAL.

    related: int16 cells that cover the chunk, related_stride apart (CELLS), else the ids are compared. SEVERAL: only a
    comparison tells where; less, with a map: `leave_out` knows.
    """
    if CELLS:
        at_row = row0 // CELL + tl.arange(0, max(BLOCK_M // CELL, 1))
        at_col = col0 // CELL + tl.arange(0, max(BLOCK_N // CELL, 1))
        found = tl.max(_cell(related, related_stride, at_row[:, None], at_col[None, :], n_rows, n_cols))
    else:
        rows, cols = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N)
        found = may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS).to(tl.int32) * SEVERAL
    return found


@triton.jit
def is_put_off(found, BY_PLACE: tl.constexpr):
    """Whether a first launch leaves a tile to the second, by what `relates` found; BY_PLACE: the first leaves out what
    the map gives the place of."""
    if BY_PLACE:
        put_off = found >= SEVERAL
    else:
        put_off = found > 0
    return put_off


@triton.jit
def leave_out(
    tile, value, related, related_stride, row0, col0, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The tile with `value` where the map says that a row is the same as a column, in cells with one such place."""
    rows, cols = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N)
    for i in tl.static_range(max(BLOCK_M // CELL, 1)):
        for j in tl.static_range(max(BLOCK_N // CELL, 1)):
            at_row, at_col = row0 // CELL + i, col0 // CELL + j
            place = _cell(related, related_stride, at_row, at_col, n_rows, n_cols) - 1
            row = tl.where(place >= 0, at_row * CELL + place // CELL, -1)
            tile = tl.where((rows == row)[:, None] & (cols == at_col * CELL + place % CELL)[None, :], value, tile)
    return tile


@triton.jit
def same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS: tl.constexpr):
    """Rows and columns that agree in a column of their 64-bit ids."""
    hit = tl.zeros((rows.shape[0], cols.shape[0]), dtype=tl.int1)
    for c in tl.static_range(ID_COLUMNS):
        a = tl.load(x_ids + rows.to(tl.int64) * ID_COLUMNS + c, mask=rows < n_rows, other=0)
        b = tl.load(y_ids + cols.to(tl.int64) * ID_COLUMNS + c, mask=cols < n_cols, other=0)
        hit = hit | (a[:, None] == b[None, :])
    return hit
