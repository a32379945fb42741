"""`sigmoid_loss` against the dense float64 oracle, on the PyTorch backend."""

import pytest
import torch

from hf_infcl import SigmoidLoss, sigmoid_loss
from tests import oracles


@pytest.mark.parametrize("kind", ["random", "trained", "identical", "opposite"])
@pytest.mark.parametrize(("n", "d"), [(1, 7), (2, 1), (63, 64), (300, 100)])
@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_float64(kind, n, d, columns, dtype):
    tolerance = 1e-4 if dtype == torch.float32 else 2**-7
    ids = torch.randint(0, n, (n, columns)) if columns else None
    x, y = (side.to(dtype).double() for side in oracles.pairs(kind, n, d))
    for scale, bias in [(1.0, 0.0), (10.0, -10.0), (112.3, -16.5)]:
        given = torch.tensor(scale, dtype=torch.float64), torch.tensor(bias, dtype=torch.float64)
        leaves = [t.clone().requires_grad_() for t in (x, y, *given)]
        expected = oracles.sigmoid(*leaves, ids)
        expected.backward()
        mine = [x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()]
        mine += [torch.tensor([value], requires_grad=True) for value in (scale, bias)]
        loss = sigmoid_loss(*mine, ids=ids, block_size=None if n < 100 else 64)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
        for leaf, reference in zip(mine[:2], leaves[:2], strict=True):
            assert oracles.gradient_error(leaf.grad, reference.grad, scale) < tolerance
        for leaf, reference in zip(mine[2:], leaves[2:], strict=True):
            assert leaf.grad.item() == pytest.approx(reference.grad.item(), rel=10 * tolerance, abs=tolerance)


def test_constant_embeddings_give_n_log_2():
    zeros = torch.zeros(4, 3, requires_grad=True)
    ones = torch.full((4, 4), 0.5)
    assert sigmoid_loss(ones, ones, 10.0, -10.0).item() == pytest.approx(2.772589, abs=1e-5)
    loss = sigmoid_loss(zeros, zeros.detach(), 10.0, 0.0)
    loss.backward()
    assert zeros.grad.isfinite().all()


def test_a_gradient_made_with_the_loss_is_scaled_by_what_comes_in():
    """Times a loss scaler's 2^16 before it is rounded to float16, in which 1e-8 is nothing."""
    n = 300
    x, y = oracles.pairs("trained", n, 16)
    x, y = x.half(), y.half()
    exact = [t.double().requires_grad_() for t in (x, y, torch.tensor(2.0), torch.tensor(-9.0))]
    oracles.sigmoid(*exact).mul(2.0**16).backward()
    mine = [x.requires_grad_(), y.requires_grad_(), *(torch.tensor([v], requires_grad=True) for v in (2.0, -9.0))]
    loss = sigmoid_loss(*mine, block_size=64) * 2.0**16
    first = torch.autograd.grad(loss, mine, retain_graph=True)
    for once, twice, reference in zip(first, torch.autograd.grad(loss, mine), exact, strict=True):
        assert torch.equal(once, twice)
        error = (once.double().reshape(reference.shape) - reference.grad).norm() / reference.grad.norm()
        assert error < 2**-7


@pytest.mark.parametrize(
    "wanted", [(True, False, False, False), (False, True, True, True), (False, False, False, True)]
)
def test_one_sweep_gives_the_loss_and_the_gradients(monkeypatch, wanted):
    from hf_infcl.ops import torch_tiles

    swept = []
    for name in ("sigmoid_loss", "sigmoid_weights"):
        function = getattr(torch_tiles, name)
        monkeypatch.setattr(torch_tiles, name, lambda *a, f=function, n=name: swept.append(n) or f(*a))
    x, y = oracles.pairs("trained", 20, 8)
    exact = [t.clone().requires_grad_() for t in (x, y, torch.tensor(9.0).double(), torch.tensor(-4.0).double())]
    expected = oracles.sigmoid(*exact)
    expected.backward()
    mine = [t.detach().clone().requires_grad_(want) for t, want in zip(exact, wanted, strict=True)]
    loss = sigmoid_loss(*mine, block_size=10)
    loss.backward()
    assert swept == ["sigmoid_weights"] * 4
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for leaf, reference, want in zip(mine, exact, wanted, strict=True):
        assert (leaf.grad is not None) == want
        if want:
            torch.testing.assert_close(leaf.grad, reference.grad)
    swept.clear()
    with torch.no_grad():
        assert sigmoid_loss(*mine, block_size=10).item() == pytest.approx(expected.item(), rel=1e-12)
    sigmoid_loss(*(t.detach() for t in mine), block_size=10)
    assert set(swept) == {"sigmoid_loss"}


def test_compiles_without_a_graph_break():
    x, y = (side.float().requires_grad_() for side in oracles.pairs("trained", 12, 8))
    scale, bias = torch.tensor([2.0], requires_grad=True), torch.tensor([-3.0], requires_grad=True)

    def step(x, y, scale, bias):
        return sigmoid_loss(x * 1.0, y, scale.exp(), bias) * 2

    eager = torch.autograd.grad(step(x, y, scale, bias), (x, y, scale, bias))
    compiled_step = torch.compile(step, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(compiled_step(x, y, scale, bias), (x, y, scale, bias))
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)


def test_module_equals_function_and_needs_a_bias():
    x, y = oracles.pairs("random", 10, 4)
    loss = SigmoidLoss(block_size=4)
    assert loss(x, y, 5.0, -1.0) == sigmoid_loss(x, y, 5.0, -1.0, **loss.get_config_dict())
    with pytest.raises(ValueError, match="logit_bias must be given"):
        loss(x, y, 5.0)
    with pytest.raises(ValueError, match="logit_bias must be finite in torch.float64, got inf"):
        sigmoid_loss(x, y, 5.0, float("inf"))
