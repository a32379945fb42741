"""`contrastive_loss` against the dense float64 oracle, on the PyTorch backend."""

import inspect
import itertools

import numpy as np
import pytest
import torch

from hf_infcl import ContrastiveLoss, MemoryBank, contrastive_loss, hard_negative_loss, sigmoid_loss
from tests import oracles
from tests.comparisons import KINDS, SCALES, compare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "d"),
    [(1, 1), (2, 7), (3, 64), (63, 100), (127, 512), (300, 768), (513, 64), (1000, 7), (1, 768), (1000, 100)],
)
def test_matches_float64_on_ragged_shapes(n, d, kind):
    for seed, scale in enumerate(SCALES):
        compare(*oracles.pairs(kind, n, d, seed), scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_float64_in_other_dtypes(dtype, kind):
    for scale, (n, d) in itertools.product(SCALES, [(3, 7), (300, 100)]):
        compare(*oracles.pairs(kind, n, d), scale, dtype=dtype, tolerance=2**-7 if dtype != torch.float64 else 1e-9)


@pytest.mark.parametrize("duplicates", ["mask", "positive", "keep"])
@pytest.mark.parametrize("direction", ["both", "image_to_text", "text_to_image"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("with_bank", [False, True])
def test_options_match_float64(duplicates, direction, label_smoothing, columns, with_bank):
    n, d = 65, 16
    ids = torch.randint(0, 20, (n, columns))
    bank = None
    if with_bank:
        bank = (
            *(side.float().double() for side in oracles.pairs("random", 37, d, 9)),
            torch.randint(0, 20, (37, columns)),
        )
    for block_size in (None, 16):
        compare(
            *oracles.pairs("trained", n, d),
            14.3,
            bank=bank,
            ids=ids,
            duplicates=duplicates,
            direction=direction,
            label_smoothing=label_smoothing,
            block_size=block_size,
        )


@pytest.mark.parametrize("block_size", [1, 2, 5, 100])
def test_any_block_size_gives_the_same_loss(block_size):
    ids = torch.randint(0, 4, (11, 2))
    compare(*oracles.pairs("trained", 11, 3), 14.3, ids=ids, label_smoothing=0.1, block_size=block_size)


def test_one_column_of_ids_may_come_flat():
    x, y = oracles.pairs("random", 9, 4)
    ids = torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 5])
    assert contrastive_loss(x, y, 10.0, ids=ids) == contrastive_loss(x, y, 10.0, ids=ids[:, None].int())


@pytest.mark.parametrize("scale", [1e-3, 1e4, 1e6])
def test_extreme_scales_stay_exact(scale):
    compare(*oracles.pairs("random", 130, 32), scale, value_tolerance=3e-5, tolerance=2e-3)


def test_log_sum_exp_survives_small_cosines_at_large_scale():
    """Cosines all below 0.1 with s = 100: a fixed maximum of s would underflow."""
    x, y = oracles.pairs("random", 200, 2048)
    assert (x @ y.T).max() < 0.13
    compare(x, y, 100.0)
    compare(x, y, 1e4, value_tolerance=1e-5, tolerance=1e-3)


@pytest.mark.parametrize("n", [1, 2, 5, 64])
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_constant_embeddings_give_log_n(n, block_size):
    for scale in (1.0, 100.0):
        ones = torch.full((n, 4), 0.5)
        expected = torch.tensor(float(n)).log().item()
        assert contrastive_loss(ones, ones, scale, block_size=block_size).item() == pytest.approx(expected, abs=1e-6)


def test_copies_keep_a_floor_unless_masked():
    """Pairs A, A, B, B with perfect embeddings: ln 2 when copies are negatives, 0 when they are left out."""
    e = torch.eye(2).repeat_interleave(2, 0)
    ids = torch.tensor([0, 0, 1, 1])
    assert contrastive_loss(e, e, 100.0).item() == pytest.approx(0.693147, abs=1e-6)
    assert contrastive_loss(e, e, 100.0, ids=ids, duplicates="keep").item() == pytest.approx(0.693147, abs=1e-6)
    assert contrastive_loss(e, e, 100.0, ids=ids).item() < 1e-6
    assert contrastive_loss(e, e, 100.0, ids=ids, duplicates="positive").item() == pytest.approx(0.693147, abs=1e-6)


def test_zero_rows_stay_finite_and_nan_reaches_the_loss():
    x, y = (side.float() for side in oracles.pairs("random", 4, 8))
    x[3] = 0
    x.requires_grad_()
    contrastive_loss(x, y, 100.0).backward()
    assert x.grad.isfinite().all()
    zeros = torch.zeros(4, 8, requires_grad=True)
    loss = contrastive_loss(zeros, y, 100.0)
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(4.0).log().item(), abs=1e-6)
    assert zeros.grad.isfinite().all()
    bad = y.clone()
    bad[1, 2] = torch.nan
    assert contrastive_loss(bad, y, 10.0).isnan()
    assert contrastive_loss(y, bad, 10.0, direction="image_to_text").isnan()


def test_any_stride_and_nothing_outside_the_slice():
    x, y = (side.float() for side in oracles.pairs("random", 40, 12))
    padded = torch.full((80, 30), torch.nan)
    padded[::2, 3:27:2] = x
    view = padded[::2, 3:27:2]
    expected = contrastive_loss(x, y, 20.0)
    assert contrastive_loss(view, y.T.contiguous().T, 20.0) == pytest.approx(expected.item(), rel=1e-6)


def test_same_inputs_give_the_same_bits():
    x, y = (side.float().requires_grad_() for side in oracles.pairs("random", 300, 64))
    runs = []
    for _ in range(2):
        loss = contrastive_loss(x, y, 50.0)
        runs.append((loss, *torch.autograd.grad(loss, (x, y))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_only_the_wanted_gradients_are_computed():
    x, y = oracles.pairs("random", 20, 8)
    scale = torch.tensor(14.3, dtype=torch.float64, requires_grad=True)
    reference = torch.autograd.grad(oracles.contrastive(x, y, scale), scale)[0]
    assert torch.autograd.grad(contrastive_loss(x, y, scale), scale)[0] == pytest.approx(reference.item(), rel=1e-9)
    x.requires_grad_()
    loss = contrastive_loss(x, y, 14.3)
    torch.testing.assert_close(
        torch.autograd.grad(loss, x)[0], torch.autograd.grad(oracles.contrastive(x, y, torch.tensor(14.3)), x)[0],
        rtol=1e-6, atol=1e-9,
    )  # fmt: skip


def test_autocast_does_not_round_the_loss():
    x, y = (side.float().requires_grad_() for side in oracles.pairs("random", 50, 16))
    plain = torch.autograd.grad(contrastive_loss(x, y, 50.0), x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = contrastive_loss(x, y, 50.0)
        assert loss.dtype == torch.float32
        inside = torch.autograd.grad(loss, x)[0]
    assert torch.equal(plain, inside)


@pytest.mark.parametrize("ids", [None, torch.arange(12) // 2])
def test_compiles_without_a_graph_break(ids):
    x, y = (side.float().requires_grad_() for side in oracles.pairs("trained", 12, 8))
    scale = torch.tensor([3.0], requires_grad=True)

    def step(x, y, scale):
        return contrastive_loss(x * 1.0, y, scale.exp(), ids=ids, label_smoothing=0.1) * 2

    eager = torch.autograd.grad(step(x, y, scale), (x, y, scale))
    compiled_step = torch.compile(step, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(compiled_step(x, y, scale), (x, y, scale))
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)


def test_module_equals_function_and_describes_itself():
    x, y = oracles.pairs("random", 10, 4)
    ids = torch.arange(10) // 2
    loss = ContrastiveLoss(duplicates="positive", label_smoothing=0.1, direction="text_to_image", block_size=4)
    assert loss(x, y, 5.0, None, ids=ids) == contrastive_loss(x, y, 5.0, ids=ids, **loss.get_config_dict())
    assert loss.get_config_dict()["duplicates"] == "positive"
    assert "2410.17243" in loss.citation


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: contrastive_loss(x, x.detach(), 5.0),
        lambda x: sigmoid_loss(x, x.detach(), 5.0, 0.0),
        lambda x: hard_negative_loss(x, x.detach(), 5.0, k=2),
    ],
)
def test_a_graph_of_the_gradient_is_refused(loss):
    """Silently without effect would be worse: a penalty on the gradient would train nothing."""
    x = torch.eye(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss(x), x, create_graph=True)


def test_numbers_of_numpy_are_numbers():
    assert contrastive_loss(EMBEDS, EMBEDS, np.float32(3)) == contrastive_loss(EMBEDS, EMBEDS, 3)


def test_signature_is_the_published_one():
    assert list(inspect.signature(contrastive_loss).parameters) == [
        "image_embeds", "text_embeds", "logit_scale", "ids", "duplicates", "bank", "direction", "label_smoothing",
        "block_size", "group", "backend", "precision",
    ]  # fmt: skip


EMBEDS = torch.eye(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(image_embeds=[[1.0]]), "image_embeds must be a tensor of shape .n, d., got list"),
        (dict(image_embeds=torch.ones(4)), r"image_embeds must have shape .*got \(4,\)"),
        (dict(text_embeds=torch.ones(0, 4)), r"text_embeds must have shape .*got \(0, 4\)"),
        (dict(text_embeds=torch.ones(5, 4)), r"same shape .*got \(4, 4\) and \(5, 4\)"),
        (dict(image_embeds=torch.ones(4, 4).int()), "image_embeds must be float32.*got torch.int32"),
        (dict(text_embeds=EMBEDS.half()), "text_embeds must have the dtype of image_embeds.*float16 and torch.float32"),
        (dict(text_embeds=EMBEDS.to("meta")), "text_embeds must be on the device of image_embeds.*meta and cpu"),
        (dict(logit_scale=0.0), "logit_scale must be finite in torch.float32 and greater than 0, got 0.0"),
        (dict(logit_scale=1e-46), "logit_scale must be finite in torch.float32 and greater than 0, got 1e-46"),
        (dict(logit_scale=float("inf")), "logit_scale must be finite in torch.float32 and greater than 0, got inf"),
        (dict(logit_scale=float("nan")), "logit_scale must be finite"),
        (dict(logit_scale=1e300), "logit_scale must be finite in torch.float32 and greater than 0, got 1e.300"),
        (dict(logit_scale=10**400), "logit_scale must be finite in torch.float32"),
        (dict(image_embeds=EMBEDS.to_sparse()), "image_embeds must be a dense tensor, got layout torch.sparse_coo"),
        (dict(group="ranks"), "group must be a process group, None or False, got 'ranks'"),
        (dict(logit_scale="100"), "logit_scale must be a number or a one-element tensor, got str"),
        (dict(logit_scale=torch.ones(2)), r"logit_scale must be a number or a one-element tensor, got shape \(2,\)"),
        (dict(ids=torch.arange(3)), r"ids must have shape \(n,\) or \(n, m\) with n = 4, got \(3,\)"),
        (dict(ids=torch.ones(4)), "ids must be integers, got torch.float32"),
        (dict(ids=[0, 1, 2, 3]), "ids must be an integer tensor"),
        (dict(duplicates="drop"), "duplicates must be one of 'mask', 'positive', 'keep', got 'drop'"),
        (dict(direction="image"), "direction must be one of 'both', 'image_to_text', 'text_to_image', got 'image'"),
        (dict(label_smoothing=1.0), r"label_smoothing must be a number in \[0, 1\), got 1.0"),
        (dict(block_size=0), "block_size must be an integer >= 1 or None, got 0"),
        (dict(backend="cuda"), "backend must be one of 'auto', 'triton', 'torch', got 'cuda'"),
        (dict(precision="fp32"), "precision must be one of 'auto', 'tf32', 'tf32x3', 'ieee', got 'fp32'"),
        (dict(bank=torch.ones(4, 4)), "bank must be a MemoryBank or None, got Tensor"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, message):
    given = dict(image_embeds=EMBEDS, text_embeds=EMBEDS, logit_scale=10.0) | arguments
    with pytest.raises(ValueError, match=message):
        contrastive_loss(given.pop("image_embeds"), given.pop("text_embeds"), given.pop("logit_scale"), **given)


def test_a_bank_must_fit_the_batch():
    bank = MemoryBank(3, 5)
    contrastive_loss(EMBEDS, EMBEDS, 10.0, bank=bank)  # still empty: nothing to fit
    bank.push(torch.ones(2, 5), torch.ones(2, 5))
    with pytest.raises(ValueError, match="bank holds embeddings of dimension 5, the batch has 4"):
        contrastive_loss(EMBEDS, EMBEDS, 10.0, bank=bank)
    bank = MemoryBank(3, 4)
    bank.push(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"number of columns .*got 1 and None"):
        contrastive_loss(EMBEDS, EMBEDS, 10.0, bank=bank, ids=torch.arange(4))
