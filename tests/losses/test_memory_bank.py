"""The memory bank is a first-in, first-out queue of detached pairs."""

import pytest
import torch

from hf_infcl import MemoryBank


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("batches", [[2], [2, 2, 2], [3, 5, 1, 9, 2]])
def test_holds_the_last_pairs_pushed(size, batches):
    bank = MemoryBank(size, 2)
    pushed = torch.empty(0, 2)
    for n in batches:
        new = torch.randn(n, 2, requires_grad=True)
        bank.push(new, -new, ids=torch.arange(len(pushed), len(pushed) + n))
        pushed = torch.cat([pushed, new.detach()])
    expected = pushed[-size:]
    assert len(bank) == len(expected)
    assert bank.filled == len(expected)
    assert torch.equal(bank.image_embeds, expected)  # oldest first
    assert torch.equal(bank.text_embeds, -expected)
    assert bank.ids[-1] == len(pushed) - 1
    assert not bank.image_embeds.requires_grad


def test_state_round_trips():
    bank = MemoryBank(4, 2, dtype=torch.float16)
    bank.push(torch.randn(6, 2), torch.randn(6, 2), ids=torch.arange(12).reshape(6, 2))
    twin = MemoryBank(4, 2, dtype=torch.float16)
    twin.load_state_dict(bank.state_dict())
    for b in (bank, twin):
        b.push(torch.ones(1, 2), torch.ones(1, 2), ids=torch.tensor([[7, 7]]))
    assert torch.equal(bank.image_embeds, twin.image_embeds)
    assert torch.equal(bank.ids, twin.ids)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="size must be an integer >= 1, got 0"):
        MemoryBank(0, 2)
    bank = MemoryBank(4, 2)
    with pytest.raises(ValueError, match=r"text_embeds must have shape \(3, 2\), got \(3, 5\)"):
        bank.push(torch.ones(3, 2), torch.ones(3, 5))
    bank.push(torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="ids must come with every push or with none"):
        bank.push(torch.ones(3, 2), torch.ones(3, 2), ids=torch.arange(3))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0.2, 0.4, 0.9]), "ids must be integers, got torch.float32"),
        (torch.tensor([True, False, True]), "ids must be integers, got torch.bool"),
        ([0, 1, 2], "ids must be an integer tensor"),
        (torch.zeros(3, 2, dtype=torch.long), "ids must have 1 columns as those in the bank, got 2"),
    ],
)
def test_a_push_that_does_not_fit_leaves_the_bank_as_it_was(ids, message):
    bank = MemoryBank(5, 4)
    bank.push(torch.ones(3, 4), torch.ones(3, 4), torch.arange(3))
    with pytest.raises(ValueError, match=message):
        bank.push(torch.zeros(3, 4), torch.zeros(3, 4), ids)
    assert len(bank) == len(bank.text_embeds) == len(bank.ids) == bank.filled == 3
    with pytest.raises(ValueError, match=r"image_embeds must be float32.*got torch.int64"):
        bank.push(torch.zeros(3, 4).long(), torch.zeros(3, 4), torch.arange(3))
