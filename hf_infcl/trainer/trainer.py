"""The Trainer whose contrastive batch is the whole effective batch: its inputs, its data, and how a run goes on."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, TrainerCallback, enable_full_determinism, set_seed
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import EvalPrediction, TrainOutput, has_length

from hf_infcl.data import ImageTextCollator
from hf_infcl.hub import check_folder
from hf_infcl.models import family_of
from hf_infcl.trainer import checks
from hf_infcl.trainer.agreement import check_agreement, common_values
from hf_infcl.trainer.callbacks import FillMemoryBank, LogitScaleCap
from hf_infcl.trainer.checkpoints import (
    check_checkpoint,
    checkpoint_to_resume,
    how_to_go_on,
    newest_checkpoint,
    saved_step,
    stream_position,
    what_is_left,
)
from hf_infcl.trainer.config import InfCLConfig
from hf_infcl.trainer.description import describe_run
from hf_infcl.trainer.hardware import warn_of_lone_process
from hf_infcl.trainer.loaders import WholeGroups, as_pairs, eval_loader, is_table, train_loader
from hf_infcl.trainer.messages import above_the_bars
from hf_infcl.trainer.naming import suggesting_names
from hf_infcl.trainer.objective import warn_of_all_negatives
from hf_infcl.trainer.preparation import load_model, load_processor, prepare_model, scale_cap, sides_of
from hf_infcl.trainer.saving import SavingTrainer
from hf_infcl.trainer.steps import SteppingTrainer
from hf_infcl.trainer.unused import unused_options

logger = logging.getLogger(__name__)


@suggesting_names("argument")
class InfCLTrainer(SavingTrainer, SteppingTrainer):
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
        checks.check_kinds(train_dataset, eval_dataset, loss, peft_config)
        # Before an adapter is made: its weights are drawn.
        enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
        name_or_path = model if isinstance(model, str) else None
        module: Any = load_model(model, args.model_init_kwargs) if isinstance(model, str) else model
        self._peft_config = peft_config
        if module is not None:
            family_of(module)  # before its processor: what is no dual encoder has none
            if processing_class is None and data_collator is None:
                processing_class = load_processor(module, name_or_path, args.model_init_kwargs)
            module = prepare_model(module, args, peft_config, processing_class)
        elif model_init is None:
            raise ValueError("model is missing: pass a dual encoder, its name or path, or model_init")
        elif processing_class is None and data_collator is None:
            raise ValueError("with model_init, pass processing_class or data_collator")
        self._processor = processing_class
        # One that names columns of its own reads the rows as they are.
        wraps_rows = data_collator is None or (
            isinstance(data_collator, ImageTextCollator)
            and (data_collator.image_column, data_collator.caption_column) == ("image", "caption")
        )
        given = [dataset for dataset in (train_dataset, eval_dataset) if dataset is not None]
        reads_tables = wraps_rows and (not given or any(map(is_table, given)))
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
        self._choose_loss(loss, family)
        self._card_is_current = False
        self._sides = sides_of(self.model)
        self._check_start(args)
        self._warn_at_start(named_model=name_or_path is not None, reads_tables=reads_tables)
        cap = scale_cap(args, family)
        own_callbacks = [
            self._clock,
            *([FillMemoryBank(self)] if args.memory_bank_size else []),
            *([LogitScaleCap(cap)] if cap is not None else []),
        ]
        for callback in own_callbacks:
            self.add_callback(callback)

    def _check_start(self, args: InfCLConfig) -> None:
        checks.check_strategy(fsdp=self.is_fsdp_enabled, deepspeed=self.is_deepspeed_enabled)
        checks.check_temperature(self.model, self.loss_type)
        checks.check_trainable(self.model, self.loss_type)
        checks.check_train_dataset(args, self.train_dataset, self._least_rows)
        checks.check_eval_dataset(self.eval_dataset, args.world_size)
        if args.metric_for_best_model and self.eval_dataset is not None:
            args.metric_for_best_model = checks.resolve_best_metric(
                args.metric_for_best_model, self.eval_dataset, self.compute_metrics is not None
            )

    def _warn_at_start(self, *, named_model: bool, reads_tables: bool) -> None:
        if not self.is_world_process_zero():
            return
        warn_of_lone_process()
        warn_of_all_negatives(self.args, self.loss_type)
        streams = isinstance(self.train_dataset, IterableDataset)
        for line in unused_options(
            self.args, loss_type=self.loss_type, named_model=named_model, reads_tables=reads_tables, streams=streams
        ):
            logger.warning("%s", line)

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

    # ---- Training ----

    def find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint that `train` would resume from, checked.

        Args:
            resume_from_checkpoint: a folder, True or "last" for the newest of `output_dir` that was saved to its end,
                or nothing.

        Returns:
            Its folder, or None to begin anew.

        Raises:
            ValueError: there is none, it does not belong to this run, or the processes would go on from different
                steps; on every process.
        """
        check_agreement({"whether to resume": bool(resume_from_checkpoint)})
        if not resume_from_checkpoint:
            return None
        # Each process has files of its own; without this the others would wait for one that lacks its own.
        with checks.failing_together():
            path = (
                checkpoint_to_resume(self.args)
                if resume_from_checkpoint in (True, "last")
                else str(resume_from_checkpoint)
            )
            check_checkpoint(path, self.model, self.args, needs_bank=self.args.memory_bank_size > 0)
        # One that is further on would stop before the others.
        check_agreement({"the step to resume from": saved_step(path)})
        return path

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As `transformers.Trainer.train`; a checkpoint that does not belong to this run is refused first.

        Raises:
            ValueError: the processes' options or data differ, shown with each one's value; on every process. Or
                `output_dir` holds an adapter where a whole model would be saved, or the other way round.
        """
        check_agreement(common_values(self))
        with checks.failing_together():
            check_folder(self.args.output_dir, self._saves_adapter)
        resume_from_checkpoint = self._last_checkpoint = self.find_checkpoint(resume_from_checkpoint)
        self._said_dropped = self._said_repeats = False
        self._card_is_current = False
        self._began = time.time()
        self._set_memory_bank(None)
        # Who has replaced the bars shows the run in another way.
        own_bars = any(type(callback) is DEFAULT_PROGRESS_CALLBACK for callback in self.callback_handler.callbacks)
        self._say(describe_run(self), shown=own_bars)
        if resume_from_checkpoint is None and self.is_world_process_zero():
            self._warn_of_beginning_anew()
        try:
            with above_the_bars():
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        except KeyboardInterrupt as interrupt:
            note = how_to_go_on(self._last_checkpoint, self.args.output_dir)
            if note is not None and not self.args.save_only_model:
                interrupt.add_note(note)
            raise

    def _say(self, line: str, *, shown: bool) -> None:
        if shown and self.is_world_process_zero():
            print(line)
        else:
            logger.info("%s", line)

    def _warn_of_beginning_anew(self) -> None:
        if self.args.resume_from_checkpoint is not None:
            logger.warning(
                "resume_from_checkpoint=%r of the configuration is for the command line: this run begins anew. To "
                "resume, pass it to trainer.train()",
                self.args.resume_from_checkpoint,
            )
        earlier = newest_checkpoint(self.args.output_dir)
        if earlier is not None:
            limit = self.args.save_total_limit or 0
            logger.warning(
                "output_dir holds checkpoints of an earlier run, the newest %s, and this run begins anew beside "
                "them%s. To go on instead: trainer.train(resume_from_checkpoint=True), or --resume_from_checkpoint "
                "last, which takes this run's from its first one on",
                earlier,
                "" if limit <= 0 else f", deleting the oldest as it saves its own (save_total_limit={limit})",
            )

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
        if resume_from_checkpoint is not None:
            step, steps = saved_step(resume_from_checkpoint), self.state.max_steps
            line = f"resuming from {resume_from_checkpoint} at step {step:,} of {steps:,}"
            self._say(line, shown=not self.args.disable_tqdm)
            warning = what_is_left(resume_from_checkpoint, steps)
            if warning is not None and self.is_world_process_zero():
                logger.warning(warning)
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
        # transformers looks after a step whether it was the last.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        checks.check_gradients_are_averaged(model, self.args.world_size)
        # accelerate tells the data set too, but not in an epoch that is resumed in its middle.
        if callable(getattr(self.train_dataset, "set_epoch", None)):
            self.train_dataset.set_epoch(epoch)
        super()._run_epoch(model, epoch, *args, **kwargs)
