"""Top-k sweep: the k hardest candidates of every row and column, kept while the similarity matrix passes in blocks."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hf_infcl.ops.blocks import Engine
from hf_infcl.ops.chunks import chunks, parts
from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.statistics import LOG_SUM, MAX, POSITIVE_COUNT, POSITIVE_SUM, Statistics

_LAST = 2**32 - 1  # index
_PAIR_SCORES_ROWS = 4096  # 8 MiB of products at d = 512 in float32


class TopK:
    """The best k candidates of each of n rows so far, under one order: higher score, then lower global index.

    Attributes:
        scores: (n, k) products x.y, in any order; -inf where fewer than k candidates were seen. A NaN counts as the
            highest score, so that it stays and reaches the loss (Triton's kernels keep it as +inf).
        indices: (n, k) int64 global indices of the candidates, -1 where there is none.
        counts: (2,) int64, shared by all views: (row, block) pairs skipped, and met.
    """

    __slots__ = ("counts", "indices", "scores")

    def __init__(self, scores: Tensor, indices: Tensor, counts: Tensor):
        self.scores, self.indices, self.counts = scores, indices, counts

    @classmethod
    def empty(cls, n: int, k: int, *, device: torch.device, dtype: torch.dtype) -> "TopK":
        return cls(
            torch.full((n, k), -torch.inf, device=device, dtype=dtype),
            torch.full((n, k), -1, device=device, dtype=torch.int64),
            torch.zeros(2, device=device, dtype=torch.int64),
        )

    def __len__(self) -> int:
        return self.scores.shape[0]

    @property
    def k(self) -> int:
        return self.scores.shape[1]

    def __getitem__(self, part: slice) -> "TopK":
        """A view of some rows: what enters it enters the whole."""
        return TopK(self.scores[part], self.indices[part], self.counts)

    @property
    def skip_ratio(self) -> Tensor:
        """Share of the (row, block) pairs that were skipped, a float32 scalar."""
        skipped, met = self.counts.to(torch.float32)
        return skipped / met.clamp(min=1)

    @property
    def hardest(self) -> Tensor:
        """(n,) the best score of every row."""
        return self.scores.amax(1)

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Scores and indices, best first; a score that overflowed is NaN."""
        scores, indices = best_of(self.scores, self.indices, self.k)
        return scores.masked_fill(scores == torch.inf, torch.nan), indices

    def offer_(self, scores: Tensor, offset: int) -> None:
        """Takes in what belongs into the best k.

        A row is skipped where its best new score is *strictly* worse than its k-th best: an equal one may have the
        lower index, and leaving it out would make ties depend on the order of blocks.

        Args:
            scores: (n, w) scores of a block's candidates, -inf where a column is none.
            offset: global index of column 0.
        """
        if scores.shape[1] == 0:
            return
        skipped = scores.amax(1) < self.scores.amin(1)
        self.counts[0] += skipped.sum()
        self.counts[1] += len(self)
        if scores.device.type == "cpu":
            rows = skipped.logical_not_().nonzero().squeeze(1)
            if len(rows):
                self.scores[rows], self.indices[rows] = self._with(rows, scores[rows], offset)
        else:  # how many rows are left is not known to the host, and waiting for it costs more than the work saved
            best = self._with(slice(None), scores, offset)
            self.scores.copy_(best[0])
            self.indices.copy_(best[1])

    def _with(self, rows: Tensor | slice, scores: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        columns = torch.arange(offset, offset + scores.shape[1], device=scores.device).expand_as(scores)
        more_scores, more = best_of(scores, columns, self.k)
        more = torch.where(more_scores == -torch.inf, -1, more)
        return best_of(torch.cat([self.scores[rows], more_scores], 1), torch.cat([self.indices[rows], more], 1), self.k)


def best_of(scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best min(k, w) of every row's scores with their indices, best first.

    `torch.topk` alone leaves open which of equal scores it takes.

    Args:
        scores: (n, w), NaN first and -inf last.
        indices: (n, w) int64, different from each other; below 2^32, or -1 for no candidate (score -inf).
    """
    if scores.dtype == torch.float32:
        # One 64-bit key, (score, index from the end), has no ties. Flipping the low bits of negative numbers makes the
        # order of the bit patterns that of the numbers; -0.0 + 0.0 is +0.0, which equals it.
        bits = (scores + 0.0).nan_to_num_(torch.inf, torch.inf, -torch.inf).view(torch.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        keys = (bits.to(torch.int64) << 32) | (_LAST - indices.clamp(min=0))
        order = keys.topk(min(k, keys.shape[1]), dim=1).indices
    else:
        order = indices.argsort(dim=1)
        order = order.gather(1, scores.gather(1, order).sort(dim=1, descending=True, stable=True).indices[:, :k])
    return scores.gather(1, order), indices.gather(1, order)


@dataclass(frozen=True)
class Limits:
    """Which high scores are held to be false negatives. Off where None.

    Attributes:
        absolute_margin: candidates above the positive's score less this are left out.
        relative_margin: candidates above pos - |pos| m are left out.
        max_score: candidates above this are left out.
    """

    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None

    def ceiling(self, positive: Tensor) -> Tensor | None:
        """(n,) the highest score a candidate may have in each row, or None: no limit.

        Args:
            positive: (n,) the positives' scores.
        """
        highest: Tensor | None = None
        if self.absolute_margin is not None:
            highest = positive - self.absolute_margin
        if self.relative_margin is not None:
            relative = positive - positive.abs() * self.relative_margin
            highest = relative if highest is None else torch.minimum(highest, relative)
        if self.max_score is not None:
            flat = torch.full_like(positive, self.max_score)
            highest = flat if highest is None else torch.minimum(highest, flat)
        return highest


def _tiles(engine: Engine) -> ModuleType:
    if engine.backend == "triton":
        from hf_infcl.ops.triton import topk

        return topk
    from hf_infcl.ops import torch_topk

    return torch_topk


def block_topk(
    engine: Engine,
    rows: Side,
    cols: Side,
    row_best: TopK | None,
    col_best: TopK | None,
    *,
    exclude_pairs: bool = True,
    row_ceiling: Tensor | None = None,
    col_ceiling: Tensor | None = None,
) -> None:
    """Offers a block's candidates to the best k of its rows and of its columns; None where a side is not wanted.

    Args:
        exclude_pairs: whether a row and the column of the same global index are a pair, and no candidates.
        row_ceiling, col_ceiling: (n,) highest score a candidate of a row (column) may have.
    """
    tiles = _tiles(engine)
    for r, c in chunks(rows, cols, tiles.chunk_shape(engine.device, engine.block_size)):
        tiles.offer(
            rows[r],
            cols[c],
            None if row_best is None else row_best[r],
            None if col_best is None else col_best[c],
            exclude_pairs,
            None if row_ceiling is None else row_ceiling[r],
            None if col_ceiling is None else col_ceiling[c],
            engine.precision,
            engine.block_size,
        )


def pair_scores(rows: Tensor, cols: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,) x_i . y_i of two (n, d) sides in the accumulator dtype, without an (n, d) array in that dtype."""
    return torch.cat(
        [(rows[part].to(dtype) * cols[part].to(dtype)).sum(1) for part in parts(len(rows), _PAIR_SCORES_ROWS)]
    )


def selected_statistics(positive: Tensor, best: TopK, scale: Tensor, rule: Rule) -> Statistics:
    """The statistics of rows whose candidates are their positive and their best k only.

    Args:
        positive: (n,) the positives' scores.
        best: the selected negatives of the same rows.
    """
    stats = Statistics.empty(len(best), rule, device=positive.device, dtype=positive.dtype)
    highest = torch.maximum(positive, best.hardest)
    total = (scale * (positive - highest)).exp_()
    total += (best.scores - highest[:, None]).mul_(scale).exp_().sum(1)
    stats.data[MAX], stats.data[LOG_SUM] = highest, total.log_()
    stats.data[POSITIVE_SUM], stats.data[POSITIVE_COUNT] = positive, 1
    return stats


def probabilities(scores: Tensor, stats: Statistics, scale: Tensor) -> Tensor:
    """Softmax of (n,) or (n, k) scores of rows whose statistics are known."""
    highest, log_sum = stats.data[MAX], stats.data[LOG_SUM]
    if scores.ndim == 2:
        highest, log_sum = highest[:, None], log_sum[:, None]
    return (scores - highest).mul_(scale).sub_(log_sum).exp_()


@dataclass(frozen=True)
class Links:
    """The entries of a sparse (n, m) matrix that follow from the selected negatives of its rows: k a row.

    Attributes:
        weights: (n, k) in the accumulator dtype.
        indices: (n, k) int64 global indices of the columns, -1 for none.
    """

    weights: Tensor
    indices: Tensor


def block_link_gradient(
    engine: Engine,
    target: Side,
    source: Side,
    from_target: Links | None,
    from_source: Links | None,
    factor: Tensor,
    out: Tensor,
) -> None:
    """out_i += factor sum_j A_ij source_j: a gradient's share from a block of which few entries are not zero.

    The same inputs give the same bits, on any device: the entries that the source's rows have selected are sorted by
    target first, and each target's are summed in that order.

    Args:
        target: the side whose gradient is wanted.
        source: the other side.
        from_target: what the target's rows have selected; what lies outside of `source` is left out.
        from_source: what the source's rows have selected; what lies outside of `target` is left out.
        factor: scalar.
        out: (n, d), rounded to its dtype once a call.
    """
    _tiles(engine).link_gradient(
        None if from_target is None else Links(from_target.weights, from_target.indices - source.offset),
        None if from_source is None else Links(from_source.weights, from_source.indices - target.offset),
        source.embeds,
        factor,
        out,
    )
