"""Options that have no effect beside the others."""

import pytest

from hf_infcl import ContrastiveLoss, InfCLTrainer
from hf_infcl.data import sample_dataset
from tests.tiny import tiny_clip, tiny_processor
from tests.trainer.helpers import Rows, Stream, config, stack, trainer


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_hard_negatives": 3}, "num_hard_negatives has no effect without loss_type='hard_negative'"),
        (
            {"num_hard_negatives": 3, "hard_negative_block_size": 4},
            "num_hard_negatives, hard_negative_block_size have no effect without loss_type='hard_negative'",
        ),
        (
            {"loss": ContrastiveLoss(), "loss_type": "contrastive", "loss_backend": "torch"},
            "loss_type, loss_backend have no effect with loss=",
        ),
        (
            {
                "loss_type": "hard_negative",
                "num_hard_negatives": 1,
                "loss_block_size": 4,
                "hard_negative_block_size": 4,
            },
            "loss_block_size has no effect beside hard_negative_block_size",
        ),
        ({"model_init_kwargs": {"dtype": "float32"}}, "model_init_kwargs has no effect with a model that is loaded"),
        (
            {"caption_column": "text", "on_bad_image": "skip"},
            "caption_column, on_bad_image have no effect without a table",
        ),
        (
            {"train_dataset": Stream(Rows(16)), "batch_sampler": "no_duplicates"},
            "batch_sampler has no effect with a stream",
        ),
        ({"eval_steps": 5}, "eval_steps has no effect without eval_strategy='steps'"),
        ({"eval_delay": 1}, "eval_delay has no effect without eval_strategy"),
        ({"save_steps": 5}, "save_steps has no effect without save_strategy='steps'"),
        ({"save_total_limit": 2}, "save_total_limit has no effect with save_strategy='no'"),
        ({"metric_for_best_model": "loss"}, "metric_for_best_model has no effect without evaluations"),
        ({"hub_model_id": "some/name"}, "hub_model_id has no effect without push_to_hub"),
    ],
)
def test_an_option_without_effect_is_said_in_one_line(tmp_path, caplog, options, said):
    trainer(tmp_path, **options)
    (line,) = [record.message for record in caplog.records if "no effect" in record.message]
    assert line.startswith(said)


def test_options_with_effect_are_said_nothing_of(tmp_path, caplog):
    table = sample_dataset("drawing", size=8).rename_column("caption", "text")
    InfCLTrainer(
        tiny_clip(),
        config(
            tmp_path,
            loss_type="hard_negative",
            num_hard_negatives=1,
            hard_negative_block_size=4,
            hard_negative_start=1,
            loss_block_size=4,
            caption_column="text",
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=2,
            metric_for_best_model="loss",
            save_total_limit=1,
            batch_sampler="no_duplicates",
        ),
        train_dataset=table,
        eval_dataset=table,
        processing_class=tiny_processor("clip"),
    )
    trainer(tmp_path, eval_dataset=Rows(4))
    InfCLTrainer(tiny_clip(), config(tmp_path, caption_column="text"), processing_class=tiny_processor("clip"))
    InfCLTrainer(tiny_clip(), config(tmp_path), data_collator=stack)
    assert "no effect" not in caplog.text
