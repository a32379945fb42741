"""A first-in, first-out queue of detached embeddings that widens the choice of negatives."""

from typing import Any

import torch
from torch import Tensor, nn


class MemoryBank(nn.Module):
    """The embeddings of recent batches, kept as further negatives for the next ones.

    Entries are pairs (image and text, with ids where given). They are candidates for the batch's rows and never
    anchors, and they get no gradient. The oldest are overwritten when the bank is full.

    Source: MoCo (arXiv 1911.05722), section 3.2; Cross-Batch Memory (arXiv 1912.06798).

    Args:
        size: most entries held.
        dim: dimension d of the embeddings.
        dtype: of the embeddings; default float32.
        device: where they are held.

    Raises:
        ValueError: ``size`` or ``dim`` below 1, or a push that does not fit.

    Example:
        >>> bank = MemoryBank(4, 2)
        >>> bank.push(torch.ones(3, 2), torch.ones(3, 2))
        >>> len(bank)
        3
    """

    def __init__(
        self, size: int, dim: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ):
        super().__init__()
        self._images: Tensor
        self._texts: Tensor
        self._ids: Tensor | None
        options: dict[str, Any] = {"size": size, "dim": dim}
        for name, value in options.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.size, self.dim = size, dim
        self.register_buffer("_images", torch.zeros(size, dim, dtype=dtype, device=device))
        self.register_buffer("_texts", torch.zeros(size, dim, dtype=dtype, device=device))
        self.register_buffer("_ids", None)
        self._filled = 0  # entries held
        self._next = 0  # where the next entry goes

    def __len__(self) -> int:
        return self._filled

    @property
    def image_embeds(self) -> Tensor:
        """(len, d) image embeddings held."""
        return self._images[: self._filled]

    @property
    def text_embeds(self) -> Tensor:
        """(len, d) text embeddings held."""
        return self._texts[: self._filled]

    @property
    def ids(self) -> Tensor | None:
        """(len, m) ids held, or None."""
        return None if self._ids is None else self._ids[: self._filled]

    @torch.no_grad()
    def push(self, image_embeds: Tensor, text_embeds: Tensor, ids: Tensor | None = None) -> None:
        """Append (n, d) pairs, detached, in order; with more than ``size`` of them the last ones stay."""
        expected = (len(image_embeds), self.dim)
        for name, value in (("image_embeds", image_embeds), ("text_embeds", text_embeds)):
            if tuple(value.shape) != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(value.shape)}")
        if ids is not None:
            ids = ids.reshape(len(ids), -1).to(torch.int64)
            if len(ids) != len(image_embeds):
                raise ValueError(f"ids must have one row for each of the {len(image_embeds)} pairs, got {len(ids)}")
        if len(self) and (ids is None) != (self._ids is None):
            raise ValueError("ids must come with every push or with none")
        if ids is not None and self._ids is None:
            self._ids = torch.zeros(self.size, ids.shape[1], dtype=torch.int64, device=self._images.device)
        n = min(len(image_embeds), self.size)
        where = torch.arange(self._next, self._next + n, device=self._images.device) % self.size
        self._images[where] = image_embeds[-n:].to(self._images)
        self._texts[where] = text_embeds[-n:].to(self._texts)
        if ids is not None and self._ids is not None:
            self._ids[where] = ids[-n:].to(self._ids.device)
        self._next = (self._next + n) % self.size
        self._filled = min(self._filled + n, self.size)

    def get_extra_state(self) -> dict[str, int]:
        return {"filled": self._filled, "next": self._next}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self._filled, self._next = state["filled"], state["next"]

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        if (saved := state_dict.get(prefix + "_ids")) is not None and self._ids is None:
            self._ids = torch.zeros_like(saved, device=self._images.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
