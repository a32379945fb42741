"""When the warp-specialised kernels for Hopper run, and their launches.

Off unless the environment variable HF_INFCL_HOPPER is 1: in their present form they have been compiled for the chip
and not yet run on it (docs/concepts/kernels.md says what was).
"""

import os
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.configs import TileConfig, chip
from hf_infcl.ops.triton.launch import Tiles, on

BLOCK, _BLOCK_K, _STAGES = 128, 64, 4
# A block of X stays in shared memory: 128 rows of 512 take 128 KiB of its 227, and four stages of Y the next 64.
_DEEPEST = 512
# Below about four tiles for each of 132 multiprocessors, filling and draining costs more than overlapping saves.
_FEWEST_TILES = 528

# The same tiles in plain Triton, for the few that the shared exponential does not serve.
REPAIR = TileConfig(BLOCK, BLOCK, _BLOCK_K, 8, 3, group=1)


@cache
def _available(index: int) -> bool:
    # Gluon came with 3.4; its warp specialisation has had this form since 3.6.
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return chip(index)[0] == (9, 0) and version >= (3, 6)


def suits(rows: Side, cols: Side, rule: Rule) -> bool:
    """Whether a chunk goes to these kernels: a big chunk of half precision on Hopper, one positive a row."""
    x = rows.embeds
    if os.environ.get("HF_INFCL_HOPPER") != "1":
        return False
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16) or x.shape[1] > _DEEPEST:
        return False
    if rule.duplicates == "positive" and rows.ids is not None:
        return False
    tiles_m, tiles_n = -(-len(rows) // BLOCK), -(-len(cols) // BLOCK)
    return tiles_n >= 2 and tiles_m * tiles_n >= _FEWEST_TILES and _available(x.device.index or 0)


def _descriptor(x: Tensor, height: int, width: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([height, width], dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [height, width], layout)


def _arguments(tiles: Tiles) -> dict[str, Any]:
    given = tiles.arguments
    x, y = given["x"].base, given["y"].base
    return {
        "x_desc": _descriptor(x, BLOCK, _BLOCK_K),
        "y_desc": _descriptor(y, BLOCK, _BLOCK_K),
        **{name: given[name] for name in ("n_rows", "n_cols", "shift", "x_ids", "y_ids", "ID_COLUMNS")},
        "BLOCK": BLOCK,
        "BLOCK_K": _BLOCK_K,
        "STEPS": -(-given["depth"] // _BLOCK_K),
        "STAGES": _STAGES,
        "num_warps": 4,
    }


def _programs(tiles: Tiles) -> tuple[int]:
    return (min(tiles.tiles_m * tiles.tiles_n, tiles.processors),)


def launch_statistics(tiles: Tiles, **more: Any) -> None:
    from hf_infcl.ops.triton.kernels_hopper import hopper_statistics_kernel

    with on(tiles.device):
        hopper_statistics_kernel[_programs(tiles)](**_arguments(tiles), **more)


def launch_weights(tiles: Tiles, g: Tensor, **more: Any) -> None:
    from hf_infcl.ops.triton.kernels_hopper import hopper_weights_kernel

    with on(tiles.device):
        hopper_weights_kernel[_programs(tiles)](**_arguments(tiles), g_desc=_descriptor(g, BLOCK, BLOCK // 2), **more)
