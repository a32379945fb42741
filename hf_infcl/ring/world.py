"""Who takes part in a sweep: the processes of a group, or one alone."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """The processes that share one contrastive batch. ``group`` is None for a process alone."""

    group: Any = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Any) -> "World":
        """The world that a loss's ``group`` argument means.

        None is the default process group where one is initialised, else a process alone; False is alone always.

        Raises:
            ValueError: this process is not in the group.
        """
        if group is False:
            return cls()
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return cls()
            group = dist.group.WORLD
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("group: this process is not a member of the process group given")
        return cls() if size == 1 else cls(group, rank, size)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def following(self) -> int:
        """The rank that this one sends to."""
        return (self.rank + 1) % self.size

    @property
    def preceding(self) -> int:
        """The rank that this one receives from."""
        return (self.rank - 1) % self.size

    def owner(self, step: int) -> int:
        """Whose rows are on this rank at a step of the round; its own at step 0."""
        return (self.rank - step) % self.size

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds up a tensor over the processes, in place; every one gets the same bits. Alone: unchanged."""
        if not self.is_alone:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Every rank's rows, one rank after the other.

        Args:
            tensor: (n, ...) this rank's rows.
            sizes: the n of every rank.

        Returns:
            (sum of sizes, ...).
        """
        if self.is_alone:
            return tensor
        most = max(sizes)
        # Bytes: not every backend knows every dtype.
        own = tensor.contiguous().reshape(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)
        if len(tensor) < most:
            own = torch.cat([own, own.new_zeros(most - len(tensor), own.shape[1])])
        everyone = own.new_empty(self.size * most, own.shape[1])
        parts = everyone.split(most)
        dist.all_gather(list(parts), own, group=self.group)
        if min(sizes) < most:
            everyone = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return everyone.view(tensor.dtype).reshape(-1, *tensor.shape[1:])
