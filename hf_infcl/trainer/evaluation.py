"""Embedding a whole evaluation set, and what is computed from it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from hf_infcl.evaluation import dataset_retrieval_metrics
from hf_infcl.models import logit_bias_parameter, logit_scale, unwrap
from hf_infcl.ring import World
from hf_infcl.trainer.accumulation import Embed, Sides, untouched_rng
from hf_infcl.trainer.config import InfCLConfig
from hf_infcl.trainer.loaders import pins_memory
from hf_infcl.trainer.messages import above_the_bars

logger = logging.getLogger(__name__)
# What Accelerate sets on a model that it prepares: a forward under autocast, what that was before, and that it has.
_PREPARED = ("forward", "_original_forward", "_is_accelerate_prepared")


@dataclass
class EmbeddedSet:
    """The embeddings of this process's rows of a data set.

    Attributes:
        image_embeds: (n, d) in float32 or wider, on the model's device.
        text_embeds: (n, d) likewise.
        ids: (n, m) integers, or None.
    """

    image_embeds: Tensor
    text_embeds: Tensor
    ids: Tensor | None

    def __len__(self) -> int:
        return len(self.image_embeds)

    def gathered(self) -> "EmbeddedSet":
        """The rows of all processes, one process after the other, on each of them."""
        world = World.of(None)
        if world.is_alone:
            return self
        sizes = self._sizes(world)
        ids = None if self.ids is None else world.gather(self.ids, sizes)
        return EmbeddedSet(world.gather(self.image_embeds, sizes), world.gather(self.text_embeds, sizes), ids)

    def rows_of_all(self) -> int:
        """Rows of the set over all processes."""
        return sum(self._sizes(World.of(None)))

    def _sizes(self, world: World) -> tuple[int, ...]:
        own = torch.tensor([len(self)], device=self.image_embeds.device)
        return tuple(world.gather(own, (1,) * world.size).tolist())


@torch.no_grad()
def embed_set(
    batches: Iterable[Mapping[str, Any]],
    *,
    sides: Sides,
    embed: Embed,
    to_device: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    after_batch: Callable[[], None],
) -> EmbeddedSet:
    """Embeds every batch. What is kept is the embeddings, which are small; metrics are computed once from all of them.

    Raises:
        ValueError: there is no row, or only some batches have ids.
    """
    images, texts, ids = [], [], []
    for batch in batches:
        image_inputs, text_inputs = sides.split(batch)
        image, text = embed(to_device({**image_inputs, **text_inputs}))
        if image is None or text is None:
            raise ValueError("the model's forward returned no embeddings for one of the sides it was given")
        wide = torch.promote_types(image.dtype, torch.float32)
        images.append(image.to(wide))
        texts.append(text.to(wide))
        if batch.get("ids") is not None:
            ids.append(to_device({"ids": batch["ids"].reshape(len(image), -1)})["ids"])
        after_batch()
    if not images:
        raise ValueError("the evaluation set has no rows")
    if ids and len(ids) != len(images):
        raise ValueError("'ids' must come with every batch of an evaluation set or with none")
    return EmbeddedSet(torch.cat(images), torch.cat(texts), torch.cat(ids) if ids else None)


class EvaluatingTrainer(Trainer):
    """The part of `InfCLTrainer` that embeds data sets and judges them whole.

    Attributes:
        _sides: what belongs to which side of the model.
        _eval_loss: the loss without a memory bank: an evaluation set is contrasted with itself only.
    """

    args: InfCLConfig
    _sides: Sides
    _eval_loss: nn.Module

    @above_the_bars()
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
        logger.info("***** Running %s: batches of %d *****", description, self.args.eval_batch_size)
        self.callback_handler.eval_dataloader = dataloader
        with self._model_for_evaluation() as model, untouched_rng(self.args.device):
            model.eval()
            if callable(getattr(self.optimizer, "eval", None)):
                self.optimizer.eval()
            embedded = embed_set(
                dataloader,
                sides=self._sides,
                embed=embedder(model),
                to_device=self._to_device,
                after_batch=self._after_prediction,
            )
            loss = self._evaluation_loss(model, embedded)
            retrieval = dataset_retrieval_metrics(embedded.image_embeds, embedded.text_embeds, embedded.ids, group=None)
            rows = embedded.rows_of_all()
        metrics: dict[str, Any] = {"loss": loss, **retrieval}
        predictions: Any = None
        ids: Any = None
        if self.compute_metrics is not None or not prediction_loss_only:
            # Only who asks for the embeddings gets them all on one process.
            embedded = embedded.gathered()
            predictions = tuple(side.cpu().numpy() for side in (embedded.image_embeds, embedded.text_embeds))
            ids = None if embedded.ids is None else embedded.ids.cpu().numpy()
        if self.compute_metrics is not None:
            metrics.update(self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=ids)))
        metrics = {
            name if name.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{name}": value
            for name, value in denumpify_detensorize(metrics).items()
        }
        return EvalLoopOutput(predictions=predictions, label_ids=ids, metrics=metrics, num_samples=rows)

    @contextmanager
    def _model_for_evaluation(self) -> Iterator[nn.Module]:
        """The model, prepared for evaluation; outside training it is afterwards as it was before.

        Accelerate takes a model that it has prepared once for one that is ready to train: it would not wrap it by
        DistributedDataParallel any more, and every process would go by its own gradients.
        """
        model = self._wrap_model(self.model, training=False)
        prepares = len(self.accelerator._models) == 0 and model is self.model
        attributes = self.model.__dict__
        before = {name: attributes[name] for name in _PREPARED if name in attributes}
        if prepares:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            model = model.to(dtype=dtype, device=self.args.device)
        try:
            yield model
        finally:
            if prepares:
                self.accelerator._models.clear()
                for name in _PREPARED:
                    attributes.pop(name, None)
                attributes.update(before)

    def _after_prediction(self) -> None:
        self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    @torch.no_grad()
    def _evaluation_loss(self, model: nn.Module, embedded: EmbeddedSet) -> float:
        """The loss of the whole set, over all processes."""
        base = unwrap(model)
        bias = logit_bias_parameter(base)
        loss = as_function(self._eval_loss)(
            embedded.image_embeds,
            embedded.text_embeds,
            logit_scale(base),
            None if bias is None else bias.float(),
            embedded.ids,
        )
        return loss.item()

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
        loss = as_function(self._eval_loss)(
            outputs.image_embeds,
            outputs.text_embeds,
            logit_scale(base),
            logit_bias_parameter(base),
            None if ids is None else self._to_device({"ids": ids})["ids"],
        )
        return (loss, outputs) if return_outputs else loss

    def _to_device(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.args.device, non_blocking=pins_memory(self.args)) for name, value in inputs.items()}


def embedder(model: nn.Module) -> Embed:
    """Calls the model itself, wrapped as it is: only so do autocast, DDP and compile apply."""

    def embed(inputs: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        output = model(**inputs)
        return output.image_embeds, output.text_embeds

    return embed


def as_function(loss: nn.Module) -> Callable[..., Tensor]:
    """A loss module as a function of (image_embeds, text_embeds, logit_scale, logit_bias, ids)."""

    def call(image: Tensor, text: Tensor, scale: Tensor | None, bias: Tensor | None, ids: Tensor | None) -> Tensor:
        return loss(image, text, scale, bias, ids=ids)

    return call
