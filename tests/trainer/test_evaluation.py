"""Evaluation looks at the whole set at once: its batch size changes nothing, and it changes nothing in training."""

import numpy as np
import pytest
import torch

from hf_infcl import retrieval_metrics
from hf_infcl.losses import ContrastiveLoss
from tests.oracles import contrastive
from tests.tiny import tiny_clip
from tests.trainer.helpers import Rows, dropout_clip, lora, parameters, trainer


def figures(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "second" not in name and "runtime" not in name}


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_loss_and_recalls_do_not_depend_on_the_evaluation_batch_size(tmp_path, size):
    rows = Rows(7)
    run = trainer(tmp_path, eval_dataset=rows, per_device_eval_batch_size=size, dataloader_drop_last=True)
    metrics = figures(run.evaluate())
    output = run.predict(rows)
    image, text = (torch.from_numpy(side).double() for side in output.predictions)
    assert image.shape == text.shape == (7, 16)
    assert np.array_equal(output.label_ids, [(i, i) for i in range(7)])
    oracle = contrastive(image, text, run.model.logit_scale.double().exp())
    assert metrics["eval_loss"] == pytest.approx(oracle.item(), rel=1e-5)
    for name, value in retrieval_metrics(image.float(), text.float()).items():
        assert metrics[f"eval_{name}"] == value


def test_repeated_images_and_captions_are_hits_of_each_other(tmp_path):
    """Five captions of one image are one image in the pool, and none of them stands in another's way."""
    ids = [(0, i) for i in range(5)] + [(1, i) for i in range(5, 10)]
    rows = Rows(10, ids=ids)
    for i, row in enumerate(rows.rows):
        row["pixel_values"] = rows.rows[i // 5 * 5]["pixel_values"]
    metrics = trainer(tmp_path, eval_dataset=rows).evaluate()
    assert metrics["eval_text_to_image/recall@5"] == 1.0  # there are two images
    assert np.isfinite(metrics["eval_loss"])


def test_a_dictionary_of_sets_is_evaluated_set_by_set(tmp_path):
    run = trainer(tmp_path, eval_dataset={"easy": Rows(4), "hard": Rows(6, seed=1)})
    metrics = run.evaluate()
    for name in ("easy", "hard"):
        assert f"eval_{name}_loss" in metrics
        assert f"eval_{name}_mean_recall@1" in metrics


def test_compute_metrics_gets_both_sides_and_the_ids(tmp_path):
    seen = []

    def compute(prediction):
        seen.append(prediction)
        return {"rows": len(prediction.label_ids)}

    run = trainer(tmp_path, eval_dataset=Rows(5), compute_metrics=compute, per_device_eval_batch_size=2)
    metrics = run.evaluate()
    image, text = seen[0].predictions
    assert image.shape == text.shape == (5, 16)
    assert metrics["eval_rows"] == 5
    assert "eval_mean_recall@1" in metrics


def test_evaluating_leaves_training_as_it_was(tmp_path):
    """Dropout, loaders and schedules go the same way whether there is an evaluation after every step or none."""
    runs = []
    for strategy in ("no", "steps"):
        torch.manual_seed(2)
        run = trainer(
            tmp_path,
            dropout_clip(),
            eval_dataset=Rows(4),
            eval_strategy=strategy,
            eval_steps=1,
            max_steps=3,
            peft_config=lora(lora_dropout=0.5),
        )
        run.train()
        runs.append(parameters(run.model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_an_own_loss_is_used_for_training_and_evaluation(tmp_path):
    class Twice(ContrastiveLoss):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    plain = trainer(tmp_path, eval_dataset=Rows(4))
    twice = trainer(tmp_path, eval_dataset=Rows(4), loss=Twice())
    assert twice.evaluate()["eval_loss"] == pytest.approx(2 * plain.evaluate()["eval_loss"])
    plain.train()
    twice.train()
    first = [run.state.log_history[1]["loss"] for run in (plain, twice)]
    assert first[1] == pytest.approx(2 * first[0], rel=1e-5)


def test_bfloat16_metrics_agree_with_float32(tmp_path):
    rows = Rows(12)
    exact = trainer(tmp_path, eval_dataset=rows).evaluate()
    half = trainer(tmp_path, tiny_clip().to(torch.bfloat16), eval_dataset=rows).evaluate()
    assert half["eval_loss"] == pytest.approx(exact["eval_loss"], rel=1e-2)
    mixed = trainer(tmp_path, eval_dataset=rows, bf16=True).evaluate()
    assert mixed["eval_loss"] == pytest.approx(exact["eval_loss"], rel=1e-2)


def test_an_empty_set_is_refused(tmp_path):
    rows = Rows(1)
    rows.rows.clear()
    with pytest.raises(ValueError, match="no rows"):
        trainer(tmp_path, eval_dataset=rows).evaluate()
