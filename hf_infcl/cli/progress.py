"""One line of progress in place of transformers' lines of figures."""

from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback


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
