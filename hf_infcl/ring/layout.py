"""Where every process's rows stand in the global batch; what the processes tell each other before a sweep."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hf_infcl.ring.world import World

GATHER_BELOW = "HF_INFCL_GATHER_BELOW"
BF16_GRADIENTS = "HF_INFCL_BF16_GRADIENTS"
# Gathering saves W - 1 rounds of small blocks, which wait for the host, and costs memory for all texts and their
# float32 gradients (384 MiB at this many rows of 512 in bf16; a rank of eight that hops holds 305). By measurement
# (benchmarks/results/ring_nvidia_h200.json) it is faster up to 131,072 rows for 8 processes, about as fast for 2 and 4.
_GATHER_BELOW_DEFAULT = 2**17 + 1


@dataclass(frozen=True)
class Layout:
    """The rows of the global batch, rank after rank; the bank's rows follow after all of them, rank after rank.

    Attributes:
        world: the processes.
        batch_sizes: rows of the batch on each rank.
        bank_sizes: rows of the memory bank on each rank.
        gathers: whether all texts are gathered on every rank, instead of travelling.
        rounds_gradients: whether half-precision texts' gradients travel in bfloat16 instead of float32.
    """

    world: World
    batch_sizes: tuple[int, ...]
    bank_sizes: tuple[int, ...]
    gathers: bool = False
    rounds_gradients: bool = False

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
        world.check_device(device)
        limit, rounds = gather_limit(), os.environ.get(BF16_GRADIENTS, "0") == "1"
        options = {**options, "device": device.type, GATHER_BELOW: limit, BF16_GRADIENTS: rounds}
        digest = hashlib.blake2b(repr(sorted(options.items())).encode(), digest_size=7).digest()
        headers = world.headers(torch.tensor([rows, bank_rows, int.from_bytes(digest, "big")]))
        if any(header[2] != headers[0][2] for header in headers):
            _raise_disagreement(world, options)
        sizes, bank_sizes = tuple(h[0] for h in headers), tuple(h[1] for h in headers)
        gathers = sum(sizes) + sum(bank_sizes) < limit
        return cls(world, sizes, bank_sizes, gathers, rounds)


def gather_limit() -> int:
    """Below how many rows (batch and bank, over all ranks) the texts are gathered instead of travelling.

    Raises:
        ValueError: the environment variable HF_INFCL_GATHER_BELOW is not a whole number >= 0.
    """
    value = os.environ.get(GATHER_BELOW, str(_GATHER_BELOW_DEFAULT))
    if not value.isdecimal():
        raise ValueError(f"the environment variable {GATHER_BELOW} must be a whole number of rows >= 0, got {value!r}")
    return int(value)


def _raise_disagreement(world: World, options: dict[str, object]) -> None:
    everyone = world.gather_objects(options)
    names = list(dict.fromkeys(key for one in everyone for key in one))
    lines = []
    for name in names:
        values = [one.get(name, "(not given)") for one in everyone]
        if any(value != values[0] for value in values):
            lines.append(f"{name}: " + ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values)))
    raise ValueError("the processes of the group must agree, and do not: " + "; ".join(lines))
