"""What a run does besides its arithmetic: logging, memory bank, repeated captions, batch sizes that do not fit."""

import math

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_infcl.losses import ContrastiveLoss
from tests.tiny import tiny_clip
from tests.trainer.helpers import Rows, lora, parameters, stack, trainer


def training_lines(run):
    return [line for line in run.state.log_history if "loss" in line]


def test_a_line_of_the_log_has_what_a_run_is_judged_by(tmp_path):
    run = trainer(tmp_path, gradient_accumulation_steps=2)
    run.train()
    line = training_lines(run)[0]
    for name in ("loss", "learning_rate", "grad_norm", "logit_scale", "samples_per_second", "peak_memory_gib"):
        assert math.isfinite(line[name]), name
    assert line["contrastive_batch_size"] == 8
    assert line["samples_per_second"] > 0


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"bf16": True, "peft_config": lora()}])
def test_evaluating_first_changes_nothing_of_training(tmp_path, options):
    runs = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        run = trainer(tmp_path / str(evaluates), eval_dataset=Rows(6), max_steps=3, **options)
        if evaluates:
            forward = run.model.forward
            run.evaluate()
            run.predict(Rows(6))
            assert run.model.forward == forward
            assert "_is_accelerate_prepared" not in vars(run.model)
        run.train()
        runs.append((training_lines(run)[-1]["loss"], parameters(run.model), run.evaluate()["eval_loss"]))
    (loss, weights, judged), (other_loss, other_weights, other_judged) = runs
    assert (loss, judged) == (other_loss, other_judged)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_the_logged_loss_is_the_mean_of_the_steps(tmp_path):
    each = trainer(tmp_path, max_steps=4, gradient_accumulation_steps=2)
    each.train()
    both = trainer(tmp_path, max_steps=4, gradient_accumulation_steps=2, logging_steps=2)
    both.train()
    losses = [line["loss"] for line in training_lines(each)]
    assert [line["loss"] for line in training_lines(both)] == pytest.approx(
        [sum(losses[:2]) / 2, sum(losses[2:]) / 2], rel=1e-6
    )


def test_reports_go_to_every_callback(tmp_path):
    lines = []

    class Report(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            lines.append(logs)

    trainer(tmp_path, callbacks=[Report()]).train()
    assert "logit_scale" in lines[0]
    assert "contrastive_batch_size" in lines[0]


def test_bars_show_how_far_training_and_evaluation_are(tmp_path, capfd):
    run = trainer(tmp_path, n=16, max_steps=2, eval_dataset=Rows(8), per_device_eval_batch_size=2, disable_tqdm=False)
    run.train()
    assert "2/2 [" in capfd.readouterr().err
    run.evaluate()
    assert "4/4 [" in capfd.readouterr().err


def test_the_loss_is_that_of_all_micro_batches_together(tmp_path):
    rows = Rows(8)
    model = tiny_clip()
    run = trainer(
        tmp_path,
        model,
        train_dataset=rows,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        train_sampling_strategy="sequential",
        max_steps=1,
    )
    batch = stack(rows.rows)
    batch.pop("ids")
    with torch.no_grad():
        output = run.model(**batch)
        wanted = ContrastiveLoss()(output.image_embeds, output.text_embeds, model.logit_scale.exp())
    run.train()
    assert training_lines(run)[0]["loss"] == pytest.approx(wanted.item(), rel=1e-5)


class Fixed(nn.Module):
    """Stands for a forward that gives the same features for equal captions, as trained towers would."""

    def __init__(self, captions):
        super().__init__()
        self.features = nn.functional.one_hot(torch.tensor(captions), 16).float()

    def forward(self, output):
        for side in ("image_embeds", "text_embeds"):
            if output[side] is not None:
                output[side] = self.features + 0 * output[side].sum()
        return output


@pytest.mark.parametrize(("duplicates", "wanted"), [("keep", math.log(2)), ("mask", 0.0)])
def test_captions_twice_in_a_batch(tmp_path, duplicates, wanted, caplog):
    """Captions A, A, B, B with features of their own at scale 100: ln 2 with copies for negatives, else 0."""
    model = tiny_clip()
    model.logit_scale.data.fill_(math.log(100.0))
    fixed = Fixed([0, 0, 1, 1])
    model.register_forward_hook(lambda module, args, output: fixed(output))
    rows = Rows(4, ids=[(0, 0), (1, 0), (2, 1), (3, 1)])
    options = {"duplicates": duplicates, "train_sampling_strategy": "sequential", "learning_rate": 0.0, "max_steps": 3}
    run = trainer(tmp_path, model, train_dataset=rows, **options)
    run.train()
    assert training_lines(run)[0]["loss"] == pytest.approx(wanted, abs=1e-6)
    assert caplog.text.count("repeated in a batch: 0%, 50%") == (1 if duplicates == "keep" else 0)


# ---- Memory bank ----


def test_the_bank_holds_the_last_pairs_in_the_samplers_order(tmp_path):
    run = trainer(
        tmp_path,
        n=12,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        memory_bank_size=6,
        max_steps=2,
    )
    run.train()
    assert len(run.memory_bank) == 6
    assert set(run.memory_bank.ids[:, 0].tolist()) == set(range(2, 8))
    assert not run.memory_bank.image_embeds.requires_grad


def test_the_bank_adds_negatives_to_training_and_none_to_evaluation(tmp_path):
    runs = {}
    for size in (0, 8):
        torch.manual_seed(0)
        runs[size] = trainer(tmp_path, eval_dataset=Rows(4), memory_bank_size=size, learning_rate=0.0)
        runs[size].train()
    losses = {size: [line["loss"] for line in training_lines(run)] for size, run in runs.items()}
    assert losses[8][0] == losses[0][0]
    assert losses[8][1] > losses[0][1]
    assert runs[8].evaluate()["eval_loss"] == runs[0].evaluate()["eval_loss"]


# ---- Batch sizes that do not fit ----


def test_halving_the_micro_batch_leaves_the_contrastive_batch(tmp_path):
    def refuse(module, args, kwargs):
        if len(kwargs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

    small = tiny_clip()
    small.register_forward_pre_hook(refuse, with_kwargs=True)
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, "optim": "sgd"}
    found = trainer(tmp_path, small, per_device_train_batch_size=8, auto_find_batch_size=True, **options)
    found.train()
    whole = trainer(tmp_path, per_device_train_batch_size=8, **options)
    whole.train()
    assert (found.args.per_device_train_batch_size, found.args.gradient_accumulation_steps) == (2, 8)
    assert found.args.contrastive_batch_size == 16
    assert {line["contrastive_batch_size"] for line in training_lines(found)} == {16}
    wanted = parameters(whole.model)
    for name, value in parameters(found.model).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)


def test_a_micro_batch_of_one_that_does_not_fit_ends_the_run(tmp_path):
    model = tiny_clip()

    def refuse(module, args):
        if module.training:  # the checks at the start run in eval mode
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

    model.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="micro-batch of 1 does not fit"):
        trainer(tmp_path, model, auto_find_batch_size=True).train()


def test_activation_checkpointing_changes_nothing(tmp_path):
    runs = []
    for on in (False, True):
        torch.manual_seed(1)
        run = trainer(
            tmp_path,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=on,
            peft_config=lora(lora_dropout=0.5),
        )
        run.train()
        runs.append(parameters(run.model))
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, rtol=1e-6, atol=1e-6)


def test_mixed_precision_gives_finite_losses_and_float32_gradients(tmp_path):
    run = trainer(tmp_path, bf16=True, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    run.train()
    assert all(math.isfinite(line["loss"]) for line in training_lines(run))
    assert {value.dtype for value in run.model.parameters()} == {torch.float32}
