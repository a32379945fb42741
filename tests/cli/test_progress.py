"""What an evaluation during training shows, and what is kept of it."""

import pytest
from transformers import ProgressCallback

from hf_infcl.cli.progress import BriefEvaluations, evaluation_line, use_brief_evaluations
from tests.trainer.helpers import Rows, trainer


def test_an_evaluation_is_one_short_line_and_the_log_keeps_all(tmp_path, capsys):
    options = {"eval_strategy": "steps", "eval_steps": 2, "disable_tqdm": False}
    run = trainer(tmp_path, eval_dataset=Rows(6), **options)
    use_brief_evaluations(run)
    run.train()
    (kept,) = (line for line in run.state.log_history if "eval_loss" in line)
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if "evaluation at epoch" in line]
    assert len(lines) == 1
    assert evaluation_line(kept) in lines[0]
    assert "eval_text_to_image/mrr" in kept
    assert "eval_text_to_image/mrr" not in shown.out + shown.err
    assert "'grad_norm'" in shown.out + shown.err  # lines of training stay


def test_the_line_has_the_evaluations_own_figures():
    logs = {
        "eval_loss": 2.31,
        "eval_mean_recall@1": 0.25,
        "eval_image_to_text/recall@1": 0.3,
        "eval_text_to_image/recall@1": 0.2,
        "epoch": 1.5,
    }
    wanted = "evaluation at epoch 1.5: loss 2.310, recall@1 0.250 (image to text 0.300, text to image 0.200)"
    assert evaluation_line(logs) == wanted
    assert evaluation_line({"loss": 1.0}) is None


@pytest.mark.parametrize("silent", [True, False])
def test_a_run_without_bars_gets_none(tmp_path, silent):
    run = trainer(tmp_path, disable_tqdm=silent)
    use_brief_evaluations(run)
    bars = [type(one) for one in run.callback_handler.callbacks if isinstance(one, ProgressCallback)]
    assert bars == ([] if silent else [BriefEvaluations])
