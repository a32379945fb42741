"""Optimizer steps, each of them over one whole contrastive batch."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from hf_infcl.losses import MemoryBank
from hf_infcl.models import (
    Family,
    logit_bias_parameter,
    logit_scale,
    logit_scale_parameter,
    set_batch_statistics_eval,
    unwrap,
)
from hf_infcl.ring import World
from hf_infcl.trainer import objective
from hf_infcl.trainer.accumulation import ContrastiveStep
from hf_infcl.trainer.callbacks import StepClock
from hf_infcl.trainer.checkpoints import load_bank, save_bank, save_options
from hf_infcl.trainer.evaluation import EvaluatingTrainer, as_function, embedder
from hf_infcl.trainer.preparation import set_locked_towers_eval
from hf_infcl.trainer.repeats import lacks_negatives, repeated_shares

logger = logging.getLogger(__name__)

_LOSS_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class SteppingTrainer(EvaluatingTrainer):
    """The part of `InfCLTrainer` that takes steps: their micro-batches, the loss, the memory bank and what is logged.

    Attributes:
        loss_type: what is minimised, or None for a loss of the user's own.
        loss: the module that computes it.
        memory_bank: embeddings of earlier batches, or None where there is no bank, or nothing in it yet.
    """

    def _choose_loss(self, loss: nn.Module | None, family: Family) -> None:
        """Makes the loss, and all that steps keep from one to the next.

        Args:
            loss: the user's own, instead of the one that `loss_type` names.
            family: of the model.

        Raises:
            ValueError: options that do not go with the loss.
        """
        args = self.args
        self.loss_type = None if loss is not None else objective.resolve_loss_type(args, family)
        if loss is not None and (args.memory_bank_size or getattr(loss, "bank", None) is not None):
            raise ValueError(
                "a memory bank is filled and saved by the trainer: set memory_bank_size and loss_type instead of "
                "passing loss="
            )
        if self.loss_type is not None:
            objective.check_loss_options(args, self.loss_type)
        self.memory_bank: MemoryBank | None = None
        self.loss = self._make_loss(loss)
        warms_up = self.loss_type == "hard_negative" and args.hard_negative_start > 0
        self._early_loss = objective.build_loss(args, "contrastive") if warms_up else None
        # Without the bank: an evaluation set is contrasted with itself only.
        self._eval_loss = self._make_loss(loss)
        self._began = time.time()
        self._step: ContrastiveStep | None = None
        self._pending: list[dict[str, Any]] = []
        self._position = 0
        # What the loss says of each step since the last line of the log, such as how much of the search was skipped.
        self._loss_stats: dict[str, list[Tensor]] = defaultdict(list)
        self._said_dropped = self._said_repeats = False
        # A softmax over one candidate has nothing to learn from.
        is_softmax = self.loss_type in objective.SOFTMAX_LOSS_TYPES
        self._least_rows = 2 if is_softmax and not args.memory_bank_size else 1
        self._clock = StepClock()

    def _make_loss(self, loss: nn.Module | None) -> nn.Module:
        if loss is not None:
            return loss
        assert self.loss_type is not None
        return objective.build_loss(self.args, self.loss_type)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], None]:
        """Collects the micro-batches of one optimizer step; a group cut short by the end of the data is dropped."""
        self._clock.data_wanted()
        batches = []
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        rows = sum(len(batch["input_ids"]) for batch in batches)
        if batches and (len(batches) < num_batches or rows < self._least_rows):
            if not self._said_dropped:
                logger.warning(
                    "the data ends %d micro-batches (%d rows) into a group of gradient_accumulation_steps=%d: such a "
                    "group is dropped, for it would contrast fewer pairs than all others",
                    len(batches),
                    rows,
                    self.args.gradient_accumulation_steps,
                )
                self._said_dropped = True
            batches = []
        self._clock.data_ready()
        self._step = None
        self._pending, self._position = batches, 0
        return batches, None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One micro-batch's forward and backward pass, with the gradient of the whole contrastive batch's loss."""
        model.train()
        set_locked_towers_eval(model, self._sides)
        set_batch_statistics_eval(model)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if self._step is None:
            self._step = self._begin_step(model, self._pending)
        step, index = self._step, self._position
        with self.compute_loss_context_manager():
            surrogate = step.surrogate(index)
        if surrogate is not None:
            self.accelerator.backward(surrogate, **self._backward_options())
        self._position += 1
        if self._position == len(step):
            # The one wait for the device of a step, once all of its work has been handed over.
            step.raise_if_not_finite()
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()
        assert step.loss is not None
        # Trainer adds up what the micro-batches of a step return.
        return (step.loss / len(step)).to(torch.float32)

    @property
    def trained_sides(self) -> tuple[bool, bool]:
        """Whether anything is trained on the image side, and on the text side."""
        return self._sides.trained

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype in which the loss takes the embeddings."""
        return self._mixed_dtype() or self.model.dtype

    def _mixed_dtype(self) -> torch.dtype | None:
        return _LOSS_DTYPES.get(self.accelerator.mixed_precision)

    def _backward_options(self) -> dict[str, Any]:
        # The loss is one of the whole step already.
        return {"scale_wrt_gas": False} if self.accelerator.distributed_type == DistributedType.DEEPSPEED else {}

    def _begin_step(self, model: nn.Module, micro_batches: list[dict[str, Any]]) -> ContrastiveStep:
        base, loss = unwrap(model), self._loss_of_step()
        step = ContrastiveStep(
            micro_batches,
            sides=self._sides,
            embed=embedder(model),
            loss=as_function(loss),
            scale=lambda: None if logit_scale_parameter(base) is None else logit_scale(base),
            bias=lambda: logit_bias_parameter(base),
            to_device=self._to_device,
            device=self.args.device,
            loss_dtype=self._mixed_dtype(),
        )
        with self.compute_loss_context_manager():
            step.begin()
        for name, value in getattr(loss, "last_stats", {}).items():
            self._loss_stats[name].append(value)
        if not self._said_repeats:
            self._said_repeats = self._report_repeats(step.host_ids)
        self._clock.count(step.rows)
        return step

    def _report_repeats(self, ids: Tensor | None) -> bool:
        """Says once where copies are taken for negatives, or leave none. Returns whether nothing more is to be said."""
        if ids is None or self.loss_type is None or self.args.duplicates == "positive":
            return True
        if self.args.duplicates == "keep":
            shares = repeated_shares(ids)
            if max(shares) > 0:
                logger.warning(
                    "repeated in a batch: %s (a share for each column of ids, such as image and caption). "
                    "duplicates='keep' takes them for negatives, which keeps the loss above a floor; 'mask' leaves "
                    "them out, 'positive' pairs them",
                    ", ".join(f"{share:.0%}" for share in shares),
                )
            return max(shares) > 0
        if self.args.memory_bank_size:
            return True
        world = World.of(None)
        # The other processes' ids lie on their hosts: they are asked for once, with the first batch.
        lacks = lacks_negatives(ids if world.is_alone else torch.cat(world.gather_objects(ids)))
        if lacks and world.rank == 0:
            advice = "duplicates='positive' pairs them instead. " if self.loss_type == "contrastive" else ""
            logger.warning(
                "a pair of this contrastive batch has no negative: all others share its image or its caption, which "
                "duplicates='mask' leaves out. Where every pair is like that, nothing is learnt. %sA larger batch and "
                "captions that differ bring negatives back",
                advice,
            )
        return lacks or not world.is_alone

    def _loss_of_step(self) -> nn.Module:
        start = self.args.hard_negative_start
        start = math.ceil(start * self.state.max_steps) if start < 1 else start
        is_early = self._early_loss is not None and self.state.global_step < start
        return self._early_loss if is_early and self._early_loss is not None else self.loss

    # ---- Memory bank ----

    def _set_memory_bank(self, bank: MemoryBank | None) -> None:
        self.memory_bank = bank
        if self.args.memory_bank_size:
            for loss in (self.loss, self._early_loss):
                if loss is not None:
                    loss.bank = bank  # type: ignore[assignment]

    def fill_memory_bank(self) -> None:
        """Pushes the embeddings of the last step, in the sampler's order. Called when a step was taken."""
        if self._step is None or self._step.image_embeds is None or self._step.text_embeds is None:
            return
        images, texts, ids = self._step.image_embeds, self._step.text_embeds, self._step.ids
        if self.memory_bank is None:
            dtype = self._step.loss_dtype
            size, dim = self.args.memory_bank_size, images.shape[1]
            self._set_memory_bank(MemoryBank(size, dim, dtype=dtype, device=images.device))
        assert self.memory_bank is not None
        self.memory_bank.push(images, texts, ids)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        save_options(output_dir, self.args, self.model, self._began)
        if self.args.memory_bank_size:
            save_bank(self.memory_bank, output_dir, self.args)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.args.memory_bank_size:
            self._set_memory_bank(load_bank(self.args.memory_bank_size, checkpoint, self.args))

    # ---- Logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the scale, the contrastive batch size, speed and memory to the lines of training."""
        if "loss" in logs:
            logs = {**logs, **self._training_figures()}
        super().log(logs, start_time)

    def _training_figures(self) -> dict[str, float]:
        figures = self._clock.take(lambda own: self.accelerator.gather(own.to(self.args.device)))
        for name, values in self._loss_stats.items():
            figures[name] = torch.stack(values).mean().item()
        self._loss_stats.clear()
        if logit_scale_parameter(self.model) is not None:
            figures["logit_scale"] = logit_scale(self.model).item()
        bias = logit_bias_parameter(self.model)
        if bias is not None:
            figures["logit_bias"] = bias.item()
        return figures
