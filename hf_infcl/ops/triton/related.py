"""Where ids of a block may agree: a map that lets nearly all tiles never look at an id.

Comparing 128 x 128 pairs of ids takes longer than their exponentials. Sorting the ids of rows and columns together
brings equal ones next to each other, at n log n; every pair of neighbours marks the cell of the matrix it lies in with
its position there. A cell in which several meet says only that: its ids are compared.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.kernels_common import CELL, SEVERAL
from hf_infcl.ops.triton.launch import cdiv, launch, relates

_CELL = CELL.value
# How far along a run of equal ids pairs are marked one by one. Of longer runs (class labels for ids) all cells in the
# members' rows and columns are marked: right, and as slow as comparing.
_NEIGHBOURS = 32
_LARGEST_MAP = 2**25  # cells, 64 MiB; beyond, a map covers a part of the rows only
_BLOCK = 256


@triton.jit(do_not_specialize=["total", "n_rows", "shift", "stride"])
def mark_kernel(
    keys, order, total, n_rows, shift, cells, stride, row_flags, col_flags,
    CHECK: tl.constexpr, NEIGHBOURS: tl.constexpr, CELL: tl.constexpr, SEVERAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Marks the cells of pairs with equal keys, their own pairs aside.

    A first launch writes every pair's position into its cell; which of several stays is open. A second (CHECK) finds
    those whose position is not there, and writes SEVERAL: in the end the map is the same, whoever came first.

    keys, order: (total,) sorted ids of rows, then columns, and where they came from. cells: int16, stride to a row.
    row_flags, col_flags: int16, SEVERAL for rows and columns of cells in which a run goes on beyond NEIGHBOURS.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < total
    key = tl.load(keys + at, mask=there, other=0)
    mine = tl.load(order + at, mask=there, other=0)
    several = tl.full((BLOCK,), SEVERAL, tl.int16)
    for step in range(1, NEIGHBOURS + 1):
        next_there = at + step < total
        other = tl.load(order + at + step, mask=next_there, other=0)
        equal = next_there & (tl.load(keys + at + step, mask=next_there, other=0) == key)
        row, col = tl.minimum(mine, other), tl.maximum(mine, other) - n_rows
        pair = equal & (row < n_rows) & (col >= 0) & (row + shift != col)
        cell = cells + row // CELL * stride + col // CELL
        position = (1 + row % CELL * CELL + col % CELL).to(tl.int16)
        if CHECK:
            pair = pair & (tl.load(cell, mask=pair, other=0) != position)
            position = several
        tl.store(cell, position, mask=pair)
    if CHECK:
        beyond = at + NEIGHBOURS + 1
        longer = (beyond < total) & (tl.load(keys + beyond, mask=beyond < total, other=0) == key)
        tl.store(row_flags + mine // CELL, several, mask=longer & (mine < n_rows))
        tl.store(col_flags + (mine - n_rows) // CELL, several, mask=longer & (mine >= n_rows))


def mark(rows: Side, cols: Side) -> Tensor:
    """(cells of rows, cells of columns, rounded up) int16: where a row may be the same as a column not its own pair.

    0 nowhere in the cell, 1 + 64 row + column at this position within it and nowhere else, SEVERAL perhaps anywhere.
    """
    assert rows.ids is not None
    assert cols.ids is not None
    n_rows, device = len(rows), rows.ids.device
    height, width = cdiv(n_rows, _CELL), cdiv(cdiv(len(cols), _CELL), 16) * 16  # rows of cells on aligned addresses
    flags = torch.zeros(height * width + height + width, device=device, dtype=torch.int16)
    cells, row_flags, col_flags = flags.split([height * width, height, width])
    shift = rows.offset - cols.offset
    both = [torch.cat([rows.ids[:, column], cols.ids[:, column]]) for column in range(rows.ids.shape[1])]
    sorted_ids = [ids.sort() for ids in both]
    for check in (False, True):
        for keys, order in sorted_ids:
            values = (keys, order, len(keys), n_rows, shift, cells, width, row_flags, col_flags)
            switches = (check, _NEIGHBOURS, _CELL, SEVERAL.value, _BLOCK)
            launch(mark_kernel, device, cdiv(len(keys), _BLOCK), values, switches, warps=4, stages=1)
    return cells.view(height, width).bitwise_or_(row_flags[:, None]).bitwise_or_(col_flags)


class Related:
    """The map of a block, made for as many rows at a time as fit in scratch memory."""

    def __init__(self, rows: Side, cols: Side):
        self.rows, self.cols = rows, cols
        width = cdiv(len(cols), _CELL)
        self.height = max(_LARGEST_MAP // width // 16, 1) * 16 * _CELL
        self.first = self.last = 0
        self.cells: Tensor | None = None

    def chunk(self, r: slice, c: slice) -> Tensor:
        """The cells of a chunk. Chunks come in the order of their rows."""
        if r.start % _CELL or c.start % _CELL:
            return mark(self.rows[r], self.cols[c])
        if self.cells is None or not self.first <= r.start <= r.stop <= self.last:
            self.cells = None  # one map at a time
            self.first = r.start
            self.last = min(max(r.start + self.height, r.stop), len(self.rows))
            self.cells = mark(self.rows[self.first : self.last], self.cols)
        return self.cells[(r.start - self.first) // _CELL :, c.start // _CELL :]


def relate(rows: Side, cols: Side, rule: Rule) -> Related | None:
    """What the chunk functions need to know of a block's ids; None where ids do not matter."""
    return Related(rows, cols) if relates(rows, cols, rule) else None
