"""Training with hard negatives: exact accumulation, warm-up, bank and log."""

import pytest
import torch

from hf_infcl.losses import ContrastiveLoss, HardNegativeLoss
from tests.trainer.helpers import Rows, parameters, trainer

LOGGED = {"row_skip_ratio", "hardest_similarity", "hardest_beats_positive"}


def close(a, b):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def run_of(folder, **options):
    torch.manual_seed(1)
    options = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 3, **options}
    run = trainer(folder, train_dataset=Rows(24), loss_type="hard_negative", num_hard_negatives=3, **options)
    run.train()
    return run, [line for line in run.state.log_history if "loss" in line]


@pytest.mark.parametrize("memory_bank_size", [0, 10])
def test_any_cut_of_the_batch_follows_one_trajectory(tmp_path, memory_bank_size):
    runs = [
        run_of(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            memory_bank_size=memory_bank_size,
            hard_negative_block_size=block_size,
        )
        for size, steps, block_size in ((8, 1, None), (2, 4, 2))
    ]
    (whole, log), (pieces, log_of_pieces) = runs
    close(parameters(whole.model), parameters(pieces.model))
    for a, b in zip(log, log_of_pieces, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["hardest_similarity"] == pytest.approx(b["hardest_similarity"], rel=1e-5)
        assert set(a) >= LOGGED
    # Filled after a step: the first has none to see.
    assert [line.get("bank_fill") for line in log] == (
        [None, pytest.approx(0.8), 1.0] if memory_bank_size else [None] * 3
    )
    if memory_bank_size:
        assert torch.equal(whole.memory_bank.ids, pieces.memory_bank.ids)


@pytest.mark.parametrize("start", [2, 0.5])
def test_plain_infonce_before_the_start(tmp_path, start):
    run, log = run_of(tmp_path, hard_negative_start=start, max_steps=4)
    assert isinstance(run.loss, HardNegativeLoss)
    assert [set(line) >= LOGGED for line in log] == [False, False, True, True]
    torch.manual_seed(1)
    plain = trainer(tmp_path, train_dataset=Rows(24), optim="sgd", learning_rate=0.1, max_steps=4)
    plain.train()
    assert isinstance(plain.loss, ContrastiveLoss)
    expected = [line["loss"] for line in plain.state.log_history if "loss" in line]
    assert [line["loss"] for line in log[:2]] == pytest.approx(expected[:2], rel=1e-6)


def test_margins_reach_the_loss(tmp_path):
    run, _ = run_of(tmp_path, relative_margin=0.05, max_score=0.9, max_steps=1)
    assert run.loss.get_config_dict()["relative_margin"] == 0.05
    assert run.loss.get_config_dict()["max_score"] == 0.9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_hard_negatives": 2}, None),
        (
            {"num_hard_negatives": 3},
            "num_hard_negatives=3, but a contrastive batch of 4 has 3 negatives for each pair: all are kept, and the "
            "loss equals loss_type='contrastive'",
        ),
        ({"num_hard_negatives": 12, "memory_bank_size": 10}, None),
        (
            {"memory_bank_size": 10, "max_score": 0.9},
            "num_hard_negatives=64, but a contrastive batch of 4 and a memory bank of 10 has 13 negatives for each "
            "pair: all are kept, and the loss equals the contrastive loss within the margins",
        ),
    ],
)
def test_hardest_negatives_that_are_all_there_are_is_said_once_at_the_start(tmp_path, caplog, options, said):
    """Nothing of the evaluation's pool, which is smaller, and nothing among the bars."""
    run = trainer(tmp_path, loss_type="hard_negative", eval_dataset=Rows(2), **options)
    run.evaluate()
    run.train()
    warned = [record.message for record in caplog.records if "negatives" in record.message and record.levelno > 20]
    assert warned == ([said] if said else [])


def test_as_many_hard_negatives_as_there_are_give_the_contrastive_loss(tmp_path):
    losses = []
    for options in ({"loss_type": "hard_negative", "num_hard_negatives": 64}, {"loss_type": "contrastive"}):
        torch.manual_seed(1)
        run = trainer(tmp_path, **options)
        run.train()
        losses.append([line["loss"] for line in run.state.log_history if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
