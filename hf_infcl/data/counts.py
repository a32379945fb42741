"""Counting in a loader's worker processes, read in the main one."""

from __future__ import annotations

import torch
from torch.utils.data import get_worker_info

# More workers than this share a row, where two adding at the same moment may lose a count.
_WORKERS = 64


class WorkerCounts:
    """Named counters in shared memory, a row for each worker so that none waits for another.

    Example:
        >>> counts = WorkerCounts("seen")
        >>> counts.add(seen=3)
        >>> counts["seen"]
        3
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._values = torch.zeros((_WORKERS, len(names)), dtype=torch.int64).share_memory_()

    def add(self, **amounts: int) -> None:
        """Add to counters, in this process's row."""
        worker = get_worker_info()
        mine = self._values[0 if worker is None else 1 + worker.id % (_WORKERS - 1)]
        mine += torch.tensor([amounts.get(name, 0) for name in self._names])

    def __getitem__(self, name: str) -> int:
        """The sum over all processes so far."""
        return int(self._values[:, self._names.index(name)].sum())
