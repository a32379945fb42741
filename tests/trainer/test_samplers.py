"""Contrastive batches of an epoch: whole, countable beforehand, and the same for the same seed and epoch."""

import pytest
import torch

from hf_infcl.trainer.samplers import ContrastiveBatchSampler, EpochSampler, NoDuplicatesBatchSampler
from tests.trainer.helpers import Rows, trainer


def test_an_epochs_order_depends_on_seed_and_epoch_alone():
    sampler = EpochSampler(20, seed=3)
    torch.manual_seed(0)
    first = list(sampler)
    state = torch.get_rng_state()
    assert list(sampler) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(first) == list(range(20))
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(EpochSampler(20, seed=4)) != first


@pytest.mark.parametrize(
    ("n", "size", "steps", "sizes"),
    [
        (12, 2, 3, [6, 6]),
        (11, 2, 3, [6, 5]),  # the last group has three micro-batches, one of them short
        (10, 2, 3, [6]),  # two micro-batches are no group
        (5, 4, 1, [4]),  # one row is no contrastive batch
        (6, 4, 1, [4, 2]),
    ],
)
def test_only_whole_groups_are_made_and_counted(n, size, steps, sizes):
    sampler = ContrastiveBatchSampler(EpochSampler(n, 0), size, steps, least_rows=2)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert len(batches) % steps == 0
    groups = [batches[i : i + steps] for i in range(0, len(batches), steps)]
    assert [sum(map(len, group)) for group in groups] == sizes
    assert sampler.left_out == n - sum(sizes)
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows)


def test_drop_last_leaves_out_short_micro_batches():
    assert len(ContrastiveBatchSampler(EpochSampler(11, 0), 2, 3, drop_last=True)) == 3


def test_no_duplicates_keeps_copies_out_of_a_batch_and_in_the_epoch():
    """Twelve rows of six captions: batches of six hold each caption once, and both copies are seen."""
    ids = torch.stack([torch.arange(12), torch.arange(12) % 6], 1)
    sampler = NoDuplicatesBatchSampler(lambda: ids, EpochSampler(12, 0), 2, 3)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 6
    for group in (batches[:3], batches[3:]):
        rows = [row for batch in group for row in batch]
        assert len({int(ids[row, 1]) for row in rows}) == 6
    assert sorted(row for batch in batches for row in batch) == list(range(12))


@pytest.mark.parametrize("epoch", range(5))
def test_every_epoch_without_duplicates_is_as_long_as_the_first(epoch):
    torch.manual_seed(epoch)
    ids = torch.randint(0, 8, (40, 1))
    sampler = NoDuplicatesBatchSampler(lambda: ids, EpochSampler(40, 0), 2, 2)
    length = len(sampler)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == length
    for start in range(0, length, 2):
        rows = batches[start] + batches[start + 1]
        assert len({int(ids[row]) for row in rows}) == 4


def test_equal_numbers_in_different_columns_are_no_duplicates():
    ids = torch.tensor([[0, 1], [1, 0]])
    assert len(NoDuplicatesBatchSampler(lambda: ids, EpochSampler(2, 0), 2, 1)) == 1


def test_a_batch_that_cannot_be_made_is_refused():
    ids = torch.zeros(8, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"no contrastive batch of 2 rows .* largest has 1 of 8"):
        NoDuplicatesBatchSampler(lambda: ids, EpochSampler(8, 0), 2, 1)


def test_the_trainer_draws_batches_without_duplicates(tmp_path):
    ids = [(i, i % 4) for i in range(16)]
    run = trainer(
        tmp_path,
        train_dataset=Rows(16, ids=ids),
        batch_sampler="no_duplicates",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    run.train()
    loader = run.get_train_dataloader()
    batches = [batch["ids"][:, 1] for batch in loader]
    for start in range(0, len(batches), 2):
        assert len(torch.cat(batches[start : start + 2]).unique()) == 4
