"""Tile shapes by chip, dtype and precision: a table, so that nothing is timed inside a training step."""

from dataclasses import dataclass
from functools import cache

import torch

from hf_infcl.ops.dispatch import triton_interpreted


@dataclass(frozen=True)
class TileConfig:
    """How one kernel cuts its chunk.

    Attributes:
        block_m, block_n, block_k: rows, columns and depth of a tile.
        warps, stages: Triton's num_warps and num_stages.
        group: how many rows of tiles are walked together for the sake of L2.
        copy_engine: operands and G by bulk tensor copies where the chip has them. Their descriptors cost the host some
            10 us a launch.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    copy_engine: bool = True


@cache
def chip(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def uses_tma(device: torch.device) -> bool:
    """Whether kernels read by the bulk tensor copy engine of Hopper and later, which the interpreter has not."""
    return device.type == "cuda" and chip(device.index or 0)[0] >= (9, 0) and not triton_interpreted()


def interpreted(n: int) -> TileConfig:
    """Tiles for the interpreter: small ones for small tests, so that they meet many tiles and every ragged edge."""
    assert triton_interpreted()
    return TileConfig(16, 32, 64, 1, 1, group=2) if n <= 100 else TileConfig(64, 128, 128, 1, 1, group=2)


def config(kernel: str, n: int, device: torch.device, dtype: torch.dtype, precision: str) -> TileConfig:
    """The tile configuration of a kernel (``"statistics"`` or ``"weights"``; the sigmoid loss runs on the same two).

    Args:
        n: rows or columns of the chunk, whichever are more.
        device, dtype, precision: of the embeddings.
    """
    if device.type != "cuda":
        return interpreted(n)
    if dtype == torch.float32:
        if precision == "tf32":
            return TileConfig(128, 128, 32, 8, 3)
        return TileConfig(64, 64, 32, 4, 2) if precision == "ieee" else TileConfig(64, 128, 32, 8, 2)
    if chip(device.index or 0)[0] >= (9, 0):
        # Two programs a multiprocessor: one multiplies while the other takes exponentials (476 TFLOP/s forward on an
        # H200 at depth 512; 256 x 128 tiles, which read less and leave room for one program, 408).
        return TileConfig(128, 128, 64, 4, 3)
    # A100 and its kin: 164 KiB of shared memory, no copy engine, operands by cp.async.
    return TileConfig(128, 128, 32, 4, 4)
