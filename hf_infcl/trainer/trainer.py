"""The Trainer whose contrastive batch is the whole effective batch."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, enable_full_determinism, set_seed
from transformers.trainer_utils import EvalPrediction, TrainOutput, get_last_checkpoint, has_length

from hf_infcl.data import ImageTextCollator
from hf_infcl.losses import MemoryBank
from hf_infcl.models import (
    family_of,
    logit_bias_parameter,
    logit_scale,
    logit_scale_parameter,
    set_batch_statistics_eval,
    unwrap,
)
from hf_infcl.trainer import checks, objective
from hf_infcl.trainer.accumulation import ContrastiveStep
from hf_infcl.trainer.callbacks import FillMemoryBank, LogitScaleCap, StepClock
from hf_infcl.trainer.checkpoints import check_checkpoint, load_bank, save_bank, save_options, stream_position
from hf_infcl.trainer.config import InfCLConfig
from hf_infcl.trainer.evaluation import EvaluatingTrainer, as_function, embedder
from hf_infcl.trainer.loaders import WholeGroups, as_pairs, eval_loader, train_loader
from hf_infcl.trainer.preparation import (
    load_model,
    load_processor,
    prepare_model,
    scale_cap,
    set_locked_towers_eval,
    sides_of,
)
from hf_infcl.trainer.saving import SavingTrainer

logger = logging.getLogger(__name__)

_LOSS_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class InfCLTrainer(SavingTrainer, EvaluatingTrainer):
    """Fine-tunes a dual encoder (CLIP, SigLIP, ...) with a loss over the whole effective batch.

    The batch that is contrasted is `per_device_train_batch_size` x `gradient_accumulation_steps` x processes, exactly:
    every micro-batch sees the negatives of all others, and memory follows the micro-batch. Everything else is
    `transformers.Trainer`.

    Args:
        model: a dual encoder as an instance, or its name or path, loaded in float32.
        args: the configuration; by default `InfCLConfig("tmp_trainer")`.
        train_dataset: a `datasets.Dataset` with an image and a caption column, or any torch data set whose rows the
            collator takes: `{"image": PIL image, "caption": str, "ids": ints}` for the default one.
        eval_dataset: the same, or a dictionary of such by name.
        processing_class: the processor; by default the model's own is loaded.
        peft_config: wraps the model by PEFT. Target modules left out are found in both towers.
        data_collator: makes a batch of tensors from rows: the model's inputs, and optionally "ids" (n,) or (n, m). By
            default the `ImageTextCollator` of `processing_class`.
        loss: a module with `ContrastiveLoss`'s forward, instead of the one that `loss_type` names.
        model_init: makes the model anew for every trial of a search.
        compute_metrics: gets predictions=(image_embeds, text_embeds) and label_ids=ids of the whole evaluation set;
            its metrics join the retrieval metrics.
        callbacks, optimizers, optimizer_cls_and_kwargs: as in `transformers.Trainer`.
        compute_loss_func, preprocess_logits_for_metrics: refused. The former would see one micro-batch.

    Raises:
        ValueError: what cannot work, before the first step: see `hf_infcl.trainer.checks`.

    Example:
        >>> trainer = InfCLTrainer(
        ...     model="openai/clip-vit-base-patch32",
        ...     args=InfCLConfig("out", per_device_train_batch_size=64, gradient_accumulation_steps=16),
        ...     train_dataset=load_dataset("lambdalabs/naruto-blip-captions", split="train"),
        ...     peft_config=LoraConfig(r=16),
        ... )
        >>> trainer.train()

    Source: exact accumulation, arXiv 2101.06983 and 2111.10050; the loss, arXiv 2410.17243.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module | None = None,
        args: InfCLConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        loss: nn.Module | None = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
    ):
        for name, value, instead in (
            (
                "compute_loss_func",
                compute_loss_func,
                "it would see one micro-batch of the contrastive batch; pass loss=",
            ),
            (
                "preprocess_logits_for_metrics",
                preprocess_logits_for_metrics,
                "there are no logits; use compute_metrics",
            ),
        ):
            if value is not None:
                raise ValueError(f"{name} is not supported: {instead}")
        args = InfCLConfig("tmp_trainer") if args is None else args
        checks.check_arguments(args)
        checks.check_kinds(train_dataset, eval_dataset, loss)
        # Before an adapter is made: its weights are drawn.
        enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
        name_or_path = model if isinstance(model, str) else None
        module: Any = load_model(model, args.model_init_kwargs) if isinstance(model, str) else model
        self._peft_config = peft_config
        if module is not None:
            if processing_class is None and data_collator is None:
                processing_class = load_processor(module, name_or_path, args.model_init_kwargs)
            module = prepare_model(module, args, peft_config, processing_class)
        elif processing_class is None and data_collator is None:
            raise ValueError("with model_init, pass processing_class or data_collator")
        self._processor = processing_class
        wraps_rows = data_collator is None or isinstance(data_collator, ImageTextCollator)
        super().__init__(
            model=module,
            args=args,
            data_collator=data_collator,
            train_dataset=as_pairs(train_dataset, args, evaluated=False) if wraps_rows else train_dataset,
            eval_dataset=as_pairs(eval_dataset, args, evaluated=True) if wraps_rows else eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        family = family_of(self.model)
        if data_collator is None:
            padding = family.text_padding(self.model, processing_class)
            self.data_collator = ImageTextCollator(processing_class, padding)
        self._wraps_rows = wraps_rows
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
        self._step: ContrastiveStep | None = None
        self._position = 0
        # What the loss says of each step since the last line of the log, such as how much of the search was skipped.
        self._loss_stats: dict[str, list[Tensor]] = defaultdict(list)
        self._said_dropped = self._said_repeats = False
        # A softmax over one candidate has nothing to learn from.
        is_softmax = self.loss_type in objective.SOFTMAX_LOSS_TYPES
        self._least_rows = 2 if is_softmax and not args.memory_bank_size else 1
        self._card_is_current = False
        self._sides = sides_of(self.model)
        self._check_start(args)
        self._clock = StepClock()
        cap = scale_cap(args, family)
        own_callbacks = [
            self._clock,
            *([FillMemoryBank(self)] if args.memory_bank_size else []),
            *([LogitScaleCap(cap)] if cap is not None else []),
        ]
        for callback in own_callbacks:
            self.add_callback(callback)

    def _make_loss(self, loss: nn.Module | None) -> nn.Module:
        if loss is not None:
            return loss
        assert self.loss_type is not None
        return objective.build_loss(self.args, self.loss_type)

    def _check_start(self, args: InfCLConfig) -> None:
        checks.check_strategy(fsdp=self.is_fsdp_enabled, deepspeed=self.is_deepspeed_enabled)
        checks.check_temperature(self.model, self.loss_type)
        checks.check_trainable(self.model, self.loss_type)
        checks.check_train_dataset(args, self.train_dataset, self._least_rows)
        if args.metric_for_best_model and self.eval_dataset is not None:
            args.metric_for_best_model = checks.resolve_best_metric(
                args.metric_for_best_model, self.eval_dataset, self.compute_metrics is not None
            )

    # ---- Model ----

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Makes and prepares the model of a trial."""
        return prepare_model(super().call_model_init(trial), self.args, self._peft_config, self._processor)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The scale and the bias are no weights: they do not decay."""
        names = super().get_decay_parameter_names(model)
        return [name for name in names if name.rpartition(".")[2] not in ("logit_scale", "logit_bias")]

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """The micro-batches of whole contrastive batches, left on the host: a step's pixels need not fit the GPU."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        return train_loader(
            self.train_dataset,
            self.args,
            self.data_collator,
            batch_size=self._train_batch_size,
            least_rows=self._least_rows,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Every row of the set once, in order; `dataloader_drop_last` is for training."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset")
        if self._wraps_rows:
            dataset = as_pairs(dataset, self.args, evaluated=True)
        return eval_loader(dataset, self.args, self.data_collator)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As `get_eval_dataloader`."""
        return self.get_eval_dataloader(test_dataset)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple:
        """Counts whole contrastive batches only: an epoch's short last group is dropped, so it is no step."""
        if has_length(dataloader):
            dataloader = WholeGroups(dataloader, args.gradient_accumulation_steps)
        return super().set_initial_training_values(args, dataloader)

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

    # ---- Training ----

    def find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint that `train` would resume from, checked.

        Args:
            resume_from_checkpoint: a folder, True for the newest of `output_dir`, or nothing.

        Returns:
            Its folder, or None to begin anew.

        Raises:
            ValueError: there is none, or it does not belong to this run.
        """
        if not resume_from_checkpoint:
            return None
        path = resume_from_checkpoint
        if isinstance(path, bool):
            path = get_last_checkpoint(self.args.output_dir)
            if path is None:
                raise ValueError(f"there is no checkpoint in output_dir={self.args.output_dir!r} to resume from")
        # Each process has files of its own; without this the others would wait for one that lacks its own.
        with checks.failing_together():
            check_checkpoint(str(path), self.model, self.args, needs_bank=self.args.memory_bank_size > 0)
        return str(path)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As `transformers.Trainer.train`; a checkpoint that does not belong to this run is refused first."""
        resume_from_checkpoint = self.find_checkpoint(resume_from_checkpoint)
        self._said_dropped = self._said_repeats = False
        self._card_is_current = False
        self._set_memory_bank(None)
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        epoch, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None and not has_length(self.train_dataset):
            epoch, steps = stream_position(resume_from_checkpoint)
            batches = 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps
        return epoch, batches

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        if not self.args.auto_find_batch_size or batch_size is None:
            return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval)
        # transformers would shrink the batch by a tenth. Halving the micro-batch and doubling their number leaves the
        # contrastive batch, and with it the training, what it was.
        pairs = self.args.train_batch_size * self.args.gradient_accumulation_steps
        while True:
            self.args.per_device_train_batch_size = batch_size
            self.args.gradient_accumulation_steps = pairs // batch_size
            try:
                return super()._inner_training_loop(
                    batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
                )
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                if batch_size % 2:
                    # Worded so that the loop around this one does not take it for another call to shrink.
                    raise RuntimeError(
                        f"auto_find_batch_size: a micro-batch of {batch_size} does not fit into memory and cannot be "
                        "halved"
                    ) from error
            self._step = None
            clear_device_cache(garbage_collection=True)
            batch_size //= 2
            logger.warning("out of memory: micro-batches of %d, %d of them a step", batch_size, pairs // batch_size)

    def _run_epoch(self, model: nn.Module, epoch: int, *args: Any, **kwargs: Any) -> None:
        # accelerate tells the data set too, but not in an epoch that is resumed in its middle.
        if callable(getattr(self.train_dataset, "set_epoch", None)):
            self.train_dataset.set_epoch(epoch)
        super()._run_epoch(model, epoch, *args, **kwargs)

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
            loss_dtype=_LOSS_DTYPES.get(self.accelerator.mixed_precision),
        )
        with self.compute_loss_context_manager():
            step.begin()
        for name, value in getattr(loss, "last_stats", {}).items():
            self._loss_stats[name].append(value)
        if not self._said_repeats:
            self._said_repeats = self._report_repeats(step.ids)
        self._clock.count(step.rows)
        return step

    def _report_repeats(self, ids: Tensor | None) -> bool:
        """Says once where copies are taken for negatives. Returns whether there is nothing more to say."""
        if ids is None or self.loss_type is None or self.args.duplicates != "keep":
            return True
        repeated = [1 - len(column.unique()) / len(column) for column in ids.cpu().unbind(1)]
        if max(repeated) == 0:
            return False
        shares = ", ".join(f"{share:.0%}" for share in repeated)
        logger.warning(
            "repeated in a batch: %s (a share for each column of ids, such as image and caption). duplicates='keep' "
            "takes them for negatives, which keeps the loss above a floor; 'mask' leaves them out, 'positive' pairs "
            "them",
            shares,
        )
        return True

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
        save_options(output_dir, self.args)
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
