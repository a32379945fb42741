"""A batch that fits in one chunk: the loss in two launches and a sum, its gradient in two more.

Up to some 8,192 pairs the GPU waits for the host; what counts is how little Python runs per step. The general path
makes running statistics, merges into them and finishes with small operations; here the kernels make, merge and finish.
"""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule
from hf_infcl.ops.triton.configs import TileConfig, interpreted
from hf_infcl.ops.triton.kernels_gradient import gradient_kernel
from hf_infcl.ops.triton.kernels_softmax import merge_kernel, statistics_kernel, weights_kernel
from hf_infcl.ops.triton.launch import on, operand
from hf_infcl.ops.triton.products import gain

LARGEST = 8192
# Up to here G is kept in float32 beside half-precision embeddings, and multiplied as the sum of two such numbers.
# Rounded to bfloat16 its errors may all point one way (n equal rows), and a small sum has too few to forgive one.
_LARGEST_SPLIT = 2048
_MERGE_ROWS, _MERGE_STEP = 32, 16
_MERGE = TileConfig(0, 0, 0, 4, 1)

# kernel and everything that its machine code depends on -> compiled kernel
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any, programs: int, key: tuple[Any, ...], values: tuple[Any, ...], switches: tuple[Any, ...], c: TileConfig
) -> None:
    """Launches a kernel; from the second time on without Triton's binding of arguments, most of a launch's cost.

    Args:
        key: the device, and what the values' types and alignments follow from.
        values: run-time arguments, in the kernel's order.
        switches: compile-time arguments, which follow them.
    """
    full_key = kernel, key, switches, c
    found = _compiled.get(full_key)
    with on(key[0]):
        if found is not None:
            found[(programs, 1, 1)](*values, *switches)
            return
        made = kernel[(programs,)](*values, *switches, num_warps=c.warps, num_stages=c.stages)
    if made is not None:  # the interpreter compiles nothing
        _compiled[full_key] = made


def suits(n: int, block_size: int | None) -> bool:
    """Whether a batch of n pairs goes this way."""
    return n <= (LARGEST if block_size is None else min(LARGEST, block_size))


def _tile(n: int, dtype: torch.dtype, precision: str, device: torch.device) -> TileConfig:
    if device.type != "cuda":
        return interpreted(n)
    if dtype == torch.float32:
        return TileConfig(64, 64, 32, 4, 3 if precision == "tf32" else 2)
    # Small tiles keep all multiprocessors busy; large ones read less.
    return TileConfig(128, 128, 64, 4, 3) if n > 2048 else TileConfig(64, 64, 64, 4, 3)


class _Plan:
    """What both passes need: operands, the grid, and the switches that the kernels share."""

    def __init__(self, images: Tensor, texts: Tensor, ids: Tensor | None, rule: Rule, precision: str):
        x, y = operand(images), operand(texts)
        n, depth = images.shape
        duplicates = "keep" if ids is None else rule.duplicates
        self.x, self.y, self.n, self.depth = x, y, n, depth
        self.ids = None if ids is None or duplicates == "keep" else ids.contiguous()
        self.config = c = _tile(n, images.dtype, precision, images.device)
        self.tiles_m, self.tiles_n = -(-n // c.block_m), -(-n // c.block_n)
        self.many, self.smooth = duplicates == "positive", rule.label_smoothing > 0
        id_columns = 0 if self.ids is None else self.ids.shape[1]
        self.switches = (id_columns, duplicates == "mask", self.many, self.smooth)
        self.precision = precision
        self.tile = c.block_m, c.block_n, c.block_k, c.group, precision, False, False
        self.operands = x, y, x.stride(0), y.stride(0), n, n, depth, 0, self.ids, self.ids
        # Triton compiles anew for a depth of 1, and for strides, depths and addresses that divide by 16. All other
        # tensors are operands, which do, or made here.
        ids_at = 0 if self.ids is None else self.ids.data_ptr() % 16
        traits = depth == 1, depth % 16, x.stride(0) % 16, y.stride(0) % 16, ids_at
        self.key = images.device, images.dtype, *traits


def softmax_forward(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    rule: Rule,
    precision: str,
    for_rows: bool,
    for_cols: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the statistics of rows and columns ((0,) where not wanted)."""
    plan = _Plan(images, texts, ids, rule, precision)
    n, device = plan.n, images.device
    fields, planes = 6 if plan.smooth else 4, 2 + 2 * plan.many + 2 * plan.smooth
    rows = torch.empty((fields, n) if for_rows else (0,), device=device)
    cols = torch.empty((fields, n) if for_cols else (0,), device=device)
    row_parts = torch.empty(planes * plan.tiles_n * n if for_rows else 0, device=device)
    col_parts = torch.empty(planes * plan.tiles_m * n if for_cols else 0, device=device)
    stats = (rows if for_rows else None, cols if for_cols else None)
    _launch(
        statistics_kernel,
        plan.tiles_m * plan.tiles_n,
        plan.key,
        (*plan.operands, scale, *stats, n, n, row_parts, col_parts, None, plan.tiles_m * plan.tiles_n),
        (for_rows, for_cols, *plan.switches, True, False, True, *plan.tile),
        plan.config,
    )
    blocks = -(-n // _MERGE_ROWS)
    row_blocks = blocks if for_rows else 0
    losses = torch.empty(blocks * (for_rows + for_cols), device=device)
    share, smoothing = 1.0 / ((for_rows + for_cols) * n), float(rule.label_smoothing)
    _launch(
        merge_kernel,
        blocks * (for_rows + for_cols),
        plan.key,
        (
            row_parts,
            col_parts,
            *stats,
            n,
            n,
            n,
            n,
            plan.tiles_m,
            plan.tiles_n,
            row_blocks,
            scale,
            losses,
            share,
            smoothing,
        ),
        (for_rows, for_cols, plan.many, plan.smooth, True, True, _MERGE_ROWS, _MERGE_STEP),
        _MERGE,
    )
    return losses.sum(), rows, cols


def softmax_backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    rule: Rule,
    precision: str,
    rows: Tensor | None,
    cols: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of images, texts and scale, None where not needed."""
    plan = _Plan(images, texts, ids, rule, precision)
    n, depth, tiles, c = plan.n, plan.depth, plan.tiles_m * plan.tiles_n, plan.config
    dtype, device = images.dtype, images.device
    need_x, need_y, need_scale = needs
    # Where dX is not computed, the scale's gradient comes from the tiles of G.
    from_tiles = need_scale and not need_x
    exact = dtype == torch.float32 and precision != "tf32"
    split = dtype != torch.float32 and n <= _LARGEST_SPLIT
    factor = gain(dtype)
    width = -(-n // 16) * 16  # rows of G start on 16-byte boundaries, and are read up to there
    g = torch.empty(n, width, device=device, dtype=torch.float32 if split else dtype)
    if width > n:
        g[:, n:].zero_()
    block_d = 16 if depth <= 16 else 32 if depth <= 32 else 64 if depth <= 64 else c.block_n
    product_tiles = plan.tiles_m * -(-depth // block_d)
    sums = torch.empty(tiles if from_tiles else product_tiles, device=device) if need_scale else None
    wanted = rows is not None, cols is not None
    smoothing = float(rule.label_smoothing)
    share = 1.0 / (sum(wanted) * n * factor)
    tile_sums, product_sums = (sums, None) if from_tiles else (None, sums)
    _launch(
        weights_kernel,
        tiles,
        (*plan.key, g.dtype),
        (*plan.operands, scale, rows, cols, n, n, g, width, tile_sums, None, tiles, smoothing, factor),
        (*wanted, *plan.switches, exact, from_tiles, False, False, *plan.tile),
        c,
    )
    out_x = torch.empty(n, depth, device=device, dtype=dtype) if need_x else None
    out_y = torch.empty(n, depth, device=device, dtype=dtype) if need_y else None
    if need_x or need_y:
        x, y = plan.x, plan.y
        if x.dtype == torch.float32:  # under the interpreter half-precision operands are widened
            split, g = False, g.float()
        strides = width, x.stride(0), y.stride(0)
        _launch(
            gradient_kernel,
            product_tiles * (need_x + need_y),
            plan.key,
            (g, x, y, out_x, out_y, *strides, n, depth, scale, grad, share, product_sums),
            (need_x, need_y, product_sums is not None, split, precision, c.block_m, block_d, c.block_k),
            c,
        )
    if sums is None:
        return out_x, out_y, None
    return out_x, out_y, sums.sum() * (grad * share) if from_tiles else sums.sum()
