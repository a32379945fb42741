"""Batches in which the same leave each other no negatives, and what is said of them."""

import pytest
import torch

from hf_infcl.trainer.repeats import lacks_negatives, repeated_shares
from tests.processes import run_processes
from tests.tiny import tiny_siglip
from tests.trainer.helpers import Rows, trainer

SAID = "has no negative: all others share its image or its caption"


def by_definition(ids):
    same = (ids[:, None] == ids[None, :]).any(2)
    return bool(same.all(1).any())


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_row_without_negatives_is_found_as_the_whole_matrix_finds_it(n, columns):
    generator = torch.Generator().manual_seed(n)
    found = set()
    for _ in range(200):
        ids = torch.randint(0, 3, (n, columns), generator=generator)
        assert lacks_negatives(ids) == by_definition(ids)
        found.add(by_definition(ids))
    assert found == {True, False}


def test_a_lone_row_is_not_looked_at():
    assert not lacks_negatives(torch.tensor([[1, 2]]))


def test_repeated_shares_are_by_column():
    assert repeated_shares(torch.tensor([[0, 0], [1, 0], [2, 1], [3, 1]])) == [0.0, 0.5]


def one_caption(n):
    return Rows(n, ids=[(number, 7) for number in range(n)])


def test_one_caption_for_a_whole_batch_has_a_loss_of_zero_and_is_said_once(tmp_path, caplog):
    run = trainer(tmp_path, train_dataset=one_caption(8), max_steps=3)
    run.train()
    assert [line["loss"] for line in run.state.log_history if "loss" in line] == [0.0] * 3
    assert caplog.text.count(SAID) == 1
    assert "duplicates='positive' pairs them instead" in caplog.text


@pytest.mark.parametrize("duplicates", ["positive", "keep"])
def test_where_the_same_are_not_left_out_nothing_is_said_of_negatives(tmp_path, caplog, duplicates):
    trainer(tmp_path, train_dataset=one_caption(8), duplicates=duplicates).train()
    assert SAID not in caplog.text


def test_rows_that_differ_and_banks_are_no_reason_to_warn(tmp_path, caplog):
    trainer(tmp_path).train()
    trainer(tmp_path, train_dataset=one_caption(8), memory_bank_size=8).train()
    assert SAID not in caplog.text


def test_the_sigmoid_loss_is_not_told_to_pair_them(tmp_path, caplog):
    run = trainer(tmp_path, tiny_siglip(), train_dataset=Rows(8, "siglip", ids=[(n, 7) for n in range(8)]))
    run.train()
    assert caplog.text.count(SAID) == 1
    assert "duplicates='positive'" not in caplog.text


def warnings_of(rank, world_size, folder, captions):
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hf_infcl.trainer.steps").addHandler(handler)
    rows = Rows(len(captions), ids=list(enumerate(captions)))
    options = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "max_steps": 1}
    trainer(folder, train_dataset=rows, **options).train()
    return sum(SAID in text for text in said)


@pytest.mark.distributed
@pytest.mark.parametrize(("captions", "wanted"), [([7, 7, 7, 7], [1, 0]), ([7, 7, 8, 8], [0, 0])])
def test_the_batch_of_all_processes_counts(tmp_path, captions, wanted):
    """Each process by itself has one caption in either case."""
    assert run_processes(warnings_of, 2, args=(str(tmp_path), captions)) == wanted
