"""Large chunks on Hopper, by the kernels in which two groups of warps take turns."""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule
from hf_infcl.ops.triton.configs import chip
from hf_infcl.ops.triton.launch import Tiles, cdiv, described, launch

# Rows and columns of what a group makes at a time, and the depth of a step: as in `kernels_pingpong`.
_BLOCK, _STEP, _QUARTER = 128, 64, 32
# Operations of a chunk's product from which the kernels are worth their descriptors and a program on every
# multiprocessor is worth starting.
_SMALLEST = 2**33
# At least so many boxes of shared memory are for loads under way.
_LEAST_STAGES = 4


class Room(NamedTuple):
    """What shared memory holds for a kernel's operands, in boxes of 16 KiB: rows of X or Y by a step of the depth.

    Attributes:
        boxes: so many fit beside what the epilogue keeps there. Those that no load under way needs keep X.
        stages: where X does not fit, so many are for loads under way: with fewer the tensor cores wait for L2, with
            more there is more to load. The steps of X that do not stay are loaded for every tile, like Y's.
        deepest: up to this depth the kernel was measured to be faster than the plain one.
    """

    boxes: int
    stages: int
    deepest: int


STATISTICS = Room(boxes=13, stages=6, deepest=1536)
WEIGHTS = Room(boxes=12, stages=8, deepest=2048)


def suits(tiles: Tiles, precise: bool, room: Room) -> bool:
    """Whether a chunk's first launch is made this way.

    Args:
        precise: every row is to keep its own maximum.
        room: `STATISTICS` or `WEIGHTS`.
    """
    x, device = tiles.x, tiles.device
    (n_rows, depth), n_cols = x.shape, tiles.y.shape[0]
    return (
        device.type == "cuda"
        and not precise
        and (tiles.related is not None or not tiles.has_ids)
        and x.dtype in (torch.bfloat16, torch.float16)
        and n_rows % _BLOCK == 0
        and n_cols % (2 * _BLOCK) == 0
        and depth <= room.deepest
        and 2 * n_rows * n_cols * depth >= _SMALLEST
        # Its warp-group products are this one architecture's.
        and chip(device.index or 0)[0] == (9, 0)
    )


@cache
def _boxes(width: int) -> Callable[..., Any]:
    """Gluon's descriptors of boxes of so many columns, by address, shape, strides and box."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=2 * width, element_bitwidth=16, rank=2)
    return lambda *described: TensorDescriptor(*described, layout)


def _descriptor(x: Tensor, width: int) -> Any:
    return described(_boxes(width), x, (_BLOCK, width))


def _programs(processors: int, pairs: int) -> int:
    """How many programs share the pairs of tiles: where it leaves few multiprocessors idle, a power of two.

    Chunks are cut at powers of two, so that programs then begin at the same columns and share what L2 holds of Y.
    """
    power = 1 << (processors.bit_length() - 1)
    return min(power if 20 * power >= 19 * processors else processors, pairs)


def _run(
    kernel: Any,
    tiles: Tiles,
    between: tuple[Any, ...],
    values: tuple[Any, ...],
    switches: tuple[Any, ...],
    room: Room,
    kind: Hashable,
) -> None:
    """Launches a kernel on the chunk that `tiles` describes.

    Args:
        between: run-time arguments between the operands and the sizes.
        values: run-time arguments that follow the map.
        switches: its own compile-time arguments.
        room: what shared memory holds.
    """
    x, y, related = tiles.x, tiles.y, tiles.related
    (n_rows, depth), n_cols = x.shape, y.shape[0]
    steps = cdiv(depth, _STEP)
    kept = steps if steps + _LEAST_STAGES <= room.boxes else room.boxes - room.stages
    programs = _programs(tiles.processors, n_rows // _BLOCK * (n_cols // (2 * _BLOCK)))
    stride = 0 if related is None else related.stride(0)
    launch(
        kernel,
        x.device,
        programs,
        (
            _descriptor(x, _STEP), _descriptor(y, _STEP), *between, n_rows, n_cols, tiles.shift, related, stride,
            *values, programs,
        ),
        (*switches, tiles.config.group, steps, kept, room.boxes - kept),
        warps=4,
        stages=1,
        kind=kind,
    )  # fmt: skip


def statistics(
    tiles: Tiles, rule: Rule, values: tuple[Any, ...], wanted: tuple[bool, bool], fresh: bool, kind: Hashable = None
) -> None:
    """The first launch of `hf_infcl.ops.triton.softmax.statistics`.

    Args:
        values: the scale and what follows it, as `statistics_kernel` takes them.
        wanted: whether rows and columns are.
        fresh: the chunk is all there is.
        kind: as `launch` takes it.
    """
    from hf_infcl.ops.triton.kernels_pingpong_statistics import statistics_pingpong_kernel

    by_place = tiles.masks and rule.label_smoothing == 0
    switches = (*wanted, tiles.has_ids, by_place, fresh)
    _run(statistics_pingpong_kernel, tiles, (), values, switches, STATISTICS, kind)


def weights(
    tiles: Tiles, rule: Rule, g: Tensor, values: tuple[Any, ...], wanted: tuple[bool, bool], kind: Hashable = None
) -> None:
    """The first launch of `hf_infcl.ops.triton.softmax.softmax_weights`; arguments as for `statistics`.

    Args:
        g: (n_rows, n_cols), receives G.
        values: scale, statistics and strides, where doubts go (None without ids), smoothing, gain.
    """
    from hf_infcl.ops.triton.kernels_pingpong_weights import weights_pingpong_kernel

    many = tiles.has_ids and rule.duplicates == "positive"
    switches = (*wanted, tiles.has_ids, tiles.masks, many, rule.label_smoothing > 0)
    between = (_descriptor(g, _QUARTER),)
    _run(weights_pingpong_kernel, tiles, between, values, switches, WEIGHTS, kind)
