"""Rank sweep: the arithmetic on one tile of scores.

A query's rank is 1 + the number of *other* candidates that score at least as high as its best positive. Two looks at
every tile suffice: the first keeps each row's and column's best positive (`best_positive`), the second counts what
beats or ties it (`count_beating`). Both looks must see the same bits, so both take their tile from `score_tile`.
"""

from torch import Tensor
from torch.nn.functional import pad

# CPU matrix products take another code path, and with it another order of summation, for the ragged last rows and
# columns (and for very small sizes). Equal embeddings then differ in the last bit and a tie is decided by position.
# Padded to 64, every entry sums alike (tried on MKL for 3 to 2,048 rows and widths 7 to 512).
ROW_MULTIPLE = 64


def score_tile(rows: Tensor, cols: Tensor) -> Tensor:
    """Scores of a tile in full precision.

    Args:
        rows: (r, d) embeddings, float32 or float64.
        cols: (c, d) embeddings of the same dtype.

    Returns:
        (r, c) dot products. Equal pairs of embeddings get equal bits wherever they stand in the tile.
    """
    r, c = rows.shape[0], cols.shape[0]
    padded_rows = pad(rows, (0, 0, 0, -r % ROW_MULTIPLE))
    padded_cols = pad(cols, (0, 0, 0, -c % ROW_MULTIPLE))
    return (padded_rows @ padded_cols.T)[:r, :c]


def best_positive(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Best positive score of every row and column of a tile.

    Args:
        scores: (r, c) scores.
        positive: (r, c) bool, True where row and column belong together.

    Returns:
        (r,) and (c,) maxima over the positives; -inf where the tile holds none.
    """
    masked = scores.masked_fill(~positive, float("-inf"))
    return masked.amax(dim=1), masked.amax(dim=0)


def count_beating(scores: Tensor, positive: Tensor, row_best: Tensor, col_best: Tensor) -> tuple[Tensor, Tensor]:
    """How many entries of a tile that are no positives reach the best positive of their row, and of their column.

    Args:
        scores: (r, c) scores, the same bits that `best_positive` saw.
        positive: (r, c) bool.
        row_best: (r,) best positive of each row over all tiles.
        col_best: (c,) best positive of each column over all tiles.

    Returns:
        (r,) and (c,) int64 counts. A tie counts: a collapsed model ranks last, not first.
    """
    negative = ~positive
    over_row = (scores >= row_best[:, None]).logical_and_(negative)
    over_col = (scores >= col_best[None, :]).logical_and_(negative)
    return over_row.sum(dim=1), over_col.sum(dim=0)
