"""Progress in fewer figures than transformers': a line an evaluation, or one line for the whole run."""

from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback


class BriefEvaluations(ProgressCallback):
    """transformers' own bars, with a short line for each evaluation instead of all its figures.

    The figures themselves still go into `trainer.state.log_history` and to every tracker.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Writes what was logged above the bar."""
        line = evaluation_line(logs or {})
        if line is None:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif self.training_bar is not None and state.is_world_process_zero:
            self.training_bar.write(line)


def evaluation_line(logs: Mapping[str, float]) -> str | None:
    """The loss and the recalls at 1 of what an evaluation logged; None for any other line of the log.

    Example:
        >>> evaluation_line(trainer.state.log_history[-1])
        'evaluation at epoch 1: loss 2.310, recall@1 0.250 (image to text 0.300, text to image 0.200)'
    """
    if "eval_mean_recall@1" not in logs:
        return None
    both = ", ".join(
        f"{words} {logs[f'eval_{name}/recall@1']:.3f}"
        for name, words in (("image_to_text", "image to text"), ("text_to_image", "text to image"))
    )
    when = f" at epoch {logs['epoch']:g}" if "epoch" in logs else ""
    return f"evaluation{when}: loss {logs['eval_loss']:.3f}, recall@1 {logs['eval_mean_recall@1']:.3f} ({both})"


def use_brief_evaluations(trainer: Any) -> None:
    """Shortens a trainer's lines of evaluations, unless it shows no progress at all."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(BriefEvaluations())


class OneLineProgress(TrainerCallback):
    """A bar over the optimizer steps that shows the loss and, where there is an evaluation, the recall.

    The figures themselves still go into `trainer.state.log_history` and to every tracker.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the bar."""
        self._shown = {}
        self._bar = tqdm(total=state.max_steps, unit="step", disable=not state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves it on."""
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Puts the newest figures beside it."""
        if self._bar is None or logs is None:
            return
        for name, key, form in (("loss", "loss", ".2f"), ("recall@1", "eval_mean_recall@1", ".3f")):
            if key in logs:
                self._shown[name] = format(logs[key], form)
        self._bar.set_postfix(self._shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes it."""
        self._bar.close()
        self._bar = None


def use_one_line(trainer: Any) -> None:
    """Replaces a trainer's own progress output by one line."""
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(OneLineProgress())
