"""Hard negatives over 1 to 3 processes with uneven shards: the same selection, loss and gradients as one process."""

import itertools

import pytest
import torch

from hf_infcl import MemoryBank, hard_negative_loss, hardest_negatives
from tests import oracles
from tests.distributed.test_losses import SCALE, Batch, forced_paths
from tests.processes import run_processes

pytestmark = pytest.mark.distributed


class ExactBatch(Batch):
    """Embeddings of small integers: every score is exact, and ties abound."""

    def __init__(self, rank, world_size, dtype=torch.float32):
        super().__init__(rank, world_size, dtype)
        generator = torch.Generator().manual_seed(7)
        for side in (self.images, self.texts, *self.bank):
            side.copy_(torch.randint(-1, 2, side.shape, generator=generator))


CASES = [
    dict(k=k, direction=direction, with_bank=bank, block_size=block_size)
    for k, direction, bank, block_size in itertools.product(
        (1, 3, 50), ("both", "image_to_text", "text_to_image"), (False, True), (None, 2)
    )
]


def _loss(batch, ids, k, with_bank, ceiling=None, tolerance=2e-5, **options):
    exact, own = batch.leaves([0.5])
    known = batch.ids if ids else None
    bank = (*batch.bank, batch.bank_ids) if with_bank else None
    expected = oracles.hard_negative(*exact, k, ids=known, direction=options["direction"], bank=bank, ceiling=ceiling)
    loss, stats = hard_negative_loss(
        *own,
        k=k,
        ids=None if known is None else known[batch.rows],
        bank=batch.own_bank() if with_bank else None,
        return_stats=True,
        **options,
    )
    batch.check(expected, loss, exact, own, tolerance)
    return [loss.item(), *(value.item() for name, value in sorted(stats.items()) if name != "bank_fill")]


def _losses(rank, world_size):
    values = []
    for _, kind in itertools.product(forced_paths(), (ExactBatch, Batch)):
        batch = kind(rank, world_size)
        for case in CASES:
            values.append(_loss(batch, ids=True, **case))
        values.append(_loss(batch, False, 3, False, direction="both"))
        if kind is ExactBatch:
            limited = dict(ceiling=lambda pos: pos - 1, absolute_margin=1.0)
            values.append(_loss(batch, True, 3, True, direction="both", **limited))
        values.append(_loss(kind(rank, world_size, torch.float64), True, 3, True, direction="both", tolerance=1e-10))
    return values


def _mining(rank, world_size):
    for _, block_size in itertools.product(forced_paths(), (1, 2, 64)):
        batch = ExactBatch(rank, world_size)
        scores, indices, _ = hardest_negatives(
            batch.images[batch.rows].float(), batch.texts[batch.rows].float(), 4, ids=batch.ids[batch.rows],
            block_size=block_size,
        )  # fmt: skip
        dense = (batch.images @ batch.texts.T).masked_fill(oracles.related(batch.ids, batch.ids, (1, 1)), -torch.inf)
        expected = dense.sort(dim=1, descending=True, stable=True)
        assert torch.equal(scores, expected.values[batch.rows, :4].float())
        assert torch.equal(indices, expected.indices[batch.rows, :4].masked_fill(scores == -torch.inf, -1))


def _bank(rank, world_size):
    """What every rank holds after pushes of uneven and changing sizes, with the numbers of the pairs as ids."""
    bank = MemoryBank(9, 2)
    start, held = 0, []
    for step in range(6):
        sizes = [(step + 2 * other) % 4 for other in range(world_size)]
        first = start + sum(sizes[:rank])
        ids = torch.arange(first, first + sizes[rank])
        bank.push(ids[:, None].expand(-1, 2).float(), torch.zeros(len(ids), 2), ids)
        start += sum(sizes)
        held.append((bank.ids.flatten().tolist(), start, bank.filled))
        assert torch.equal(bank.image_embeds[:, 0], bank.ids[:, 0].float())
    return held


def _disagree(rank, world_size):
    batch = Batch(rank, world_size)
    _, own = batch.leaves([SCALE])
    with pytest.raises(ValueError, match="k: rank 0 has 1, rank 1 has 2"):
        hard_negative_loss(*own, k=rank + 1)


def _everything(rank, world_size):
    _mining(rank, world_size)
    if world_size > 1:
        _disagree(rank, world_size)
    return _losses(rank, world_size), _bank(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_result_does_not_depend_on_the_number_of_processes(world_size):
    losses, banks = zip(*run_processes(_everything, world_size), strict=True)
    assert all(values == losses[0] for values in losses)  # the same bits everywhere
    for parts in zip(*banks, strict=True):  # after every push
        pushed, filled = parts[0][1:]
        assert sorted(itertools.chain.from_iterable(part[0] for part in parts)) == list(
            range(max(pushed - 9, 0), pushed)
        )
        assert filled == min(pushed, 9)
