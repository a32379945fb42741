"""Hard negatives of a data set: for every pair, the wrong captions (or pictures) that a model ranks highest."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_infcl.losses import checks
from hf_infcl.ops import Limits, Side, accumulator_dtype
from hf_infcl.ops.topk import pair_scores
from hf_infcl.ring import HardNegativeSpec, hardest

DIRECTIONS = ("image_to_text", "text_to_image")


@dataclass(frozen=True)
class MinedNegatives:
    """What `mine_hard_negatives` found for the pairs of a data set.

    Attributes:
        rows: (p,) int64 rows of the pairs that have enough negatives.
        negatives: (p, num_negatives) int64 rows whose other side is a negative of the pair's anchor, hardest first.
        positive_scores: (p,) float32 score of each pair.
        negative_scores: (p, num_negatives) float32.
        report: what was searched and found, in numbers.
    """

    rows: Tensor
    negatives: Tensor
    positive_scores: Tensor
    negative_scores: Tensor
    report: dict[str, float]


class NothingMinedError(ValueError):
    """Not one pair has as many negatives as were asked for; the message says what to lower."""


def _first_rows(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each row's label, and the first row of every label."""
    distinct, numbers = labels.unique(return_inverse=True)
    first = torch.full((len(distinct),), len(labels), dtype=torch.int64, device=labels.device)
    first.scatter_reduce_(0, numbers, torch.arange(len(labels), device=labels.device), "amin")
    return numbers, first


def check_mining_options(
    direction: str,
    num_negatives: int,
    range_min: int,
    range_max: int | None,
    absolute_margin: float | None,
    relative_margin: float | None,
    min_score: float | None,
    max_score: float | None,
) -> Limits:
    """Refuses options of `mine_hard_negatives` that make no sense, before anything is embedded.

    Returns:
        The limits against false negatives.

    Raises:
        ValueError: names the option.
    """
    checks.check_choice("direction", direction, DIRECTIONS)
    checks.check_count("num_negatives", num_negatives)
    checks.check_count("range_min", range_min, 0)
    if range_max is not None:
        checks.check_count("range_max", range_max)
        if range_max < range_min + num_negatives:
            raise ValueError(
                f"range_max must leave room for num_negatives after range_min, got {range_max} for {range_min} + "
                f"{num_negatives}"
            )
    if min_score is not None and not math.isfinite(min_score):
        raise ValueError(f"min_score must be a finite number, got {min_score}")
    if min_score is not None and max_score is not None and min_score > max_score:
        raise ValueError(f"min_score must not be above max_score, got {min_score} and {max_score}")
    return checks.limits(absolute_margin, relative_margin, max_score)


def check_enough_candidates(candidates: int, num_negatives: int, range_min: int) -> None:
    """Refuses to look for more negatives than there are: of all candidates at least one is the pair's own.

    Args:
        candidates: how many there are at most, such as the pairs of a data set.
        num_negatives, range_min: see `mine_hard_negatives`.

    Raises:
        ValueError: says how many there can be.
    """
    if range_min + num_negatives >= candidates:
        after = f" after range_min {range_min}" if range_min else ""
        raise ValueError(
            f"num_negatives is {num_negatives}{after}, but {candidates} candidate{'s' * (candidates != 1)} leave a "
            f"pair {candidates - 1} negative{'s' * (candidates != 2)} at most; lower num_negatives"
            + (" or range_min" if range_min else "")
        )


@torch.no_grad()
def mine_hard_negatives(
    image_embeds: Tensor,
    text_embeds: Tensor,
    ids: Tensor | None = None,
    *,
    direction: str = "image_to_text",
    num_negatives: int = 3,
    range_min: int = 0,
    range_max: int | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    min_score: float | None = None,
    max_score: float | None = None,
    block_size: int | None = None,
    backend: str = "auto",
    precision: str = "auto",
) -> MinedNegatives:
    """The hardest negatives of every pair over all distinct captions (or pictures) of the data set, exactly.

    A caption that any pair gives to the anchor's picture is a positive, and never a negative, however many captions a
    picture and pictures a caption has. Memory grows with the number of pairs, not with its square.

    Args:
        image_embeds: (n, d) embeddings of the pairs' pictures, normalised.
        text_embeds: (n, d) embeddings of their captions.
        ids: (n, 2) integers, picture and caption of each pair; None: all are different.
        direction: ``"image_to_text"`` (pictures are anchors, captions are negatives) or ``"text_to_image"``.
        num_negatives: negatives for each pair.
        range_min: how many of the hardest are passed over: the very first are often unlabelled positives.
        range_max: rank from which on none are taken; by default range_min + num_negatives.
        absolute_margin: candidates that score above pos - absolute_margin are left out; pos is the pair's own score.
        relative_margin: candidates above pos - |pos| relative_margin are left out.
        min_score: candidates below this are left out.
        max_score: candidates above this are left out.
        block_size, backend, precision: as in `hf_infcl.hardest_negatives`.

    Returns:
        The pairs that have ``num_negatives`` negatives, and those.

    Raises:
        ValueError: an argument of the wrong shape or value, named in the message.
        NothingMinedError: no pair has ``num_negatives`` negatives; a ValueError too.

    Example:
        >>> images, texts = torch.eye(4), torch.eye(4) + 0.1
        >>> mine_hard_negatives(images, texts, num_negatives=2).negatives.tolist()
        [[1, 2], [0, 2], [0, 1], [0, 1]]

    Source: the margins are those of NV-Retriever (arXiv 2407.15831), section 4.
    """
    checks.check_pairs(image_embeds, text_embeds)
    checks.check_options(block_size=block_size, backend=backend, precision=precision)
    limits = check_mining_options(
        direction, num_negatives, range_min, range_max, absolute_margin, relative_margin, min_score, max_score
    )
    range_max = range_min + num_negatives if range_max is None else range_max
    known = checks.check_ids("ids", ids, image_embeds)
    if known is None:
        known = torch.arange(len(image_embeds), device=image_embeds.device)[:, None].expand(-1, 2)
    if known.shape[1] != 2:
        raise ValueError(f"ids must have two columns, picture and caption, got {known.shape[1]}")

    from_image = direction == "image_to_text"
    anchors, others = (image_embeds, text_embeds) if from_image else (text_embeds, image_embeds)
    anchor_number, anchor_rows = _first_rows(known[:, 0 if from_image else 1])
    other_number, other_rows = _first_rows(known[:, 1 if from_image else 0])
    positive = pair_scores(anchors, others, accumulator_dtype(anchors.dtype))
    # All pairs of the data set, as one sorted list of numbers.
    labelled = (anchor_number * len(other_rows) + other_number).unique()
    # A candidate stands for itself by its first pair, whose anchor the sweep leaves out. The anchor's other positives
    # are taken out afterwards, so as many more are searched.
    own = anchor_number[other_rows]
    others_left = labelled[~torch.isin(labelled, own * len(other_rows) + torch.arange(len(own), device=own.device))]
    more = int((others_left // len(other_rows)).bincount().max()) if len(others_left) else 0
    spec = HardNegativeSpec(
        block_size=block_size, group=False, backend=backend, precision=precision, k=range_max + more
    )
    queries = Side(anchors, 0, anchor_number[:, None])
    scores, found, counts = hardest(queries, Side(others[other_rows], 0, own[:, None]), spec, limits.ceiling(positive))
    code = anchor_number[:, None] * len(other_rows) + found
    place = torch.searchsorted(labelled, code).clamp_(max=len(labelled) - 1)
    usable = (found >= 0) & (labelled[place] != code)
    rank = usable.cumsum(1) - 1
    usable &= (rank >= range_min) & (rank < range_max)
    if min_score is not None:
        usable &= scores >= min_score
    enough = usable.sum(1) >= num_negatives
    if not enough.any():
        given = {
            "range_min": range_min or None,
            "absolute_margin": absolute_margin,
            "relative_margin": relative_margin,
            "min_score": min_score,
        }
        lower = ["num_negatives", *(name for name, value in given.items() if value is not None)]
        raise NothingMinedError(
            f"{direction}: none of the {len(anchors)} pairs has {num_negatives} negatives among "
            f"{len(other_rows)} distinct candidates; lower {' or '.join(lower)}"
            + ("" if max_score is None else ", or raise max_score")
        )
    chosen = usable & (usable.cumsum(1) <= num_negatives)
    rows = enough.nonzero().squeeze(1)
    places = chosen[rows].nonzero()[:, 1].reshape(-1, num_negatives)
    negative_scores = scores[rows].gather(1, places)
    skipped, met = counts.tolist()
    report = {
        "pairs": len(anchors),
        "anchors": len(anchor_rows),
        "candidates": len(other_rows),
        "pairs_with_negatives": len(rows),
        "pairs_without": len(anchors) - len(rows),
        "mean_positive_score": positive[rows].mean().item(),
        "mean_negative_score": negative_scores.mean().item(),
        "mean_hardest_score": negative_scores[:, 0].mean().item(),
        "share_hardest_beats_positive": (negative_scores[:, 0] > positive[rows]).float().mean().item(),
        "row_skip_ratio": skipped / max(met, 1),
    }
    return MinedNegatives(
        rows, other_rows[found[rows].gather(1, places)], positive[rows].float(), negative_scores.float(), report
    )
