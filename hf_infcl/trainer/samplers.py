"""Which rows make up an epoch's contrastive batches: the same for the same seed and data, whatever ran before."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """All rows of an epoch, shuffled by the seed and the epoch's number.

    The global random numbers are neither used nor advanced, so a resumed run sees the order of the uninterrupted one.

    Args:
        size: number of rows.
        seed: of the shuffling.
        shuffle: False for the data set's own order.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool = True):
        self.size, self.seed, self.shuffle, self.epoch = size, seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, lap: int = 0) -> list[int]:
        """The rows in this epoch's order; a further lap of the same epoch has an order of its own."""
        if not self.shuffle:
            return list(range(self.size))
        seed = np.random.SeedSequence((self.seed, self.epoch, lap)).generate_state(1, np.uint64)[0]
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(int(seed))).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())

    def __len__(self) -> int:
        return self.size


class ContrastiveBatchSampler(Sampler[list[int]]):
    """Cuts an epoch into contrastive batches, and yields the micro-batches of those that belong to one process.

    The contrastive batches are the same for any number of processes and any cut of the same size. Only whole ones are
    made up: rows left over at the end of an epoch that do not give every micro-batch a row, or fewer than `least_rows`,
    are left out, so that every optimizer step of the epoch is counted before it begins.

    Args:
        sampler: the order of the rows.
        batch_size: rows of a micro-batch.
        micro_batches: micro-batches of a contrastive batch, on each process.
        ranks: (this process, number of processes).
        least_rows: rows a contrastive batch needs.
        drop_last: whether a contrastive batch whose last micro-batch is short is left out as well.
    """

    def __init__(
        self,
        sampler: EpochSampler,
        batch_size: int,
        micro_batches: int,
        *,
        ranks: tuple[int, int] = (0, 1),
        least_rows: int = 1,
        drop_last: bool = False,
    ):
        self.sampler, self.batch_size, self.micro_batches = sampler, batch_size, micro_batches
        self.rank, self.world = ranks
        self.least_rows, self.drop_last = least_rows, drop_last

    @property
    def contrastive_batch_size(self) -> int:
        return self.batch_size * self.micro_batches * self.world

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def _sizes(self) -> list[int]:
        """Rows of each contrastive batch of an epoch."""
        whole, rest = divmod(len(self.sampler), self.contrastive_batch_size)
        sizes = [self.contrastive_batch_size] * whole
        every_micro_batch_has_a_row = rest > self.contrastive_batch_size - self.batch_size
        if every_micro_batch_has_a_row and rest >= self.least_rows and not self.drop_last:
            sizes.append(rest)
        return sizes

    @property
    def left_out(self) -> int:
        """Rows of each epoch that make no whole contrastive batch."""
        return len(self.sampler) - sum(self._sizes())

    def __len__(self) -> int:
        return len(self._sizes()) * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.sampler.order()
        start = 0
        for size in self._sizes():
            yield from self._cut(rows[start : start + size])
            start += size

    def _cut(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """The micro-batches of one contrastive batch that are this process's."""
        micro_batches = [list(rows[start : start + self.batch_size]) for start in range(0, len(rows), self.batch_size)]
        # Neighbours go to one process, so that ranks one after the other hold the batch in its order.
        yield from micro_batches[self.rank * self.micro_batches : (self.rank + 1) * self.micro_batches]


class NoDuplicatesBatchSampler(ContrastiveBatchSampler):
    """Contrastive batches in which no two rows share an id: no image and no caption stands in a batch twice.

    Rows are taken in the sampler's order; one that shares an id with its batch waits for the next. Every epoch has as
    many batches as the first one can fill; an epoch that runs short of them goes on with a fresh shuffle.

    Args:
        ids: gives the (n, m) integers of all rows, as they are in the sampler's epoch.
        sampler, batch_size, micro_batches, ranks: as in `ContrastiveBatchSampler`.

    Raises:
        ValueError: no contrastive batch without duplicates can be made up.
    """

    def __init__(
        self,
        ids: Callable[[], Tensor],
        sampler: EpochSampler,
        batch_size: int,
        micro_batches: int,
        *,
        ranks: tuple[int, int] = (0, 1),
    ):
        super().__init__(sampler, batch_size, micro_batches, ranks=ranks, drop_last=True)
        self._ids = ids
        batches, best = self._plan(sampler.order(), self._keys())
        self._count = len(batches)
        if self._count == 0:
            raise ValueError(
                f"batch_sampler='no_duplicates' finds no contrastive batch of {self.contrastive_batch_size} rows "
                f"without a repeated image or caption (the largest has {best} of {len(sampler)} rows); reduce "
                "per_device_train_batch_size or gradient_accumulation_steps"
            )

    def _keys(self) -> list[tuple[tuple[int, int], ...]]:
        # A value counts as an id only within its column.
        return [tuple(enumerate(row)) for row in self._ids().tolist()]

    def _plan(self, order: Sequence[int], keys: Sequence[tuple[tuple[int, int], ...]]) -> tuple[list[list[int]], int]:
        """Greedy batches over `order`, and the size of the batch that could not be filled at the end."""
        batches: list[list[int]] = []
        waiting = deque(order)
        while waiting:
            batch: list[int] = []
            taken: set[tuple[int, int]] = set()
            passed: list[int] = []
            while waiting and len(batch) < self.contrastive_batch_size:
                row = waiting.popleft()
                if taken.isdisjoint(keys[row]):
                    batch.append(row)
                    taken.update(keys[row])
                else:
                    passed.append(row)
            waiting.extendleft(reversed(passed))
            if len(batch) < self.contrastive_batch_size:
                return batches, len(batch)
            batches.append(batch)
        return batches, self.contrastive_batch_size

    def _sizes(self) -> list[int]:
        return [self.contrastive_batch_size] * self._count

    def __iter__(self) -> Iterator[list[int]]:
        keys = self._keys()
        made, lap = 0, 0
        while made < self._count:
            batches, _ = self._plan(self.sampler.order(lap), keys)
            # An epoch whose captions, drawn anew, fill no batch at all would go on for ever.
            if not batches:
                raise RuntimeError("batch_sampler='no_duplicates' finds no batch in this epoch, unlike in the first")
            for batch in batches[: self._count - made]:
                yield from self._cut(batch)
                made += 1
            lap += 1
