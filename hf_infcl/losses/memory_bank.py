"""A first-in, first-out queue of detached embeddings that widens the choice of negatives."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_infcl.losses import checks
from hf_infcl.ring.layout import Layout


class MemoryBank(nn.Module):
    """The embeddings of recent batches, kept as further negatives for the next ones.

    Entries are pairs (image and text, with ids where given), oldest first. They are candidates for the batch's rows and
    never anchors, and they get no gradient. Where the bank is full, the oldest make room.

    Several processes share one bank of ``size`` entries: each holds those that it pushed itself, and together they hold
    the last ``size`` pairs of all, in the order of steps and, within a step, of ranks. That is what one process would
    hold that pushed every rank's rows at once.

    Source: MoCo (arXiv 1911.05722), section 3.2; Cross-Batch Memory (arXiv 1912.06798).

    Args:
        size: most entries held, by all processes of the group together.
        dim: dimension d of the embeddings.
        dtype: of the embeddings; default float32.
        device: where they are held.
        group: the processes that share the bank; None: the default group where one is initialised; False: this process
            alone.

    Raises:
        ValueError: ``size`` or ``dim`` below 1, or a push that does not fit.

    Example:
        >>> bank = MemoryBank(4, 2)
        >>> bank.push(torch.ones(3, 2), torch.ones(3, 2))
        >>> len(bank)
        3
    """

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Any = None,
    ):
        super().__init__()
        self._images: Tensor
        self._texts: Tensor
        self._ids: Tensor | None
        checks.check_count("size", size)
        checks.check_count("dim", dim)
        self.size, self.dim, self.group = size, dim, group
        self.register_buffer("_images", torch.zeros(0, dim, dtype=dtype, device=device))
        self.register_buffer("_texts", torch.zeros(0, dim, dtype=dtype, device=device))
        self.register_buffer("_ids", None)
        # The number, counted over all processes since the first push, of the first pair of every run of consecutive
        # pairs held here, and the run's length; oldest first.
        self._runs: list[tuple[int, int]] = []
        self._pushed = 0  # pairs pushed so far by all processes

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, dtype={self._images.dtype}, filled={self.filled}"

    def __len__(self) -> int:
        return self._images.shape[0]

    @property
    def filled(self) -> int:
        """Entries held by all processes together."""
        return min(self._pushed, self.size)

    @property
    def image_embeds(self) -> Tensor:
        """(len, d) image embeddings held by this process, oldest first."""
        return self._images

    @property
    def text_embeds(self) -> Tensor:
        """(len, d) text embeddings held by this process, oldest first."""
        return self._texts

    @property
    def ids(self) -> Tensor | None:
        """(len, m) ids held by this process, or None."""
        return self._ids

    @torch.no_grad()
    def push(self, image_embeds: Tensor, text_embeds: Tensor, ids: Tensor | None = None) -> None:
        """Append (n, d) pairs, detached, in order; with more than ``size`` of them the last ones stay.

        Every process of the group has to call it, with as many pairs as it has.

        Raises:
            ValueError: the pairs or their ids do not fit; the bank is left as it was.
        """
        # A process may have no pair to add where others have some.
        checks.check_embeddings("image_embeds", image_embeds, least=0)
        checks.check_embeddings("text_embeds", text_embeds, least=0)
        expected = (len(image_embeds), self.dim)
        for name, value in (("image_embeds", image_embeds), ("text_embeds", text_embeds)):
            if tuple(value.shape) != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(value.shape)}")
        ids = checks.check_ids("ids", ids, image_embeds)
        if len(self) and (ids is None) != (self._ids is None):
            raise ValueError("ids must come with every push or with none")
        if ids is not None and self._ids is not None and ids.shape[1] != self._ids.shape[1]:
            raise ValueError(f"ids must have {self._ids.shape[1]} columns as those in the bank, got {ids.shape[1]}")
        layout = Layout.of(self.group, len(image_embeds), 0, self._images.device, {"size of the bank": self.size})
        self._runs.append((self._pushed + layout.offset(layout.world.rank), len(image_embeds)))
        self._pushed += layout.rows
        self._images = self._kept(self._images, image_embeds)
        self._texts = self._kept(self._texts, text_embeds)
        if ids is not None:
            old = ids[:0].to(self._images.device) if self._ids is None else self._ids
            self._ids = self._kept(old, ids)
        oldest = self._pushed - self.size
        runs = [(max(first, oldest), first + n - max(first, oldest)) for first, n in self._runs]
        self._runs = [(first, n) for first, n in runs if n > 0]

    def _kept(self, held: Tensor, new: Tensor) -> Tensor:
        """What stays of the entries held and the new ones: those among the last ``size`` of all processes."""
        oldest = self._pushed - self.size
        gone = sum(min(max(oldest - first, 0), n) for first, n in self._runs)
        return torch.cat([held[gone:], new[max(gone - len(held), 0) :].to(held)])

    def get_extra_state(self) -> dict[str, Any]:
        return {"size": self.size, "runs": list(self._runs), "pushed": self._pushed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["size"] != self.size:
            raise ValueError(f"size must be that of the bank saved, {state['size']}, got {self.size}")
        self._runs, self._pushed = [tuple(run) for run in state["runs"]], state["pushed"]

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        # Room for as many entries as were saved.
        for name in ("_images", "_texts"):
            if (saved := state_dict.get(prefix + name)) is not None:
                setattr(self, name, getattr(self, name).new_zeros(len(saved), self.dim))
        if (saved := state_dict.get(prefix + "_ids")) is not None:
            self._ids = torch.zeros_like(saved, device=self._images.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_bank(bank: Any, embeds: Tensor, ids: Tensor | None) -> None:
    """A memory bank that fits the batch.

    Raises:
        ValueError: it is none, or its dimension, dtype, device or ids do not fit.
    """
    if bank is None:
        return
    if not isinstance(bank, MemoryBank):
        raise ValueError(f"bank must be a MemoryBank or None, got {type(bank).__name__}")
    if len(bank) == 0:
        return
    if bank.dim != embeds.shape[1]:
        raise ValueError(f"bank holds embeddings of dimension {bank.dim}, the batch has {embeds.shape[1]}")
    checks.check_alike("the embeddings in bank", bank.image_embeds, "image_embeds", embeds)
    columns, bank_columns = (None if x is None else x.shape[1] for x in (ids, bank.ids))
    if columns != bank_columns:
        raise ValueError(
            f"ids and the ids in bank must have the same number of columns (None without ids), got {columns} and "
            f"{bank_columns}; push the bank's entries with ids of the same kind"
        )
