"""Embedding a whole evaluation set, and what is computed from it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ring import World
from hf_infcl.trainer.accumulation import Embed, Sides


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
