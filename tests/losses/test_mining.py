"""`hardest_negatives` against a dense top-k, on the PyTorch backend."""

import inspect

import pytest
import torch

from hf_infcl import hardest_negatives


def dense(queries, keys, k, alike=None):
    """Scores and indices by the definition: a stable sort of the whole matrix."""
    scores = queries.double() @ keys.double().T
    if alike is not None:
        scores = scores.masked_fill(alike, -torch.inf)
    scores, indices = scores.sort(dim=1, descending=True, stable=True)
    short = max(k - scores.shape[1], 0)
    scores = torch.nn.functional.pad(scores[:, :k], (0, short), value=-torch.inf)
    indices = torch.nn.functional.pad(indices[:, :k], (0, short), value=-1)
    return scores.float(), indices.masked_fill(scores == -torch.inf, -1)


@pytest.mark.parametrize("block_size", [None, 1, 2, 64, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("kind", "k"), [("ties", 1), ("ties", 20), ("ties", 100), ("equal", 3), ("copies", 20)])
def test_equals_a_dense_top_k(k, block_size, dtype, kind):
    queries, keys = (torch.randint(-2, 3, (n, 6)).to(dtype) for n in (37, 70))
    if kind == "equal":
        keys[:] = keys[0]
    if kind == "copies":
        keys = keys[torch.randint(0, 9, (70,))]
    scores, indices, stats = hardest_negatives(queries, keys, k, block_size=block_size)
    expected_scores, expected_indices = dense(queries, keys, k)
    assert torch.equal(scores, expected_scores)
    assert torch.equal(indices, expected_indices)
    assert scores.dtype == torch.float32
    assert indices.dtype == torch.int64
    assert 0 <= stats["row_skip_ratio"] < 1


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("block_size", [None, 4])
def test_leaves_out_what_is_the_same(columns, block_size):
    queries, keys = torch.randint(-2, 3, (37, 4)).float(), torch.randint(-2, 3, (20, 4)).float()
    ids, key_ids = torch.randint(0, 5, (37, columns)), torch.randint(0, 5, (20, columns))
    alike = (ids[:, None] == key_ids[None]).any(-1)
    scores, indices, _ = hardest_negatives(queries, keys, 18, ids=ids, key_ids=key_ids, block_size=block_size)
    expected_scores, expected_indices = dense(queries, keys, 18, alike)
    assert torch.equal(scores, expected_scores)
    assert torch.equal(indices, expected_indices)
    assert (indices[:, -1] == -1).any(), "some row has fewer than k keys"


def test_copies_tie_whatever_their_place():
    """Scores that are not exact: equal keys must still get equal bits, in full blocks and in ragged ones."""
    queries = torch.nn.functional.normalize(torch.randn(70, 33), dim=-1)
    keys = torch.nn.functional.normalize(torch.randn(7, 33), dim=-1).repeat(19, 1)
    for block_size in (None, 1, 64, 100):
        _, indices, _ = hardest_negatives(queries, keys, 19, block_size=block_size)
        assert torch.equal(indices.diff(dim=1), torch.full((70, 18), 7))


def test_nothing_is_left_out_without_ids():
    eye = torch.eye(5)
    assert torch.equal(hardest_negatives(eye, eye, 1)[1].flatten(), torch.arange(5))
    assert torch.equal(hardest_negatives(eye, eye, 1, ids=torch.arange(5))[1].flatten(), torch.tensor([1, 0, 0, 0, 0]))


def test_nan_comes_first():
    keys = torch.eye(6)
    keys[4, 0] = torch.nan
    for block_size in (1, 6):
        scores, indices, _ = hardest_negatives(torch.ones(3, 6), keys, 2, block_size=block_size)
        assert scores[:, 0].isnan().all()
        assert indices.tolist() == [[4, 0]] * 3


@pytest.mark.parametrize(("k", "block_size"), [(1, 8), (8, 32), (32, 128)])
def test_skip_ratio_in_random_order_is_the_theorys(k, block_size):
    n = 4096
    queries, keys = torch.randn(512, 16), torch.randn(n, 16)
    ratio = hardest_negatives(queries, keys, k, block_size=block_size)[2]["row_skip_ratio"]
    t = torch.arange(1, n // block_size + 1)
    # A block is skipped where none of the k best so far, itself included, lies in it.
    assert ratio.item() == pytest.approx(((1 - 1 / t) ** k).mean().item(), abs=0.01)


def test_results_carry_no_graph():
    queries = torch.randn(4, 3, requires_grad=True)
    scores, _, _ = hardest_negatives(queries, queries, 2)
    assert not scores.requires_grad


def test_signature_is_the_published_one():
    assert list(inspect.signature(hardest_negatives).parameters) == [
        "queries", "keys", "k", "ids", "key_ids", "block_size", "group", "backend", "precision",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(k=0), "k must be an integer >= 1, got 0"),
        (dict(keys=torch.ones(4, 3)), "queries and keys must have the same dimension d, got 2 and 3"),
        (dict(keys=torch.ones(4, 2).half()), "keys must have the dtype of queries"),
        (dict(ids=torch.arange(3)), "key_ids must be given with ids .* got 4 keys and 3 queries"),
        (dict(key_ids=torch.arange(4)), r"ids and key_ids must have the same number of columns .* got None and 1"),
        (dict(ids=torch.ones(3), key_ids=torch.arange(4)), "ids must be integers"),
        (dict(block_size=0), "block_size must be an integer >= 1 or None, got 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    given = dict(queries=torch.ones(3, 2), keys=torch.ones(4, 2), k=1) | arguments
    with pytest.raises(ValueError, match=message):
        hardest_negatives(given.pop("queries"), given.pop("keys"), given.pop("k"), **given)
