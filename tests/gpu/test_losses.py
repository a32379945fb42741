"""The losses on a CUDA device, both backends, against the dense float64 oracles."""

import itertools

import pytest
import torch

from hf_infcl import contrastive_loss, hard_negative_loss, sigmoid_loss
from hf_infcl.ops import resolve_backend
from tests import oracles
from tests.comparisons import KINDS, SCALES, TOLERANCES, compare

SIZES = (1, 2, 3, 63, 127, 300, 513, 1000)
DEPTHS = (1, 7, 64, 100, 512, 768)
CUDA = torch.device("cuda")


def on_device(kind, n, d, dtype=torch.float32, seed=0):
    return [side.to(CUDA, dtype) for side in oracles.pairs(kind, n, d, seed)]


def test_auto_is_triton_here():
    assert resolve_backend("auto", CUDA, torch.bfloat16) == "triton"
    assert resolve_backend("auto", CUDA, torch.float64) == "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", DEPTHS)
def test_triton_matches_float64_on_ragged_shapes(d, dtype):
    for n, kind, (seed, scale) in itertools.product(SIZES, KINDS, enumerate(SCALES)):
        compare(*oracles.pairs(kind, n, d, seed), scale, dtype=dtype, device=CUDA, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torch_matches_float64(dtype):
    for (n, d), kind, scale in itertools.product([(1, 7), (300, 100), (1000, 512)], KINDS, SCALES):
        compare(*oracles.pairs(kind, n, d), scale, dtype=dtype, device=CUDA, backend="torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("duplicates", ["mask", "positive", "keep"])
@pytest.mark.parametrize("direction", ["both", "image_to_text", "text_to_image"])
def test_options_match_float64(direction, duplicates, dtype):
    """Over one chunk and over many, which take different launches."""
    n, d = 300, 64
    bank = (*(side.to(dtype).double() for side in oracles.pairs("random", 77, d, 9)), torch.randint(0, 40, (77, 2)))
    for e, columns, block, with_bank in itertools.product((0.0, 0.1), (1, 2), (None, 128), (False, True)):
        compare(
            *oracles.pairs("trained", n, d),
            14.3,
            dtype=dtype,
            device=CUDA,
            backend="triton",
            bank=(*bank[:2], bank[2][:, :columns]) if with_bank else None,
            ids=torch.randint(0, 40, (n, columns)),
            duplicates=duplicates,
            direction=direction,
            label_smoothing=e,
            block_size=block,
        )


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
def test_float32_precisions(precision):
    tolerance, value = (5e-3, 5e-3) if precision == "tf32" else (1e-4, 1e-5)
    for scale in SCALES:
        compare(
            *oracles.pairs("trained", 513, 100), scale, device=CUDA, backend="triton", precision=precision,
            tolerance=tolerance, value_tolerance=value,
        )  # fmt: skip


@pytest.mark.parametrize("block", [None, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sum_exp_survives_small_cosines_at_large_scales(dtype, block):
    x, y = (side.to(dtype).double() for side in oracles.pairs("random", 700, 2048))
    assert (x @ y.T).max() < 0.13
    for scale in (100.0, 10_000.0):
        expected = oracles.contrastive(x, y, torch.tensor(scale).double())
        loss = contrastive_loss(x.to(CUDA, dtype), y.to(CUDA, dtype), scale, backend="triton", block_size=block)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-3 * max(1.0, scale / 100))


def test_large_batches_take_every_path():
    """Several chunks, tiles whose rows lie far apart, and the shared exponential: against the PyTorch backend."""
    n, d = 20_000, 128
    for kind, scale in (("random", 100.0), ("trained", 50.0), ("opposite", 100.0)):
        x, y = on_device(kind, n, d, torch.bfloat16)
        x[: n // 2] *= 0.1  # rows of the same tiles with maxima far apart
        results = []
        for backend in ("triton", "torch"):
            a, b, s = x.clone().requires_grad_(), y.clone().requires_grad_(), torch.tensor(scale, device=CUDA)
            loss = contrastive_loss(a, b, s.requires_grad_(), backend=backend)
            loss.backward()
            results.append((loss.item(), a.grad.cpu(), b.grad.cpu(), s.grad.item()))
        (loss, da, db, ds), (loss_ref, da_ref, db_ref, ds_ref) = results
        assert loss == pytest.approx(loss_ref, rel=1e-5)
        assert ds == pytest.approx(ds_ref, rel=2**-7, abs=2**-7)
        assert oracles.gradient_error(da, da_ref, scale) < 2**-7
        assert oracles.gradient_error(db, db_ref, scale) < 2**-7


@pytest.mark.parametrize("direction", ["both", "image_to_text", "text_to_image"])
@pytest.mark.parametrize(("n", "d"), [(8192, 1024), (8203, 1040), (12_003, 520), (16_384, 640)])
def test_gradients_from_exponentials_that_were_kept(n, d, direction):
    """In one band and more, and where half of the rows lie so far from the others that their tiles are made again."""
    for kind, scale, shrunk in (("trained", 30.0, 1.0), ("random", 100.0, 0.1), ("opposite", 100.0, 0.1)):
        x, y = on_device(kind, n, d, torch.bfloat16)
        x[: n // 2] *= shrunk
        results = []
        for dtype in (torch.bfloat16, torch.float64):
            a, b = (side.detach().to(dtype).requires_grad_() for side in (x, y))
            s = torch.tensor(scale, device=CUDA, requires_grad=True)
            loss = contrastive_loss(a, b, s, direction=direction)
            loss.backward()
            results.append((loss.item(), a.grad, b.grad, s.grad.item()))
        (loss, da, db, ds), (loss_ref, da_ref, db_ref, ds_ref) = results
        assert loss == pytest.approx(loss_ref, rel=1e-5, abs=1e-5)
        assert ds == pytest.approx(ds_ref, rel=2**-7, abs=2**-7)
        assert oracles.gradient_error(da, da_ref, scale) < 2**-7
        assert oracles.gradient_error(db, db_ref, scale) < 2**-7


def test_no_layout_in_memory_gets_the_kernels_of_another():
    """One batch with other strides and alignments: compiled kernels are found again by what they depend on."""
    n, d = 160, 64
    x, y = on_device("trained", n, d, torch.bfloat16)
    ids = torch.randint(0, 40, (n, 2), device=CUDA)

    def laid_out(values, pad, start):
        height, width = values.shape
        room = torch.zeros(height * (width + pad) + start, device=CUDA, dtype=values.dtype)
        view = room[start:].view(height, width + pad)[:, :width]
        view.copy_(values)
        return view

    expected = None
    for pad, pad_texts, start, odd in itertools.product((0, 8, 1), (0, 8), (0, 1, 8), (0, 1)):
        a, b = laid_out(x, pad, start).requires_grad_(), laid_out(y, pad_texts, start).requires_grad_()
        scale = torch.full((2,), 14.3, device=CUDA)[odd:][:1].requires_grad_()
        loss = contrastive_loss(a, b, scale, ids=laid_out(ids, odd, odd), backend="triton")
        loss.backward()
        found = [loss.detach(), a.grad, b.grad, scale.grad]
        expected = found if expected is None else expected
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), (pad, start, odd)


def test_same_inputs_give_the_same_bits():
    for n in (700, 20_000):
        x, y = (side.requires_grad_() for side in on_device("random", n, 64, torch.bfloat16))
        runs = []
        for _ in range(2):
            loss = contrastive_loss(x, y, 50.0)
            runs.append((loss, *torch.autograd.grad(loss, (x, y))))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_nan_reaches_the_loss_and_nothing_outside_the_slice_does():
    x, y = on_device("random", 130, 40)
    bad = x.clone()
    bad[77, 3] = torch.nan
    assert contrastive_loss(bad, y, 10.0).isnan()
    assert sigmoid_loss(bad, y, 10.0, 0.0).isnan()
    padded = torch.full((260, 90), torch.nan, device=CUDA)
    padded[::2, 3:83:2] = x
    expected = contrastive_loss(x, y, 20.0)
    for view in (padded[::2, 3:83:2], x.T.contiguous().T):
        assert contrastive_loss(view, y, 20.0).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [0, 2])
def test_sigmoid_matches_float64(columns, dtype):
    for (n, d), kind in itertools.product([(1, 7), (2, 1), (300, 100), (1000, 512)], KINDS):
        ids = torch.randint(0, n, (n, columns)) if columns else None
        x, y = (side.to(dtype).double() for side in oracles.pairs(kind, n, d))
        for scale, bias in [(1.0, 0.0), (10.0, -10.0), (112.3, -16.5)]:
            leaves = [t.clone().requires_grad_() for t in (x, y, *torch.tensor([scale, bias]).double())]
            expected = oracles.sigmoid(*leaves, ids)
            expected.backward()
            mine = [x.to(CUDA, dtype).requires_grad_(), y.to(CUDA, dtype).requires_grad_()]
            mine += [torch.tensor([value], device=CUDA, requires_grad=True) for value in (scale, bias)]
            loss = sigmoid_loss(*mine, ids=None if ids is None else ids.to(CUDA), backend="triton")
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
            for leaf, reference in zip(mine[:2], leaves[:2], strict=True):
                assert oracles.gradient_error(leaf.grad.cpu(), reference.grad, scale) < TOLERANCES[dtype]
            for leaf, reference in zip(mine[2:], leaves[2:], strict=True):
                tolerance = TOLERANCES[dtype]
                assert leaf.grad.item() == pytest.approx(reference.grad.item(), rel=10 * tolerance, abs=tolerance)


def test_hard_negatives_that_are_all_candidates_equal_infonce():
    for k, n in ((299, 300), (63, 64)):
        results = []
        for call in (
            lambda x, y: contrastive_loss(x, y, 20.0),
            lambda x, y, k=k: hard_negative_loss(x, y, 20.0, k=k),
        ):
            x, y = (side.requires_grad_() for side in on_device("trained", n, 64))
            loss = call(x, y)
            results.append((loss, *torch.autograd.grad(loss, (x, y))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_compiles_without_a_graph_break():
    x, y = (side.requires_grad_() for side in on_device("trained", 300, 64, torch.bfloat16))

    def step(x, y):
        return contrastive_loss(x * 1.0, y, 20.0) * 2

    eager = torch.autograd.grad(step(x, y), (x, y))
    compiled = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(x, y), (x, y))
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)
