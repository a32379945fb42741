"""Mined negatives against the dense definition: many captions a picture, many pictures a caption."""

import pytest
import torch

from hf_infcl.evaluation import mine_hard_negatives
from hf_infcl.evaluation.mining import NothingMinedError, check_enough_candidates


def dense(images, texts, ids, from_image, take, ceiling=None, least=None, skip=0, most=None):
    """(row -> [rows of negatives' ids]) by a double loop over pairs and distinct candidates."""
    anchors, others = (images, texts) if from_image else (texts, images)
    a, o = (0, 1) if from_image else (1, 0)
    first = {}
    for row, label in enumerate(ids[:, o].tolist()):
        first.setdefault(label, row)
    labels = sorted(first)  # the order of candidates is that of their ids
    known = {tuple(pair) for pair in ids[:, [a, o]].tolist()}
    found = {}
    for row in range(len(images)):
        limit = None if ceiling is None else ceiling(float(anchors[row] @ others[row]))
        scored = []
        for number, label in enumerate(labels):
            score = float(anchors[row] @ others[first[label]])
            if (int(ids[row, a]), label) not in known and (limit is None or score <= limit):
                scored.append((-score, number, first[label]))
        ranked = sorted(scored)[skip:most]
        ranked = [entry for entry in ranked if least is None or -entry[0] >= least][:take]
        if len(ranked) == take:
            found[row] = [entry[2] for entry in ranked]
    return found


@pytest.fixture
def pairs():
    """30 pairs of 12 pictures and 14 captions, with scores that are exact and tie."""
    ids = torch.stack([torch.randint(0, 12, (30,)), torch.randint(100, 114, (30,))], 1)
    images, texts = (torch.randint(-2, 3, (200, 5)).float()[ids[:, column]] for column in (0, 1))
    return images, texts, ids


def half(pos):
    return pos - abs(pos) / 2


@pytest.mark.parametrize("direction", ["image_to_text", "text_to_image"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(num_negatives=3), dict(take=3, most=3)),
        (dict(num_negatives=2, range_min=1, range_max=6), dict(take=2, skip=1, most=6)),
        (dict(num_negatives=2, absolute_margin=1.0), dict(take=2, most=2, ceiling=lambda pos: pos - 1)),
        (dict(num_negatives=1, relative_margin=0.5, range_max=4), dict(take=1, most=4, ceiling=half)),
        (dict(num_negatives=2, max_score=4.0, min_score=-1.0), dict(take=2, most=2, ceiling=lambda _: 4.0, least=-1.0)),
        (dict(num_negatives=9, block_size=2), dict(take=9, most=9)),
    ],
)  # fmt: skip
def test_equals_the_definition(pairs, direction, options, expected):
    images, texts, ids = pairs
    mined = mine_hard_negatives(images, texts, ids, direction=direction, **options)
    reference = dense(images, texts, ids, direction == "image_to_text", **expected)
    assert dict(zip(mined.rows.tolist(), mined.negatives.tolist(), strict=True)) == reference
    anchors, others = (images, texts) if direction == "image_to_text" else (texts, images)
    scores = (anchors[mined.rows, None] * others[mined.negatives]).sum(-1)
    torch.testing.assert_close(mined.negative_scores, scores)
    assert mined.report["pairs_with_negatives"] + mined.report["pairs_without"] == 30


def test_without_ids_every_row_is_a_pair_of_its_own():
    images, texts = torch.eye(4), torch.eye(4) + 0.1
    assert mine_hard_negatives(images, texts, num_negatives=2).negatives.tolist() == [[1, 2], [0, 2], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (dict(num_negatives=4), "lower num_negatives$"),
        (dict(range_min=2), "lower num_negatives or range_min$"),
        (dict(absolute_margin=9.0, relative_margin=0.1), "lower num_negatives or absolute_margin or relative_margin$"),
        (dict(min_score=5.0), "lower num_negatives or min_score$"),
        (dict(max_score=-5.0), "lower num_negatives, or raise max_score$"),
    ],
)
def test_where_no_pair_is_left_it_is_said_what_to_lower(options, advice):
    with pytest.raises(NothingMinedError, match=f"none of the 4 pairs has . negatives among 4 distinct .*; {advice}"):
        mine_hard_negatives(torch.eye(4), torch.eye(4), **options)


@pytest.mark.parametrize("range_min", [0, 2])
def test_more_negatives_than_candidates_are_refused_before_anything_is_embedded(range_min):
    check_enough_candidates(60, 59 - range_min, range_min)
    with pytest.raises(ValueError, match="60 candidates leave a pair 59 negatives at most; lower num_negatives"):
        check_enough_candidates(60, 60 - range_min, range_min)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_negatives=0), "num_negatives must be an integer >= 1, got 0"),
        (dict(range_min=-1), "range_min must be an integer >= 0, got -1"),
        (
            dict(range_min=2, range_max=4),
            "range_max must leave room for num_negatives after range_min, got 4 for 2 . 3",
        ),
        (dict(direction="both"), "direction must be one of"),
        (dict(ids=torch.arange(4)), "ids must have two columns"),
        (dict(relative_margin=-1.0), "relative_margin must be at least 0"),
        (dict(min_score=float("nan")), "min_score must be a finite number, got nan"),
        (dict(min_score=0.5, max_score=0.4), "min_score must not be above max_score, got 0.5 and 0.4"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        mine_hard_negatives(torch.eye(4), torch.eye(4), **options)
