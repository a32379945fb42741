"""The options of a sweep, as plain values that a compiled graph can carry."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops import Rule

DIRECTIONS = ("both", "image_to_text", "text_to_image")


@dataclass(frozen=True)
class Spec:
    """What a loss asks of a sweep; the arguments of the losses of the same names."""

    duplicates: str = "mask"
    label_smoothing: float = 0.0
    direction: str = "both"
    block_size: int | None = None
    group: Any = None
    backend: str = "auto"
    precision: str = "auto"

    @property
    def rule(self) -> Rule:
        return Rule(self.duplicates, self.label_smoothing)

    @property
    def for_rows(self) -> bool:
        """Whether images are anchors."""
        return self.direction != "text_to_image"

    @property
    def for_cols(self) -> bool:
        """Whether texts are anchors."""
        return self.direction != "image_to_text"

    @property
    def directions(self) -> int:
        return self.for_rows + self.for_cols


def agreement(loss: str, spec: Spec, embeds: Tensor, ids: Tensor | None, **differentiable: Tensor) -> dict[str, object]:
    """What the processes of a group have to agree on, by the names that the user knows.

    Args:
        loss: the function that was called.
        spec: its options.
        embeds: this process's embeddings, of which the dimension and the dtype matter.
        ids: (n, m) or None.
        differentiable: the tensors that may get a gradient, by name: who wants none takes no part in computing it.
    """
    wanted = [name for name, tensor in differentiable.items() if torch.is_grad_enabled() and tensor.requires_grad]
    return {
        "loss": loss,
        "embedding dimension": embeds.shape[1],
        "dtype": str(embeds.dtype).removeprefix("torch."),
        "columns of ids": None if ids is None else ids.shape[1],
        "duplicates": spec.duplicates,
        "direction": spec.direction,
        "label_smoothing": spec.label_smoothing,
        "backend": spec.backend,
        "precision": spec.precision,
        "gradients": ", ".join(wanted) or None,
    }
