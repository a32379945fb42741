"""Running statistics of the rows (or columns) of the similarity matrix: what InfoNCE keeps of N x N numbers."""

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule

# Rows of Statistics.data. The last two exist only where the target is smoothed.
MAX, LOG_SUM, POSITIVE_SUM, POSITIVE_COUNT, TOTAL, COUNT = range(6)


class Statistics:
    """What the softmax loss needs of each of n rows, merged block by block.

    ``data`` is (4, n), or (6, n) under label smoothing, in float32 (float64 for float64 embeddings); u is the product
    x.y *before* the scale s:

    ==============  =====================================================================
    max             largest u over the candidates seen so far, -inf when there are none
    log_sum         natural logarithm of the sum of exp(s (u - max)) over them, -inf when none
    positive_sum    sum of u over the positives
    positive_count  how many positives
    total, count    sum of u over the candidates, and how many (label smoothing only)
    ==============  =====================================================================

    The log-sum-exp of a row is s max + log_sum. It is kept in two parts because one float32 has too few bits for it at
    s = 100: s (u - max) loses nothing, s u - (s max + log_sum) does.
    """

    __slots__ = ("data",)

    def __init__(self, data: Tensor):
        self.data = data

    @classmethod
    def empty(cls, n: int, rule: Rule, *, device: torch.device, dtype: torch.dtype) -> "Statistics":
        data = torch.zeros(6 if rule.label_smoothing else 4, n, device=device, dtype=dtype)
        data[:POSITIVE_SUM] = -torch.inf
        return cls(data)

    def __getitem__(self, part: slice) -> "Statistics":
        """A view of some rows: what is merged into it is merged into the whole."""
        return Statistics(self.data[:, part])

    def merge_(self, other: "Statistics", scale: Tensor) -> None:
        """Take in the statistics of further candidates of the same rows."""
        mine, theirs = self.data, other.data
        highest = torch.maximum(mine[MAX], theirs[MAX])
        # Where no candidate has been seen yet both maxima are -inf, and -inf - -inf would be NaN.
        anchor = torch.where(highest == -torch.inf, 0.0, highest)
        mine[LOG_SUM] = torch.logaddexp(
            mine[LOG_SUM] + scale * (mine[MAX] - anchor), theirs[LOG_SUM] + scale * (theirs[MAX] - anchor)
        )
        mine[MAX] = highest
        mine[POSITIVE_SUM:] += theirs[POSITIVE_SUM:]

    def losses(self, scale: Tensor, rule: Rule) -> Tensor:
        """(n,) cross-entropy of every row to the target (1 - e) uniform(positives) + e uniform(candidates)."""
        data, e = self.data, rule.label_smoothing
        target = data[POSITIVE_SUM] / data[POSITIVE_COUNT]
        if e:
            target = (1 - e) * target + e * data[TOTAL] / data[COUNT]
        # The difference of unscaled products first: where the positive is the maximum, the loss is log_sum to the bit.
        return scale * (data[MAX] - target) + data[LOG_SUM]
