"""The line before the first step."""

import logging

import pytest
from transformers import ProgressCallback

from hf_infcl.trainer.description import describe_run
from tests.tiny import tiny_clip
from tests.trainer.helpers import Rows, Stream, lora, trainer


def test_a_run_is_described_in_numbers_that_are_its_own(tmp_path, caplog):
    run = trainer(tmp_path, n=1_600, eval_dataset=Rows(5), gradient_accumulation_steps=3, max_steps=1)
    total = sum(parameter.numel() for parameter in run.model.parameters())
    wanted = (
        f"1,600 training pairs, 5 evaluation pairs; {total:,} of {total:,} parameters trained, in both towers; "
        "contrastive batch 12 = 4 a micro-batch x 3 accumulated x 1 process; ContrastiveLoss by torch on cpu"
    )
    assert describe_run(run) == wanted
    with caplog.at_level(logging.INFO, logger="hf_infcl.trainer"):
        run.train()
    assert wanted in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peft_config": lora()}, "an adapter in both towers"),
        ({"peft_config": lora(), "freeze_text_model": True}, "an adapter in the vision tower only"),
        ({"freeze_vision_model": True}, "trained, in the text tower only"),
        ({"train_dataset": Stream(Rows(8))}, "a stream of training pairs, no evaluation pairs"),
        ({"eval_dataset": {"a": Rows(4), "b": Rows(6)}}, "4 + 6 evaluation pairs"),
        ({"eval_dataset": Rows(1)}, ", 1 evaluation pair; "),
    ],
)
def test_what_is_trained_and_on_what_is_said(tmp_path, options, said):
    assert said in describe_run(trainer(tmp_path, **options))


def test_only_the_temperature_is_in_neither_tower(tmp_path):
    model = tiny_clip().requires_grad_(False)
    model.logit_scale.requires_grad_(True)
    assert "; 1 of " in describe_run(trainer(tmp_path, model))
    assert "parameters trained, in neither tower" in describe_run(trainer(tmp_path, model))


def test_who_has_transformers_own_bars_sees_the_line_once(tmp_path, capsys):
    run = trainer(tmp_path, max_steps=1, disable_tqdm=False)
    run.train()
    assert capsys.readouterr().out.splitlines().count(describe_run(run)) == 1


def test_who_has_other_bars_or_none_sees_the_line_in_the_log_alone(tmp_path, capsys):
    class Own(ProgressCallback):
        pass

    other = trainer(tmp_path, max_steps=1, disable_tqdm=False)
    other.remove_callback(ProgressCallback)
    other.add_callback(Own())
    for run in (other, trainer(tmp_path, max_steps=1)):
        run.train()
        assert describe_run(run) not in capsys.readouterr().out
