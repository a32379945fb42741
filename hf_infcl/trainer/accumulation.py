"""Exact accumulation: one loss over all micro-batches of an optimizer step, in the memory of one micro-batch.

The loss needs every embedding of the batch at once, the towers' graphs do not. So the micro-batches are embedded
without graph first; the loss and its gradient at the embeddings are computed once, over all of them; then each
micro-batch is embedded again, under the random numbers of the first time, and the cached gradient is sent through its
graph. By the chain rule the sum of those backward passes is the gradient of the whole batch's loss.

Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup (arXiv 2101.06983); for
image-text pairs, Pham et al., Combined Scaling for Zero-shot Transfer Learning (arXiv 2111.10050).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Takes keyword inputs of one or both sides and returns (image_embeds, text_embeds), None for a side without inputs.
Embed = Callable[[dict[str, Tensor]], tuple[Tensor | None, Tensor | None]]
# (image_embeds, text_embeds, logit_scale, logit_bias, ids) -> loss
Loss = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]

SIDES = ("image", "text")


class RngState:
    """The state of the generators that a forward on `device` can draw from: the CPU's and the device's own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._cpu = torch.get_rng_state()
        # Read and set on the host: neither waits for the device.
        self._own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Sets the generators back to this state."""
        torch.set_rng_state(self._cpu)
        if self._own is not None:
            torch.get_device_module(self._device).set_rng_state(self._own, self._device)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the generators repeat what followed this state; afterwards they go on where they were."""
        now = RngState(self._device)
        self.restore()
        try:
            yield
        finally:
            now.restore()


@contextmanager
def untouched_rng(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the generators are afterwards where they were before."""
    with RngState(device).replayed():
        yield


@dataclass(frozen=True)
class Sides:
    """What belongs to which side of the model.

    Attributes:
        image_inputs: names of the forward's inputs on the image side.
        text_inputs: names of the forward's inputs on the text side.
        image_trained: whether anything on the image side is trained.
        text_trained: whether anything on the text side is trained.
    """

    image_inputs: Sequence[str]
    text_inputs: Sequence[str]
    image_trained: bool = True
    text_trained: bool = True

    @property
    def trained(self) -> tuple[bool, bool]:
        return self.image_trained, self.text_trained

    def split(self, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the batch's image inputs and text inputs.

        Raises:
            ValueError: a side without inputs; the message lists what the batch holds.
        """
        image = {name: batch[name] for name in self.image_inputs if batch.get(name) is not None}
        text = {name: batch[name] for name in self.text_inputs if batch.get(name) is not None}
        for side, inputs, names in (("image", image, self.image_inputs), ("text", text, self.text_inputs)):
            if names[0] not in inputs:
                raise ValueError(f"a batch needs {names[0]!r} for the {side} side; it holds {sorted(batch)}")
        return image, text


class ContrastiveStep:
    """One optimizer step over a contrastive batch that is held as micro-batches.

    `begin` embeds all of them and computes the loss with its gradient at the embeddings, the scale and the bias. Then
    `surrogate(i)`, for each micro-batch in turn, returns a scalar whose backward pass adds the micro-batch's share of
    the gradient to the parameters. With one micro-batch there is no second forward. A side on which nothing is trained
    is embedded once, without graph.

    Random numbers: the generators advance as in one pass over the micro-batches, as if the whole batch's graph had been
    built; the second pass replays them.

    Args:
        micro_batches: dictionaries of tensors, on any device.
        sides: which inputs belong to which side, and what is trained.
        embed: the model's forward.
        loss: the loss over the whole batch.
        scale: gives the multiplier with its graph, or None; called afresh for the backward pass.
        bias: gives the bias with its graph, or None.
        to_device: moves a dictionary of tensors to where the model is.
        device: where that is.
        loss_dtype: dtype in which the loss takes the embeddings; None for their own. Gradients are cached in float32
        (or
            wider) all the same.
    """

    def __init__(
        self,
        micro_batches: Sequence[Mapping[str, Any]],
        *,
        sides: Sides,
        embed: Embed,
        loss: Loss,
        scale: Callable[[], Tensor | None],
        bias: Callable[[], Tensor | None],
        to_device: Callable[[dict[str, Tensor]], dict[str, Tensor]],
        device: torch.device,
        loss_dtype: torch.dtype | None = None,
    ):
        self._sides, self._embed, self._loss = sides, embed, loss
        self._scale, self._bias = scale, bias
        self._to_device, self._device, self._loss_dtype = to_device, device, loss_dtype
        self._inputs = [sides.split(batch) for batch in micro_batches]
        self._rng: list[RngState | None] = []
        self._kept: tuple[Tensor | None, Tensor | None] | None = None  # the graph of a lone micro-batch
        self._sizes: list[int] = []
        self.image_embeds: Tensor | None = None
        self.text_embeds: Tensor | None = None
        self.ids: Tensor | None = None
        self.host_ids = _joined_ids(micro_batches)
        self.loss: Tensor | None = None
        self.logit_scale: Tensor | None = None

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def rows(self) -> int:
        """Pairs of the contrastive batch on this process."""
        return sum(self._sizes)

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype in which the loss takes the embeddings."""
        if self._loss_dtype is not None or self.image_embeds is None:
            return self._loss_dtype or torch.float32
        return self.image_embeds.dtype

    def begin(self) -> None:
        """Embeds every micro-batch and computes the loss and its gradient at the embeddings, the scale and the bias."""
        images, texts = [], []
        for image_inputs, text_inputs in self._inputs:
            image, text = self._first_pass(image_inputs, text_inputs)
            if image is None or text is None:
                raise ValueError("the model's forward returned no embeddings for one of the sides it was given")
            images.append(image.detach())
            texts.append(text.detach())
            self._sizes.append(len(image))
        self.image_embeds, self.text_embeds = torch.cat(images), torch.cat(texts)
        self.ids = None if self.host_ids is None else self._to_device({"ids": self.host_ids})["ids"]
        self._differentiate()

    def _first_pass(
        self, image_inputs: dict[str, Tensor], text_inputs: dict[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        if len(self) == 1:
            self._kept = self._embed(self._to_device({**image_inputs, **text_inputs}))
            return self._kept
        with torch.no_grad():
            if self._sides.image_trained == self._sides.text_trained:
                self._rng.append(RngState(self._device) if self._sides.image_trained else None)
                return self._embed(self._to_device({**image_inputs, **text_inputs}))
            # The locked side goes first and alone: the other one is replayed without it, from the state it started in.
            image = text = None
            if self._sides.text_trained:
                image, _ = self._embed(self._to_device(image_inputs))
                self._rng.append(RngState(self._device))
                _, text = self._embed(self._to_device(text_inputs))
            else:
                _, text = self._embed(self._to_device(text_inputs))
                self._rng.append(RngState(self._device))
                image, _ = self._embed(self._to_device(image_inputs))
            return image, text

    def _differentiate(self) -> None:
        assert self.image_embeds is not None
        assert self.text_embeds is not None
        wide = torch.promote_types(self.image_embeds.dtype, torch.float32)
        image = self.image_embeds.detach().to(wide).requires_grad_(self._sides.image_trained)
        text = self.text_embeds.detach().to(wide).requires_grad_(self._sides.text_trained)
        scalars = [
            None if value is None else value.detach().requires_grad_(value.requires_grad) for value in self._scalars()
        ]
        with torch.enable_grad():
            loss = self._loss(image.to(self.loss_dtype), text.to(self.loss_dtype), scalars[0], scalars[1], self.ids)
        leaves = [leaf for leaf in (image, text, *scalars) if leaf is not None and leaf.requires_grad]
        # A gradient at an embedding is about s / N, which float16 cannot hold for large N: it is computed times N.
        lift = 2.0 ** round(math.log2(self.rows)) if self.loss_dtype == torch.float16 else 1.0
        found: Sequence[Tensor | None] = ()
        if leaves:
            found = torch.autograd.grad(loss, leaves, torch.full_like(loss, lift), allow_unused=True)
        gradients = {id(leaf): None if grad is None else grad / lift for leaf, grad in zip(leaves, found, strict=True)}
        self._embed_gradients = tuple(
            None if (grad := gradients.get(id(leaf))) is None else grad.split(self._sizes) for leaf in (image, text)
        )
        self._scalar_gradients = tuple(gradients.get(id(leaf)) for leaf in scalars)
        self.loss = loss.detach()
        self.logit_scale = None if scalars[0] is None else scalars[0].detach()
        # One small tensor, read once a step: whether the image side, the text side and the loss are finite.
        finite = (torch.isfinite(value).all() for value in (self.image_embeds, self.text_embeds, self.loss))
        self._finite = torch.stack(list(finite))

    def _scalars(self) -> tuple[Tensor | None, Tensor | None]:
        return self._scale(), self._bias()

    def surrogate(self, index: int) -> Tensor | None:
        """Returns the scalar whose backward pass is micro-batch `index`'s share; None where there is nothing to train.

        The scale's and the bias's shares come with the last micro-batch.
        """
        terms = []
        for embeds, grads in zip(self._second_pass(index), self._embed_gradients, strict=True):
            if embeds is not None and grads is not None and embeds.requires_grad:
                terms.append((embeds.to(grads[index].dtype) * grads[index]).sum())
        if index == len(self) - 1:
            for value, grad in zip(self._scalars(), self._scalar_gradients, strict=True):
                if value is not None and grad is not None:
                    terms.append((value * grad).sum())
        return torch.stack(terms).sum() if terms else None

    def _second_pass(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        if self._kept is not None:
            return self._kept
        image_inputs, text_inputs = self._inputs[index]
        wanted = {
            **(image_inputs if self._sides.image_trained else {}),
            **(text_inputs if self._sides.text_trained else {}),
        }
        rng = self._rng[index]
        if not wanted or rng is None:
            return None, None
        with rng.replayed():
            return self._embed(self._to_device(wanted))

    def raise_if_not_finite(self) -> None:
        """Reads one small tensor from the device, and raises where an embedding or the loss was NaN or infinite.

        Raises:
            FloatingPointError: names the tower and the first row, or the loss and the scale; with several processes on
                each of them, what any of them found.
        """
        image_ok, text_ok, loss_ok = self._finite.tolist()
        if image_ok and text_ok and loss_ok:
            return
        found = [
            f"the {tower} gave a NaN or infinite embedding for {self._place(embeds)}"
            for ok, tower, embeds in (
                (image_ok, "vision tower", self.image_embeds),
                (text_ok, "text tower", self.text_embeds),
            )
            if not ok and embeds is not None
        ]
        if self.logit_scale is not None and not torch.isfinite(self.logit_scale).all():
            found.append(f"the logit scale is {self.logit_scale.item():g}")
        # A loss that is not finite is so on every process, so all of them come here.
        if not loss_ok and dist.is_available() and dist.is_initialized():
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found)
            found = [f"process {rank}: {text}" for rank, texts in enumerate(everyone) for text in texts]
        if not found and self.loss is not None:
            scale = "none" if self.logit_scale is None else f"{self.logit_scale.item():g}"
            found = [f"the loss is {self.loss.item():g} although all embeddings are finite; the logit scale is {scale}"]
        raise FloatingPointError("; ".join(found))

    def _place(self, embeds: Tensor) -> str:
        """The first row that is not finite, in the words of an error message."""
        row = int((~torch.isfinite(embeds).all(dim=1)).nonzero()[0])
        micro_batch, within = 0, row
        while within >= self._sizes[micro_batch]:
            within -= self._sizes[micro_batch]
            micro_batch += 1
        ids = "" if self.ids is None else f", ids {self.ids[row].tolist()}"
        return f"row {row} of the batch (micro-batch {micro_batch}, row {within}{ids})"


def _joined_ids(micro_batches: Sequence[Mapping[str, Any]]) -> Tensor | None:
    given = [batch["ids"] for batch in micro_batches if batch.get("ids") is not None]
    if not given:
        return None
    if len(given) != len(micro_batches):
        raise ValueError("'ids' must come with every micro-batch of a step or with none")
    return torch.cat([ids.reshape(len(ids), -1) for ids in given])
