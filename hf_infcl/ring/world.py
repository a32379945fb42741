"""Who takes part in a sweep: the processes of a group, or one alone. All that they say to each other is said here."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# Of the messages below, so that they meet no messages of the caller's own.
_HEADER_TAG, PAYLOAD_TAG, YIELD_TAG = 7_310, 7_311, 7_312


@dataclass(frozen=True)
class World:
    """The processes that share one contrastive batch. ``group`` is None for a process alone."""

    group: Any = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Any) -> "World":
        """The world that a loss's ``group`` argument means.

        None is the default process group where one is initialised, else a process alone; False is alone always. A world
        is itself.

        Raises:
            ValueError: this process is not in the group.
        """
        if isinstance(group, World):
            return group
        if group is False:
            return cls()
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return cls()
            group = dist.group.WORLD
        is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
        if is_member and not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group must be a process group, None or False, got {group!r}")
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if is_member else (-1, 0)
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

    def scatter(self, tensor: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Sends every rank its rows, and gets its own from all.

        Args:
            tensor: (sum of sizes, ...) rows for all ranks, one rank after the other.
            sizes: rows of each rank.

        Returns:
            By rank that it comes from, (n, ...) for this one's n rows.
        """
        own = sizes[self.rank]
        received = tensor.new_empty(self.size * own, *tensor.shape[1:])
        dist.all_to_all_single(received, tensor.contiguous(), [own] * self.size, list(sizes), group=self.group)
        return received.split(own)

    def post(self, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int) -> Callable[[], None]:
        """Starts sending to the following rank and receiving from the preceding one.

        Args:
            send: contiguous tensors, not to be written to meanwhile. Empty ones are passed over.
            receive: contiguous tensors of the shapes and dtypes that the preceding rank sends.
            tag: what kind of messages these are.

        Returns:
            A function that waits until what was to be received is there, and what was sent may be written to.
        """
        messages: list[tuple[Callable[..., Any], Tensor, int]] = [
            (dist.isend, tensor, self.following) for tensor in send if tensor.numel()
        ]
        messages += [(dist.irecv, tensor, self.preceding) for tensor in receive if tensor.numel()]
        if not messages:
            return lambda: None
        with self._naming(*dict.fromkeys((self.following, self.preceding))):
            works = dist.batch_isend_irecv(
                [dist.P2POp(do, tensor, group=self.group, group_peer=peer, tag=tag) for do, tensor, peer in messages]
            )
        # NCCL makes one piece of work of all messages.
        peers = [peer for _, _, peer in messages] if len(works) == len(messages) else [self.preceding]

        def wait() -> None:
            for peer, work in zip(peers, works, strict=True):
                self._wait_for(work, peer)
            # Held until here, as the memory of what is under way must not be given to others.
            works.clear()
            messages.clear()

        return wait

    def headers(self, header: Tensor) -> list[list[int]]:
        """Every rank's header, by rank, over the host: no device is waited for.

        Each pair of ranks talks directly, so that a process that is gone is known by its rank.

        Args:
            header: (k,) int64 on the CPU, k the same on every rank.

        Raises:
            RuntimeError: names the first rank that could not be heard.
        """
        group = self._host_group()
        headers = [header if rank == self.rank else torch.empty_like(header) for rank in range(self.size)]
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        works: list[tuple[int, Any]] = []
        for rank in others:
            with self._naming(rank):
                works.append((rank, dist.isend(header, group=group, group_dst=rank, tag=_HEADER_TAG)))
                works.append((rank, dist.irecv(headers[rank], group=group, group_src=rank, tag=_HEADER_TAG)))
        for rank, work in works:
            self._wait_for(work, rank)
        return [values.tolist() for values in headers]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, over the host."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self._host_group())
        return everyone

    def check_device(self, device: torch.device) -> None:
        """That the group can send tensors of a device.

        Raises:
            ValueError: it cannot.
        """
        backends = _backends(self.group)
        # Gloo accepts CUDA tensors in some collectives, but sends none.
        if device.type not in backends or (device.type == "cuda" and backends["cuda"] == "gloo"):
            raise ValueError(
                f"group: its backend is {dist.get_backend_config(self.group)!r}, which cannot send tensors that are on "
                f"{device.type}; initialise the process group with {'nccl' if device.type == 'cuda' else 'gloo'!r}"
            )

    def _wait_for(self, work: Any, rank: int) -> None:
        if work is not None:
            with self._naming(rank):
                work.wait()

    @contextmanager
    def _naming(self, *ranks: int) -> Iterator[None]:
        """Says whose end a failed message means: gloo does not, whether it fails when posted or when waited for."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {' or '.join(map(str, ranks))} of {self.size} ended or stopped answering while rank {self.rank} "
                f"waited for it; what happened there is in its own output ({error})"
            ) from error

    def _host_group(self) -> Any:
        """A group of the same processes that carries what lies on the host, as NCCL does not."""
        backends = _backends(self.group)
        if "cpu" in backends:
            return self.group
        if self.group not in _host_groups:
            ranks = dist.get_process_group_ranks(self.group)
            # A process that does not answer is to be reported as soon as the group's owner would have it.
            timeout = self.group._get_backend(torch.device(next(iter(backends)))).options._timeout
            _host_groups[self.group] = dist.new_group(
                ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
            )
        return _host_groups[self.group]


_host_groups: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()


def _backends(group: Any) -> dict[str, str]:
    # "cpu:gloo,cuda:nccl"
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
