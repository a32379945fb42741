"""Where ids of a block may agree: a map that lets nearly all tiles never look at an id.

Comparing 128 x 128 pairs of ids takes longer than their exponentials. Sorting the ids of rows and columns together
brings equal ones next to each other, at n log n; every pair of neighbours marks the cell of the matrix it lies in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.kernels_common import CELL
from hf_infcl.ops.triton.launch import cdiv, launch, relates

_CELL = CELL.value
# How far along a run of equal ids pairs are marked one by one. Of longer runs (class labels for ids) all cells in the
# members' rows and columns are marked: right, and as slow as comparing.
_NEIGHBOURS = 32
_LARGEST_MAP = 2**26  # bytes; beyond, a map covers a part of the rows only
_BLOCK = 256


@triton.jit(do_not_specialize=["total", "n_rows", "shift", "stride"])
def mark_kernel(
    keys, order, total, n_rows, shift, cells, stride, row_flags, col_flags,
    NEIGHBOURS: tl.constexpr, CELL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Marks the cells of pairs with equal keys, their own pairs aside.

    keys, order: (total,) sorted ids of rows, then columns, and where they came from. cells: uint8, stride to a row.
    row_flags, col_flags: uint8, set for rows and columns of cells in which a run goes on beyond NEIGHBOURS.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < total
    key = tl.load(keys + at, mask=there, other=0)
    mine = tl.load(order + at, mask=there, other=0)
    yes = tl.full((BLOCK,), 1, tl.uint8)
    for step in range(1, NEIGHBOURS + 1):
        next_there = at + step < total
        other = tl.load(order + at + step, mask=next_there, other=0)
        equal = next_there & (tl.load(keys + at + step, mask=next_there, other=0) == key)
        row, col = tl.minimum(mine, other), tl.maximum(mine, other) - n_rows
        pair = equal & (row < n_rows) & (col >= 0) & (row + shift != col)
        tl.store(cells + row // CELL * stride + col // CELL, yes, mask=pair)
    beyond = at + NEIGHBOURS + 1
    longer = (beyond < total) & (tl.load(keys + beyond, mask=beyond < total, other=0) == key)
    tl.store(row_flags + mine // CELL, yes, mask=longer & (mine < n_rows))
    tl.store(col_flags + (mine - n_rows) // CELL, yes, mask=longer & (mine >= n_rows))


def mark(rows: Side, cols: Side) -> Tensor:
    """(cells of rows, cells of columns, rounded up) uint8, 1 where a row may be the same as a column not its own pair.

    Ids are compared by their low 32 bits: what agrees there only is marked in vain, and compared in full later.
    """
    assert rows.ids is not None
    assert cols.ids is not None
    n_rows, device = len(rows), rows.ids.device
    height, width = cdiv(n_rows, _CELL), cdiv(cdiv(len(cols), _CELL), 16) * 16  # rows of cells on aligned addresses
    flags = torch.zeros(height * width + height + width, device=device, dtype=torch.uint8)
    cells, row_flags, col_flags = flags.split([height * width, height, width])
    for column in range(rows.ids.shape[1]):
        ids = torch.cat([rows.ids[:, column], cols.ids[:, column]]).to(torch.int32)
        keys, order = ids.sort()
        values = (
            keys, order, len(keys), n_rows, rows.offset - cols.offset, cells, width, row_flags, col_flags,
        )  # fmt: skip
        launch(mark_kernel, device, cdiv(len(keys), _BLOCK), values, (_NEIGHBOURS, _CELL, _BLOCK), warps=4, stages=1)
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
