"""Who takes part in a sweep: the processes of a group, or one alone."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


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
