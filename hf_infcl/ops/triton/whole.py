"""A batch that fits in one chunk: the whole loss in three launches, its gradient in five.

Up to some 8,192 pairs the GPU waits for the host; what counts is how little Python runs per step. The general path
makes running statistics, merges into them and finishes with small operations; here the kernels make, merge and finish.
"""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.configs import TileConfig
from hf_infcl.ops.triton.kernels_softmax import gradient_kernel, merge_kernel, statistics_kernel, weights_kernel
from hf_infcl.ops.triton.launch import operand
from hf_infcl.ops.triton.products import empty_weights, gain, matmul

LARGEST = 8192
_MERGE_ROWS, _MERGE_STEP = 32, 16

# kernel and everything its machine code depends on -> compiled kernel
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(kernel: Any, programs: int, values: tuple[Any, ...], switches: tuple[Any, ...], config: TileConfig) -> None:
    """Launches a kernel; from the second time on without Triton's binding of arguments, most of a launch's cost.

    Args:
        values: run-time arguments, in the kernel's order.
        switches: compile-time arguments, which follow them.
    """
    traits = tuple(
        value.dtype if isinstance(value, Tensor) else value % 16 == 0 if isinstance(value, int) else type(value)
        for value in values
    )
    device = next(value for value in values if isinstance(value, Tensor)).device
    key = (kernel, device, traits, switches, config)
    found = _compiled.get(key)
    if found is not None:
        found[(programs, 1, 1)](*values, *switches)
        return
    made = kernel[(programs,)](*values, *switches, num_warps=config.warps, num_stages=config.stages)
    if device.type == "cuda":
        _compiled[key] = made


def suits(n: int, block_size: int | None) -> bool:
    """Whether a batch of n pairs goes this way."""
    return n <= (LARGEST if block_size is None else min(LARGEST, block_size))


def _tile(n: int, dtype: torch.dtype, precision: str, device: torch.device) -> TileConfig:
    if device.type != "cuda":
        return TileConfig(16, 32, 32, 1, 1)
    if dtype == torch.float32:
        return TileConfig(64, 64, 32, 4, 3 if precision == "tf32" else 2)
    # Small tiles keep all multiprocessors busy; large ones read less.
    return TileConfig(128, 128, 64, 4, 3) if n > 2048 else TileConfig(64, 64, 64, 4, 3)


class _Plan:
    """What both passes need: operands, the grid, and the switches that the kernels share."""

    def __init__(self, images: Tensor, texts: Tensor, ids: Tensor | None, rule: Rule, precision: str):
        self.x, self.y = operand(images), operand(texts)
        self.n, self.depth = images.shape
        self.ids = ids.contiguous() if ids is not None and rule.duplicates != "keep" else None
        self.config = _tile(self.n, images.dtype, precision, images.device)
        self.tiles_m, self.tiles_n = -(-self.n // self.config.block_m), -(-self.n // self.config.block_n)
        self.id_columns = 0 if self.ids is None else self.ids.shape[1]
        self.many = self.ids is not None and rule.duplicates == "positive"
        self.mask = self.ids is not None and rule.duplicates == "mask"
        self.smooth = rule.label_smoothing > 0
        self.precision = precision

    @property
    def operands(self) -> tuple[Any, ...]:
        x, y, n = self.x, self.y, self.n
        return x, y, x.stride(0), y.stride(0), n, n, self.depth, 0, self.ids, self.ids

    @property
    def tile(self) -> tuple[Any, ...]:
        c = self.config
        return c.block_m, c.block_n, c.block_k, c.group, self.precision, False, False


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
    n, tiles = plan.n, plan.tiles_m * plan.tiles_n
    fields = 6 if plan.smooth else 4
    rows, cols = (
        torch.empty((fields, n) if wanted else (0,), device=images.device, dtype=torch.float32)
        for wanted in (for_rows, for_cols)
    )
    planes = (2 + 2 * plan.many + 2 * plan.smooth) * n
    blocks = -(-n // _MERGE_ROWS)
    programs = blocks * (for_rows + for_cols)
    sizes = planes * plan.tiles_n * for_rows, planes * plan.tiles_m * for_cols, programs
    row_parts, col_parts, losses = torch.empty(sum(sizes), device=images.device, dtype=torch.float32).split(sizes)
    stats = (rows if for_rows else None, cols if for_cols else None)
    _launch(
        statistics_kernel,
        tiles,
        (*plan.operands, scale, *stats, n, n, row_parts, col_parts, None, tiles),
        (for_rows, for_cols, plan.id_columns, plan.mask, plan.many, plan.smooth, True, False, True, *plan.tile),
        plan.config,
    )
    share = 1.0 / ((for_rows + for_cols) * n)
    row_blocks = blocks if for_rows else 0
    smoothing = float(rule.label_smoothing)
    _launch(
        merge_kernel,
        programs,
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
        TileConfig(0, 0, 0, 4, 1),
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
    n, depth, tiles = plan.n, plan.depth, plan.tiles_m * plan.tiles_n
    dtype = images.dtype
    # Where dX is not computed, the scale's gradient comes from the tiles.
    from_tiles = needs[2] and not needs[0]
    g = empty_weights(Side(images), Side(texts))
    sums = torch.empty(tiles if from_tiles else n, device=g.device, dtype=torch.float32) if needs[2] else None
    exact = dtype == torch.float32 and precision != "tf32"
    wanted = rows is not None, cols is not None
    smoothing, factor = float(rule.label_smoothing), gain(dtype)
    _launch(
        weights_kernel,
        tiles,
        (
            *plan.operands,
            scale,
            rows,
            cols,
            n,
            n,
            g,
            g.stride(0),
            sums if from_tiles else None,
            tiles,
            smoothing,
            factor,
        ),
        (*wanted, plan.id_columns, plan.mask, plan.many, plan.smooth, exact, from_tiles, False, False, *plan.tile),
        plan.config,
    )
    share = 1.0 / (sum(wanted) * n * factor)
    d_x = matmul(g, texts, precision) if needs[0] else None
    d_y = matmul(g.T, images, precision) if needs[1] else None
    out_x = torch.empty((n, depth), device=g.device, dtype=dtype) if needs[0] else None
    out_y = torch.empty((n, depth), device=g.device, dtype=dtype) if needs[1] else None
    if needs[0] or needs[1]:
        products = d_x if needs[0] else d_y, d_y if needs[1] else d_x
        outs = out_x if needs[0] else out_y, out_y if needs[1] else out_x
        want_sum = needs[2] and needs[0]
        _launch(
            gradient_kernel,
            n * (needs[0] + needs[1]),
            (*products, plan.x, plan.x.stride(0), *outs, n, n, depth, scale, grad, share, sums if want_sum else None),
            (needs[0], needs[1], want_sum, max(16, 1 << (depth - 1).bit_length())),
            TileConfig(0, 0, 0, 4, 1),
        )
    d_scale = None
    if sums is not None:
        d_scale = sums.sum()
        if from_tiles:
            d_scale = d_scale * grad * share
    return out_x, out_y, d_scale
