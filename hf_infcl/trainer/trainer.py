"""The Trainer whose contrastive batch is the whole effective batch."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length

from hf_infcl.data import ImageTextCollator, ImageTextDataset
from hf_infcl.evaluation import dataset_retrieval_metrics
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
from hf_infcl.trainer.accumulation import ContrastiveStep, Embed, untouched_rng
from hf_infcl.trainer.callbacks import DatasetEpoch, LogitScaleCap, StepClock
from hf_infcl.trainer.config import InfCLConfig
from hf_infcl.trainer.evaluation import EmbeddedSet, embed_set
from hf_infcl.trainer.preparation import (
    load_model,
    load_processor,
    prepare_model,
    set_locked_towers_eval,
    sides_of,
)
from hf_infcl.trainer.samplers import ContrastiveBatchSampler, EpochSampler, NoDuplicatesBatchSampler

logger = logging.getLogger(__name__)

_LOSS_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class InfCLTrainer(Trainer):
    """Fine-tunes a dual encoder (CLIP, SigLIP, ...) with a loss over the whole effective batch.

    The batch that is contrasted is `per_device_train_batch_size` x `gradient_accumulation_steps` x processes, exactly:
    every micro-batch sees the negatives of all others, and memory follows the micro-batch. Everything else is
    `transformers.Trainer`.

    Args:
        model: a dual encoder as an instance, or its name or path, loaded in float32.
        args: the configuration; by default `InfCLConfig("tmp_trainer")`.
        data_collator: makes a batch of tensors from rows: the model's inputs, and optionally "ids" (n,) or (n, m). By
            default the `ImageTextCollator` of `processing_class`.
        train_dataset: a `datasets.Dataset` with an image and a caption column, or any torch data set whose rows the
            collator takes: `{"image": PIL image, "caption": str, "ids": ints}` for the default one.
        eval_dataset: the same, or a dictionary of such by name.
        processing_class: the processor; by default the model's own is loaded.
        peft_config: wraps the model by PEFT. Target modules left out are found in both towers.
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
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
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
        name_or_path = model if isinstance(model, str) else None
        module: Any = load_model(model, args.model_init_kwargs) if isinstance(model, str) else model
        self._peft_config = peft_config
        self._accumulation_asked_for = args.gradient_accumulation_steps
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
            train_dataset=self._as_pairs(train_dataset, args, evaluated=False) if wraps_rows else train_dataset,
            eval_dataset=self._as_pairs(eval_dataset, args, evaluated=True) if wraps_rows else eval_dataset,
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
        self.memory_bank: MemoryBank | None = None
        self.loss = self._make_loss(loss)
        # Without the bank: an evaluation set is contrasted with itself only.
        self._eval_loss = self._make_loss(loss)
        self._step: ContrastiveStep | None = None
        self._position = 0
        self._said_dropped = False
        self._sides = sides_of(self.model)
        self._check_start(args)
        self._clock = StepClock()
        cap = args.logit_scale_max if args.logit_scale_max is not None else family.default_logit_scale_max
        self._scale_cap = None if cap is None or cap == float("inf") else LogitScaleCap(cap)
        for callback in (self._clock, DatasetEpoch(self), self._scale_cap):
            if callback is not None:
                self.add_callback(callback)

    def _make_loss(self, loss: nn.Module | None) -> nn.Module:
        if loss is not None:
            return loss
        assert self.loss_type is not None
        return objective.build_loss(self.args, self.loss_type)

    def _check_start(self, args: InfCLConfig) -> None:
        checks.check_scale(self.model)
        checks.check_trainable(self.model, self.loss_type)
        checks.check_train_dataset(args, self.train_dataset, self.loss_type)
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

    def _as_pairs(self, dataset: Any, args: InfCLConfig, *, evaluated: bool) -> Any:
        """A table with image and caption columns becomes a data set of pairs; anything else stays what it is."""
        import datasets

        if isinstance(dataset, dict):
            return {name: self._as_pairs(one, args, evaluated=evaluated) for name, one in dataset.items()}
        if not isinstance(dataset, datasets.Dataset):
            return dataset
        # A set that is evaluated has to be the same every time, and the usual recalls count every caption.
        captions = "expand" if evaluated and args.captions == "draw" else args.captions
        seed = args.seed if args.data_seed is None else args.data_seed
        return ImageTextDataset(dataset, args.image_column, args.caption_column, captions=captions, seed=seed)

    def _loader_options(self) -> dict[str, Any]:
        return {
            "collate_fn": self.data_collator,
            "num_workers": self.args.dataloader_num_workers,
            "pin_memory": self._pins_memory,
            "persistent_workers": self.args.dataloader_persistent_workers,
            "multiprocessing_context": self.args.dataloader_multiprocessing_context,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
        }

    @property
    def _pins_memory(self) -> bool:
        return self.args.dataloader_pin_memory and self.args.device.type == "cuda"

    def get_train_dataloader(self) -> DataLoader:
        """The micro-batches of whole contrastive batches, left on the host: a step's pixels need not fit the GPU."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        options = self._loader_options()
        if isinstance(self.train_dataset, IterableDataset):
            loader = DataLoader(
                self.train_dataset,
                batch_size=self._train_batch_size,
                drop_last=self.args.dataloader_drop_last,
                **options,
            )
        else:
            loader = DataLoader(self.train_dataset, batch_sampler=self._batch_sampler(), **options)
        return self.accelerator.prepare_data_loader(loader, device_placement=False)

    def _batch_sampler(self) -> ContrastiveBatchSampler:
        args = self.args
        seed = args.data_seed if args.data_seed is not None else args.seed
        shuffle = args.train_sampling_strategy != "sequential"
        sampler = EpochSampler(len(self.train_dataset), seed, shuffle=shuffle)
        micro_batches = args.gradient_accumulation_steps * args.world_size
        if args.batch_sampler == "no_duplicates":
            return NoDuplicatesBatchSampler(self._train_ids, sampler, self._train_batch_size, micro_batches)
        least = 2 if self.loss_type in objective.SOFTMAX_LOSS_TYPES and not args.memory_bank_size else 1
        batch_sampler = ContrastiveBatchSampler(
            sampler,
            self._train_batch_size,
            micro_batches,
            least_rows=least,
            # Ranks of one micro-batch have equally many rows.
            drop_last=args.dataloader_drop_last or args.world_size > 1,
        )
        if batch_sampler.left_out:
            logger.warning(
                "%d of %d rows are left over in each epoch: they make no contrastive batch of %d",
                batch_sampler.left_out,
                len(self.train_dataset),
                args.contrastive_batch_size,
            )
        return batch_sampler

    def _train_ids(self) -> Tensor:
        """The ids of all rows, (n, m), without reading their pictures."""
        ids_of = getattr(self.train_dataset, "ids", None)
        if not callable(ids_of):
            raise ValueError(
                "batch_sampler='no_duplicates' needs the ids of all rows beforehand: train_dataset has no method "
                f"ids(index) (it is a {type(self.train_dataset).__name__})"
            )
        ids = torch.tensor([ids_of(index) for index in range(len(self.train_dataset))])
        return ids.reshape(len(ids), -1)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Every row of the set once, in order; `dataloader_drop_last` is for training."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset")
        dataset = self._as_pairs(dataset, self.args, evaluated=True) if self._wraps_rows else dataset
        return DataLoader(dataset, batch_size=self.args.eval_batch_size, **self._loader_options())

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As `get_eval_dataloader`."""
        return self.get_eval_dataloader(test_dataset)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple:
        """Counts whole contrastive batches only: an epoch's short last group is dropped, so it is no step."""
        if has_length(dataloader):
            dataloader = _WholeGroups(dataloader, args.gradient_accumulation_steps)
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
        if 0 < len(batches) < self.args.gradient_accumulation_steps:
            if not self._said_dropped:
                logger.warning(
                    "the data ends %d micro-batches into a group of gradient_accumulation_steps=%d: such a group is "
                    "dropped, for it would contrast fewer pairs than all others",
                    len(batches),
                    self.args.gradient_accumulation_steps,
                )
                self._said_dropped = True
            batches = []
        self._clock.data_ready()
        self._step = None
        self._pending, self._position = batches, 0
        return batches, None

    # ---- Training ----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.train`."""
        self._said_dropped = False
        return super().train(*args, **kwargs)

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
        pairs = self.args.train_batch_size * self._accumulation_asked_for
        while True:
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
        base = unwrap(model)
        step = ContrastiveStep(
            micro_batches,
            sides=self._sides,
            embed=_embedder(model),
            loss=self._loss_of_step(),
            scale=lambda: None if logit_scale_parameter(base) is None else logit_scale(base),
            bias=lambda: logit_bias_parameter(base),
            to_device=self._to_device,
            device=self.args.device,
            loss_dtype=_LOSS_DTYPES.get(self.accelerator.mixed_precision),
        )
        with self.compute_loss_context_manager():
            step.begin()
        self._clock.count(step.rows * self.args.world_size)
        return step

    def _loss_of_step(self) -> Callable[..., Tensor]:
        return _as_callable(self.loss)

    def _to_device(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.args.device, non_blocking=self._pins_memory) for name, value in inputs.items()}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of one batch by itself. Training does not call it: its loss spans the micro-batches of a step."""
        image_inputs, text_inputs = self._sides.split(inputs)
        outputs = model(**self._to_device({**image_inputs, **text_inputs}))
        ids = inputs.get("ids")
        base = unwrap(model)
        loss = _as_callable(self._eval_loss)(
            outputs.image_embeds,
            outputs.text_embeds,
            logit_scale(base),
            logit_bias_parameter(base),
            None if ids is None else self._to_device({"ids": ids})["ids"],
        )
        return (loss, outputs) if return_outputs else loss

    # ---- Logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the scale, the contrastive batch size, speed and memory to the lines of training."""
        if "loss" in logs:
            logs = {**logs, **self._training_figures()}
        super().log(logs, start_time)

    def _training_figures(self) -> dict[str, float]:
        figures = self._clock.take()
        if logit_scale_parameter(self.model) is not None:
            figures["logit_scale"] = logit_scale(self.model).item()
        bias = logit_bias_parameter(self.model)
        if bias is not None:
            figures["logit_bias"] = bias.item()
        return figures

    # ---- Evaluation ----

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Embeds the whole set, then computes its loss and its retrieval metrics once, whatever the batch size.

        Evaluating advances no random numbers: training goes the same way with it and without.
        """
        model = self._model_for_evaluation()
        logger.info("***** Running %s: batches of %d *****", description, self.args.eval_batch_size)
        model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        with untouched_rng(self.args.device):
            embedded = embed_set(
                dataloader,
                sides=self._sides,
                embed=_embedder(model),
                to_device=self._to_device,
                after_batch=self._after_prediction,
            )
            metrics = self._evaluation_metrics(model, embedded)
        predictions: Any = None
        ids: Any = None
        if self.compute_metrics is not None or not prediction_loss_only:
            predictions = tuple(side.cpu().numpy() for side in (embedded.image_embeds, embedded.text_embeds))
            ids = None if embedded.ids is None else embedded.ids.cpu().numpy()
        if self.compute_metrics is not None:
            metrics.update(self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=ids)))
        metrics = {
            name if name.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{name}": value
            for name, value in denumpify_detensorize(metrics).items()
        }
        return EvalLoopOutput(predictions=predictions, label_ids=ids, metrics=metrics, num_samples=len(embedded))

    def _model_for_evaluation(self) -> nn.Module:
        model = self._wrap_model(self.model, training=False)
        if len(self.accelerator._models) == 0 and model is self.model:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
            if model is not self.model:
                self.model_wrapped = model
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            model = model.to(dtype=dtype, device=self.args.device)
        return model

    def _after_prediction(self) -> None:
        self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    @torch.no_grad()
    def _evaluation_metrics(self, model: nn.Module, embedded: EmbeddedSet) -> dict[str, float]:
        base = unwrap(model)
        bias = logit_bias_parameter(base)
        loss = _as_callable(self._eval_loss)(
            embedded.image_embeds,
            embedded.text_embeds,
            logit_scale(base),
            None if bias is None else bias.float(),
            embedded.ids,
        )
        metrics = dataset_retrieval_metrics(embedded.image_embeds, embedded.text_embeds, embedded.ids)
        return {"loss": loss.item(), **metrics}


class _WholeGroups:
    """A loader's length, rounded down to whole groups of micro-batches."""

    def __init__(self, loader: Any, group: int):
        self.dataset = loader.dataset
        self._length = len(loader) // group * group

    def __len__(self) -> int:
        return self._length


def _embedder(model: nn.Module) -> Embed:
    """Calls the model itself, wrapped as it is: only so do autocast, DDP and compile apply."""

    def embed(inputs: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        output = model(**inputs)
        return output.image_embeds, output.text_embeds

    return embed


def _as_callable(loss: nn.Module) -> Callable[..., Tensor]:
    def call(image: Tensor, text: Tensor, scale: Tensor | None, bias: Tensor | None, ids: Tensor | None) -> Tensor:
        return loss(image, text, scale, bias, ids=ids)

    return call
