"""The losses as operators of torch: the same gradients under `torch.compile`, and what torch asks of an operator."""

import pytest
import torch

from hf_infcl import MemoryBank, contrastive_loss, hard_negative_loss
from hf_infcl.ring import DIRECTIONS, compiled
from tests import oracles

LOSSES = {
    "contrastive": lambda x, y, s, **options: contrastive_loss(x, y, s, **options),
    "hard negatives": lambda x, y, s, **options: hard_negative_loss(x, y, s, k=3, **options),
}


def leaves() -> list[torch.Tensor]:
    x, y = (side.float().requires_grad_() for side in oracles.pairs("trained", 12, 8))
    return [x, y, torch.tensor([3.0], requires_grad=True)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_each_direction_compiles_with_a_bank(loss, direction):
    bank = MemoryBank(6, 8)
    bank.push(*(side.float() for side in oracles.pairs("random", 6, 8, 3)), torch.arange(20, 26))

    def step(x, y, scale):
        return LOSSES[loss](x * 1.0, y, scale.exp(), ids=torch.arange(12), bank=bank, direction=direction)

    given = leaves()
    compiled_step = torch.compile(step, backend="aot_eager", fullgraph=True)
    for wanted in (given, given[:1], given[2:]):
        expected = torch.autograd.grad(step(*given), wanted)
        torch.testing.assert_close(torch.autograd.grad(compiled_step(*given), wanted), expected)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_torch_accepts_the_operators(direction):
    x, y, scale = leaves()
    ids, engine = torch.arange(12)[:, None] // 2, (None, "auto", "auto")
    sides = (x, y, scale, ids, None, None, None)
    torch.library.opcheck(compiled._softmax_operator, (*sides, "mask", 0.1, direction, *engine))
    limits = (3, None, 0.05, None)
    torch.library.opcheck(compiled._hard_negative_operator, (*sides, "mask", 0.0, direction, *engine, *limits))


def test_torch_accepts_sigmoids_operator():
    x, y, scale = leaves()
    bias = torch.tensor([-1.0], requires_grad=True)
    options = ("mask", 0.0, "both", None, "auto", "auto")
    torch.library.opcheck(compiled._sigmoid_operator, (x, y, scale, bias, None, *options))
