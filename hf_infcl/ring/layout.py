"""Where every process's rows stand in the global batch; what the processes tell each other before a sweep."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hf_infcl.ring.world import World

GATHER_BELOW = "HF_INFCL_GATHER_BELOW"
# Gathering costs memory for all texts and their gradients (48 MiB at 16,384 rows of 512 in bf16, below the scratch
# of one chunk) and saves W - 1 launches of small blocks, which cost about a millisecond each below 4,096 rows a rank.
_GATHER_BELOW_DEFAULT = 16_384
_TAG = 7_310  # of the messages below, so that they meet no message of the caller's own


@dataclass(frozen=True)
class Layout:
    """The rows of the global batch, rank after rank; the bank's rows follow after all of them, rank after rank.

    Attributes:
        world: the processes.
        batch_sizes: rows of the batch on each rank.
        bank_sizes: rows of the memory bank on each rank.
        gathers: whether all texts are gathered on every rank, instead of travelling.
    """

    world: World
    batch_sizes: tuple[int, ...]
    bank_sizes: tuple[int, ...]
    gathers: bool = False

    @cached_property
    def rows(self) -> int:
        """Rows of the global batch."""
        return sum(self.batch_sizes)

    def offset(self, rank: int) -> int:
        """Global index of a rank's first row."""
        return sum(self.batch_sizes[:rank])

    def bank_offset(self, rank: int) -> int:
        """Global index of the first bank entry of a rank."""
        return self.rows + sum(self.bank_sizes[:rank])

    @classmethod
    def alone(cls, rows: int, bank_rows: int = 0) -> "Layout":
        """The layout of a process that shares its batch with no other."""
        return cls(World(), (rows,), (bank_rows,))

    @classmethod
    def of(cls, group: Any, rows: int, bank_rows: int, device: torch.device, options: Mapping[str, object]) -> "Layout":
        """Exchanges sizes with the processes of a group, and makes sure that they are about to do the same.

        Everything is host data that travels over the host: no device is waited for.

        Args:
            group: a loss's ``group`` argument.
            rows: this process's rows of the batch.
            bank_rows: this process's rows of the memory bank.
            device: where the embeddings are.
            options: by the name that the user knows, what has to be the same on every rank.

        Raises:
            ValueError: the ranks disagree (on every rank; shows each one's value), or the group cannot carry tensors
                of the device.
            RuntimeError: another process is gone; names its rank.
        """
        world = World.of(group)
        if world.is_alone:
            return cls.alone(rows, bank_rows)
        _check_device(world, device)
        limit = gather_limit()
        options = {**options, "device": device.type, GATHER_BELOW: limit}
        digest = hashlib.blake2b(repr(sorted(options.items())).encode(), digest_size=7).digest()
        headers = exchange(world, torch.tensor([rows, bank_rows, int.from_bytes(digest, "big")]))
        if any(header[2] != headers[0][2] for header in headers):
            _raise_disagreement(world, options)
        sizes, bank_sizes = tuple(h[0] for h in headers), tuple(h[1] for h in headers)
        return cls(world, sizes, bank_sizes, gathers=sum(sizes) + sum(bank_sizes) < limit)


def gather_limit() -> int:
    """Below how many rows (batch and bank, over all ranks) the texts are gathered instead of travelling.

    Raises:
        ValueError: the environment variable HF_INFCL_GATHER_BELOW is not a whole number >= 0.
    """
    value = os.environ.get(GATHER_BELOW, str(_GATHER_BELOW_DEFAULT))
    if not value.isdecimal():
        raise ValueError(f"the environment variable {GATHER_BELOW} must be a whole number of rows >= 0, got {value!r}")
    return int(value)


def exchange(world: World, header: Tensor) -> list[list[int]]:
    """Every rank's header, by rank.

    Each pair of ranks talks directly, so that a process that is gone is known by its rank.

    Args:
        header: (k,) int64 on the CPU, k the same on every rank.

    Raises:
        RuntimeError: names the first rank that could not be heard.
    """
    group = _host_group(world)
    headers = [header if rank == world.rank else torch.empty_like(header) for rank in range(world.size)]
    others = [(world.rank + step) % world.size for step in range(1, world.size)]
    sends = [dist.isend(header, group=group, group_dst=rank, tag=_TAG) for rank in others]
    receipts = [(rank, dist.irecv(headers[rank], group=group, group_src=rank, tag=_TAG)) for rank in others]
    for rank, work in receipts:
        wait_for(work, rank, world)
    for rank, send in zip(others, sends, strict=True):
        wait_for(send, rank, world)
    return [values.tolist() for values in headers]


def wait_for(work: Any, rank: int, world: World) -> None:
    """Waits for a message from or to a rank.

    Raises:
        RuntimeError: it ended or did not answer within the process group's timeout.
    """
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} of {world.size} ended or stopped answering while rank {world.rank} waited for it; what "
            f"happened there is in its own output ({error})"
        ) from error


# A group by the group whose processes it serves: NCCL carries nothing that lies on the host.
_host_groups: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()


def _carries(world: World, device_type: str) -> bool:
    # "cpu:gloo,cuda:nccl"
    return any(entry.partition(":")[0] == device_type for entry in dist.get_backend_config(world.group).split(","))


def _host_group(world: World) -> Any:
    if _carries(world, "cpu"):
        return world.group
    if world.group not in _host_groups:
        ranks = dist.get_process_group_ranks(world.group)
        _host_groups[world.group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _host_groups[world.group]


def _check_device(world: World, device: torch.device) -> None:
    config = dist.get_backend_config(world.group)
    backends = dict(entry.split(":") for entry in config.split(","))
    # Gloo accepts CUDA tensors in some collectives, but sends none.
    if device.type not in backends or (device.type == "cuda" and backends["cuda"] == "gloo"):
        instead = "nccl" if device.type == "cuda" else "gloo"
        raise ValueError(
            f"group: its backend is {config!r}, which cannot send tensors that are on {device.type}; initialise the "
            f"process group with {instead!r}"
        )


def _raise_disagreement(world: World, options: dict[str, object]) -> None:
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, options, group=_host_group(world))
    names = list(dict.fromkeys(key for one in everyone for key in one))
    lines = []
    for name in names:
        values = [one.get(name, "(not given)") for one in everyone]
        if any(value != values[0] for value in values):
            lines.append(f"{name}: " + ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values)))
    raise ValueError("the processes of the group must agree, and do not: " + "; ".join(lines))
