"""What a run leaves behind: the adapter or the model, its processor, the state to go on from, a card and a plot."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_infcl.hub import check_folder, find_peft_model, other_weights, save_adapter, write_run
from hf_infcl.trainer.checkpoints import mark_unsaved
from hf_infcl.trainer.config import InfCLConfig


class SavingTrainer(Trainer):
    """The part of `InfCLTrainer` that writes and reads what outlives it."""

    args: InfCLConfig
    _card_is_current = False
    # From which this run can go on: the last one saved, or the one it resumed from.
    _last_checkpoint: str | None = None

    @property
    def _saves_adapter(self) -> bool:
        return find_peft_model(self.model) is not None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if not self._saves_adapter:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            save_adapter(self.model, folder, self.processing_class, state_dict=state_dict)
            torch.save(self.args, folder / "training_args.bin")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            mark_unsaved(folder)
            for file in other_weights(folder, self._saves_adapter):  # of an earlier run, whose checkpoint this replaces
                file.unlink()
        super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self._last_checkpoint = str(folder)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # What the main process writes after this says that the checkpoint is whole: it speaks for all processes.
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model or the adapter with its processor; outside of checkpoints, a card and a plot of the run.

        Raises:
            ValueError: the folder holds an adapter where a whole model is to be saved, or the other way round.
        """
        if not _internal_call:
            check_folder(output_dir or self.args.output_dir, self._saves_adapter)
        super().save_model(output_dir, _internal_call=True)
        if _internal_call:
            return
        if self.is_world_process_zero():
            write_run(self, output_dir, after=self._last_evaluation())
            self._card_is_current = True
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the card and the plot of this run, unless `save_model` has written them since training."""
        if self.is_world_process_zero() and not self._card_is_current:
            write_run(self, after=self._last_evaluation())
            self._card_is_current = True

    def _last_evaluation(self) -> dict[str, float]:
        lines = reversed(self.state.log_history)
        return next((line for line in lines if any(name.startswith("eval_") for name in line)), {})
