"""The chunk loop: the one place where a block is cut into pieces that fit in scratch memory."""

from collections.abc import Iterator
from typing import Any

import torch

from hf_infcl.ops.sides import Side

# Torch path on a CPU: one float32 chunk of 512 x 2,048 is 4 MiB, so that the few arrays an epilogue makes of it stay
# within the last-level cache. Elsewhere (a CUDA device on the reference path) larger products run nearer the peak.
_CPU_CHUNK = (512, 2048)
_DEVICE_CHUNK = (4096, 4096)


def chunk_shape(device: torch.device, block_size: int | None, forward: bool = False) -> tuple[int, int]:
    """Rows and columns of a chunk on the PyTorch path, the same forward and backward; `block_size` sets both."""
    if block_size is not None:
        return block_size, block_size
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def parts(n: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover range(n)."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def chunks(rows: Side, cols: Side, shape: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """(row part, column part) of every chunk of a block, columns innermost."""
    for row_part in parts(len(rows), shape[0]):
        for col_part in parts(len(cols), shape[1]):
            yield row_part, col_part


class Pieces:
    """Slices of one thing, or of None, each made once.

    A block takes the same views over and over, and beside an accelerator it is the host that makes them.
    """

    def __init__(self, whole: Any):
        self._whole = whole
        self._made: dict[tuple[int, int], Any] = {}

    def __getitem__(self, part: slice) -> Any:
        key = part.start, part.stop
        if key not in self._made:
            self._made[key] = None if self._whole is None else self._whole[part]
        return self._made[key]
