"""`hard_negative_loss` against the dense float64 oracle, on the PyTorch backend."""

import inspect
import logging

import pytest
import torch

from hf_infcl import HardNegativeLoss, MemoryBank, contrastive_loss, hard_negative_loss
from tests import oracles


def integer_pairs(n, d, seed=0):
    """Embeddings of small integers: every product is exact, and ties abound."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(-2, 3, (n, d), generator=g).double() for _ in range(2))


def compare(x, y, scale, k, *, dtype=torch.float32, tolerance=1e-4, bank=None, ceiling=None, **options):
    """Value and the three gradients against the oracle, at embeddings rounded to `dtype` for both."""
    x, y = x.to(dtype).double(), y.to(dtype).double()
    ids = options.get("ids")
    leaves = [
        x.clone().requires_grad_(),
        y.clone().requires_grad_(),
        torch.tensor(scale, dtype=torch.float64).requires_grad_(),
    ]
    known = {name: value for name, value in options.items() if name in ("ids", "direction")}
    expected = oracles.hard_negative(*leaves, k, bank=bank, ceiling=ceiling, **known)
    expected.backward()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mine = [x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_(), torch.tensor([scale], dtype=wide)]
    mine[2].requires_grad_()
    if bank is not None:
        options["bank"] = MemoryBank(len(bank[0]), x.shape[1], dtype=dtype)
        options["bank"].push(bank[0], bank[1], bank[2] if ids is not None else None)
    loss, stats = hard_negative_loss(*mine, k=k, return_stats=True, **options)
    loss.backward()
    assert loss.dtype == wide
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    for leaf, reference in zip(mine[:2], leaves[:2], strict=True):
        assert leaf.grad.dtype == dtype
        assert oracles.gradient_error(leaf.grad, reference.grad, scale) < tolerance
    assert mine[2].grad.shape == (1,)
    assert mine[2].grad.item() == pytest.approx(leaves[2].grad.item(), rel=10 * tolerance, abs=tolerance)
    return stats


@pytest.mark.parametrize("block_size", [None, 1, 2, 16, 33])
@pytest.mark.parametrize("columns", [0, 1, 2])
def test_takes_what_a_dense_top_k_takes_with_ties(block_size, columns):
    n = 33
    ids = torch.randint(0, 16, (n, columns)) if columns else None
    for k in (1, 2, 7, 32, 100):
        compare(*integer_pairs(n, 5), 0.25, k, ids=ids, block_size=block_size)


@pytest.mark.parametrize("kind", ["random", "trained", "identical", "opposite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_matches_float64(kind, dtype):
    for scale in (1.0, 14.3, 100.0):
        for n, d, k in [(1, 7, 1), (2, 1, 1), (65, 16, 3), (300, 64, 16)]:
            tolerance = {torch.float32: 1e-4, torch.float64: 1e-9}.get(dtype, 2**-7)
            compare(*oracles.pairs(kind, n, d), scale, k, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("direction", ["both", "image_to_text", "text_to_image"])
@pytest.mark.parametrize("with_bank", [False, True])
@pytest.mark.parametrize("columns", [0, 2])
def test_directions_bank_and_ids(direction, with_bank, columns):
    ids = torch.randint(0, 15, (33, columns)) if columns else None
    bank = (*integer_pairs(21, 4, 9), torch.randint(0, 15, (21, 2))) if with_bank else None
    for k in (1, 5, 200):
        for block_size in (None, 8):
            compare(*integer_pairs(33, 4), 0.5, k, ids=ids, bank=bank, direction=direction, block_size=block_size)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("with_bank", [False, True])
@pytest.mark.parametrize("direction", ["both", "image_to_text", "text_to_image"])
def test_a_k_that_covers_all_is_the_contrastive_loss(with_ids, with_bank, direction):
    n, d = 40, 16
    ids = torch.randint(0, 25, (n,)) if with_ids else None
    bank = None
    if with_bank:
        bank = MemoryBank(30, d, dtype=torch.float64)
        bank.push(*oracles.pairs("random", 50, d, 3), ids=torch.randint(0, 25, (50,)) if with_ids else None)
    sides = [*oracles.pairs("trained", n, d), torch.tensor(20.0, dtype=torch.float64)]
    sides = [side.requires_grad_() for side in sides]
    options = dict(ids=ids, bank=bank, direction=direction)
    dense, hard = contrastive_loss(*sides, **options), hard_negative_loss(*sides, k=n + 30, **options)
    torch.testing.assert_close(dense, hard, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(dense, sides), torch.autograd.grad(hard, sides), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_equal_scores_go_to_the_lowest_index_and_only_those_get_gradient():
    x = torch.ones(6, 2, requires_grad=True)
    y = torch.ones(6, 2, requires_grad=True)
    for block_size in (1, 2, 6):
        loss = hard_negative_loss(x, y, 1.0, k=2, direction="image_to_text", block_size=block_size)
        assert loss.item() == pytest.approx(torch.tensor(3.0).log().item(), abs=1e-6)
        gradient = torch.autograd.grad(loss, y)[0][:, 0]
        # Texts 3 to 5 are nobody's negative: their gradient is their own pair's, (1/3 - 1) / 6.
        assert gradient[3:].tolist() == pytest.approx([-2 / 18] * 3)
        assert gradient[:3].tolist() == pytest.approx([-2 / 18 + 5 / 18, -2 / 18 + 5 / 18, -2 / 18 + 2 / 18], abs=1e-6)


def test_a_tie_between_batch_and_bank_goes_to_the_batch_and_then_to_the_oldest():
    x, y = torch.ones(2, 1), torch.ones(2, 1, requires_grad=True)
    bank = MemoryBank(3, 1)
    for value in (5.0, 1.0, 1.0, 1.0):  # the first falls out again
        bank.push(torch.full((1, 1), value), torch.full((1, 1), value))
    assert bank.text_embeds.flatten().tolist() == [1.0, 1.0, 1.0]
    loss = hard_negative_loss(x, y, 1.0, k=1, bank=bank, direction="image_to_text")
    assert torch.autograd.grad(loss, y)[0].flatten().tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("limits", "ceiling"),
    [
        (dict(absolute_margin=0.0), lambda pos: pos),
        (dict(absolute_margin=2.0), lambda pos: pos - 2),
        (dict(relative_margin=0.5), lambda pos: pos - pos.abs() * 0.5),
        (dict(max_score=3.0), lambda pos: torch.full_like(pos, 3.0)),
        (
            dict(absolute_margin=1.0, relative_margin=0.25, max_score=4.0),
            lambda pos: torch.minimum(pos - 1, pos - pos.abs() * 0.25).clamp(max=4),
        ),
    ],
)
@pytest.mark.parametrize("block_size", [None, 3])
def test_limits_against_false_negatives(limits, ceiling, block_size):
    compare(*integer_pairs(40, 5), 0.5, 4, ceiling=ceiling, block_size=block_size, **limits)


def test_nan_reaches_the_loss():
    x, y = (side.float() for side in oracles.pairs("random", 9, 4))
    bad = y.clone()
    bad[4, 1] = torch.nan
    for block_size in (1, 9):
        assert hard_negative_loss(x, bad, 10.0, k=1, block_size=block_size).isnan()
        assert hard_negative_loss(bad, y, 10.0, k=1, block_size=block_size, max_score=0.0).isnan()
        assert hard_negative_loss(x, bad, 10.0, k=2, block_size=block_size, direction="image_to_text").isnan()
    bank = MemoryBank(9, 4)
    bank.push(x, bad)
    assert hard_negative_loss(x, y, 10.0, k=1, bank=bank, block_size=2).isnan()


def test_statistics():
    x, y = integer_pairs(50, 4)
    _, stats = hard_negative_loss(x, y, 1.0, k=3, return_stats=True, bank=MemoryBank(7, 4, dtype=torch.float64))
    negatives = (x @ y.T).fill_diagonal_(-torch.inf)
    hardest = torch.cat([negatives.amax(1), negatives.amax(0)])
    assert stats["hardest_similarity"].item() == pytest.approx(hardest.mean().item(), rel=1e-6)
    beaten = (hardest > (x * y).sum(1).repeat(2)).double().mean()
    assert stats["hardest_beats_positive"].item() == pytest.approx(beaten.item(), rel=1e-6)
    assert stats["bank_fill"].item() == 0
    assert stats["row_skip_ratio"].item() == 0  # one block holds all
    _, stats = hard_negative_loss(x, y, 1.0, k=1, return_stats=True, block_size=1)
    assert 0 < stats["row_skip_ratio"].item() < 1


def test_more_negatives_than_there_are_is_said_once(caplog):
    x, y = (side.float() for side in oracles.pairs("random", 5, 4))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            hard_negative_loss(x, y, 10.0, k=4321)
    assert [record.message for record in caplog.records] == [
        "k = 4321 is more than the 4 negatives that an anchor can have: all of them are used"
    ]


def test_same_inputs_give_the_same_bits():
    x, y = (side.float().requires_grad_() for side in oracles.pairs("random", 200, 32))
    runs = []
    for _ in range(2):
        loss = hard_negative_loss(x, y, 50.0, k=5)
        runs.append((loss, *torch.autograd.grad(loss, (x, y))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_any_stride_and_wanted_gradients_only():
    x, y = (side.float() for side in oracles.pairs("random", 40, 12))
    padded = torch.full((80, 30), torch.nan)
    padded[::2, 3:27:2] = x
    view = padded[::2, 3:27:2]
    expected = hard_negative_loss(x, y, 20.0, k=5)
    assert hard_negative_loss(view, y.T.contiguous().T, 20.0, k=5).item() == pytest.approx(expected.item(), rel=1e-6)
    y.requires_grad_()
    only = torch.autograd.grad(hard_negative_loss(x, y, 20.0, k=5), y)[0]
    x.requires_grad_()
    assert torch.equal(torch.autograd.grad(hard_negative_loss(x, y, 20.0, k=5), y)[0], only)


def test_autocast_does_not_round_the_loss():
    x, y = (side.float().requires_grad_() for side in oracles.pairs("random", 50, 16))
    plain = torch.autograd.grad(hard_negative_loss(x, y, 50.0, k=5), x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = hard_negative_loss(x, y, 50.0, k=5)
        assert loss.dtype == torch.float32
        assert torch.equal(torch.autograd.grad(loss, x)[0], plain)


@pytest.mark.parametrize("ids", [None, torch.arange(12) // 2])
def test_compiles_without_a_graph_break(ids):
    x, y = (side.float().requires_grad_() for side in oracles.pairs("trained", 12, 8))
    scale = torch.tensor([3.0], requires_grad=True)

    def step(x, y, scale):
        return hard_negative_loss(x * 1.0, y, scale.exp(), k=3, ids=ids, relative_margin=0.05) * 2

    eager = torch.autograd.grad(step(x, y, scale), (x, y, scale))
    compiled_step = torch.compile(step, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(compiled_step(x, y, scale), (x, y, scale))
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)


def test_module_equals_function_and_describes_itself():
    x, y = oracles.pairs("random", 10, 4)
    ids = torch.arange(10) // 2
    loss = HardNegativeLoss(3, direction="text_to_image", block_size=4, relative_margin=0.1)
    assert loss(x, y, 5.0, None, ids=ids) == hard_negative_loss(x, y, 5.0, ids=ids, **loss.get_config_dict())
    assert "row_skip_ratio" in loss.last_stats
    assert "@inproceedings" in loss.citation


def test_signature_is_the_published_one():
    assert list(inspect.signature(hard_negative_loss).parameters)[:12] == [
        "image_embeds", "text_embeds", "logit_scale", "k", "ids", "bank", "direction", "block_size", "group", "backend",
        "precision", "return_stats",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(k=0), "k must be an integer >= 1, got 0"),
        (dict(k=2.0), "k must be an integer >= 1, got 2.0"),
        (dict(image_embeds=torch.ones(4)), r"image_embeds must have shape .*got \(4,\)"),
        (dict(logit_scale=0.0), "logit_scale must be finite in torch.float32 and greater than 0, got 0.0"),
        (dict(bank=3), "bank must be a MemoryBank or None, got int"),
        (dict(direction="images"), "direction must be one of"),
        (dict(absolute_margin=-0.1), "absolute_margin must be at least 0, got -0.1"),
        (dict(relative_margin="a"), "relative_margin must be a finite number or None, got 'a'"),
        (dict(max_score=float("nan")), "max_score must be a finite number or None, got nan"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    given = dict(image_embeds=torch.eye(4), text_embeds=torch.eye(4), logit_scale=10.0, k=2) | arguments
    with pytest.raises(ValueError, match=message):
        hard_negative_loss(given.pop("image_embeds"), given.pop("text_embeds"), given.pop("logit_scale"), **given)


def test_memory_does_not_grow_with_a_k_beyond_the_candidates():
    """With room for k of them, 10^9 would not fit into any memory."""
    x, y = (side.requires_grad_() for side in oracles.pairs("random", 20, 8))
    loss = hard_negative_loss(x, y, 10.0, k=10**9)
    loss.backward()
    assert loss.item() == pytest.approx(contrastive_loss(x, y, 10.0).item(), rel=1e-9)
