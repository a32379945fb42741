"""Which rows and columns of the score matrix belong together, one tile at a time."""

from typing import Protocol

import torch
from torch import Tensor


class Relation(Protocol):
    """Says for any tile of the score matrix which entries are positives."""

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """The (rows, cols) part of the positives as a bool tensor."""
        ...


class SameIds:
    """Row i and column j belong together if their ids agree in any column.

    Args:
        row_ids: (n, m) int64.
        col_ids: (p, m) int64.
    """

    def __init__(self, row_ids: Tensor, col_ids: Tensor) -> None:
        self.row_ids, self.col_ids = row_ids, col_ids

    def tile(self, rows: slice, cols: slice) -> Tensor:
        left, right = self.row_ids[rows], self.col_ids[cols]
        same = left[:, None, 0] == right[None, :, 0]
        for column in range(1, left.shape[1]):
            same |= left[:, None, column] == right[None, :, column]
        return same


class PairList:
    """Exactly the listed (row, column) pairs belong together: a many-to-many relation, kept sparse.

    Args:
        rows: (e,) int64 row indices.
        cols: (e,) int64 column indices.
    """

    def __init__(self, rows: Tensor, cols: Tensor) -> None:
        order = torch.argsort(rows, stable=True)
        self.rows, self.cols = rows[order], cols[order]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        bounds = torch.tensor([rows.start, rows.stop], device=self.rows.device)
        first, last = torch.searchsorted(self.rows, bounds).tolist()
        r, c = self.rows[first:last], self.cols[first:last]
        inside = (c >= cols.start) & (c < cols.stop)
        same = torch.zeros(rows.stop - rows.start, cols.stop - cols.start, dtype=torch.bool, device=r.device)
        same[r[inside] - rows.start, c[inside] - cols.start] = True
        return same
