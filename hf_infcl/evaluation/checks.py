"""What evaluation accepts, and the words in which it refuses the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ring.world import World


def as_embeddings(value: Any, name: str) -> Tensor:
    """Embeddings as a tensor of shape (n, d), n and d at least 1.

    Raises:
        ValueError: another shape, no rows, or not floating point.
    """
    tensor = torch.as_tensor(value)
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected (n, d) with n >= 1 and d >= 1")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}; expected a floating point dtype")
    return tensor.detach()


def check_same_space(left: Tensor, right: Tensor, left_name: str, right_name: str) -> None:
    """Both sides have one width and one device.

    Raises:
        ValueError: they have not.
    """
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"{left_name} has width {left.shape[1]} and {right_name} {right.shape[1]}; expected the same")
    if left.device != right.device:
        raise ValueError(f"{left_name} is on {left.device} and {right_name} on {right.device}; expected one device")


def as_ids(value: Any, n: int, name: str, device: torch.device) -> Tensor:
    """Ids as an int64 tensor of shape (n, m).

    Raises:
        ValueError: another length or shape, or not integers.
    """
    tensor = torch.as_tensor(value, device=device)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} is {tensor.dtype}; expected integers")
    if tensor.ndim not in (1, 2) or tensor.shape[0] != n or 0 in tensor.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({n},) or ({n}, m)")
    return tensor.long().reshape(n, -1)


def check_ks(ks: Sequence[int]) -> list[int]:
    """The k of recall@k, ascending and without repeats.

    Raises:
        ValueError: none, or one that is no integer >= 1.
    """
    given: Any = ks
    values: list[Any] = list(given) if isinstance(given, Iterable) else []
    if not values or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in values):
        raise ValueError(f"ks is {ks!r}; expected a sequence of integers of at least 1, such as (1, 5, 10)")
    return sorted(set(values))


def check_finite(embeds: Tensor, name: str, world: World = World()) -> None:  # noqa: B008 - frozen
    """Every embedding is a number: NaN compares as neither better nor worse, and a metric of it would look like a
    result.

    Raises:
        ValueError: on every process; names the side, and each process with its first row.
    """
    bad = ~embeds.isfinite().all(dim=1)
    # How many, and which is the first; argmax of none is row 0, which no one looks at.
    first = bad.int().argmax() if len(bad) else bad.sum()
    found = world.gather(torch.stack([bad.sum(), torch.full_like(first, len(bad)), first])[None], (1,) * world.size)
    places = [
        f"{count} of {n} embeddings{'' if world.is_alone else f' on rank {rank}'} are NaN or infinite, the first in "
        f"row {row}"
        for rank, (count, n, row) in enumerate(found.tolist())
        if count
    ]
    if places:
        raise ValueError(f"{name}: " + "; ".join(places))
