"""From sides to kernel arguments: operands, tile grids and the launches themselves."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.configs import TileConfig, chip, config, uses_tma

_ALIGNMENT = 16  # bytes: what the copy engine asks of a base address and a row stride


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever its arguments are: makes theirs the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def operand(embeds: Tensor) -> Tensor:
    """The matrix itself where a kernel can read it as it lies, else a copy with padded rows."""
    if embeds.device.type != "cuda":
        embeds = embeds.float()  # Triton's interpreter multiplies bfloat16 as if it were integers
    row, unit = embeds.stride()
    size = embeds.element_size()
    aligned = embeds.data_ptr() % _ALIGNMENT == 0 and row * size % _ALIGNMENT == 0
    if unit == 1 and aligned and row >= embeds.shape[1]:
        return embeds
    n, depth = embeds.shape
    step = _ALIGNMENT // size
    copy = embeds.new_zeros(n, -(-depth // step) * step)
    copy[:, :depth] = embeds
    return copy[:, :depth]


@dataclass(frozen=True)
class Tiles:
    """A chunk cut into tiles: what all kernels of the sweep take alike."""

    arguments: dict[str, Any]
    config: TileConfig
    tiles_m: int
    tiles_n: int
    programs: int
    processors: int
    device: torch.device

    @classmethod
    def of(
        cls, kernel: str, rows: Side, cols: Side, rule: Rule, precision: str, chosen: TileConfig | None = None
    ) -> "Tiles":
        x, y = operand(rows.embeds), operand(cols.embeds)
        (n_rows, depth), n_cols = x.shape, y.shape[0]
        device = x.device
        c = chosen or config(kernel, max(n_rows, n_cols), device, rows.embeds.dtype, precision)
        tiles_m, tiles_n = -(-n_rows // c.block_m), -(-n_cols // c.block_n)
        processors = chip(device.index or 0)[1] if device.type == "cuda" else 2
        programs = min(tiles_m * tiles_n, processors) if c.persistent else tiles_m * tiles_n
        tma = uses_tma(device)
        related = rows.ids is not None and cols.ids is not None and rule.duplicates != "keep"
        arguments = {
            "x": _descriptor(x, c.block_m, c.block_k) if tma else x,
            "y": _descriptor(y, c.block_n, c.block_k) if tma else y,
            "x_stride": x.stride(0),
            "y_stride": y.stride(0),
            "n_rows": n_rows,
            "n_cols": n_cols,
            "depth": depth,
            "shift": rows.offset - cols.offset,
            "x_ids": rows.ids.contiguous() if related and rows.ids is not None else None,
            "y_ids": cols.ids.contiguous() if related and cols.ids is not None else None,
            "n_programs": programs,
            "ID_COLUMNS": rows.ids.shape[1] if related and rows.ids is not None else 0,
            "MASK": related and rule.duplicates == "mask",
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "BLOCK_K": c.block_k,
            "GROUP": c.group,
            "PRECISION": precision,
            "USE_TMA": tma,
            "FLATTEN": c.persistent,
        }
        return cls(arguments, c, tiles_m, tiles_n, programs, processors, device)

    def weights(self, g: Tensor) -> Any:
        """A chunk of G as the kernels take it."""
        return _descriptor(g, self.config.block_m, self.config.block_n // 2) if self.arguments["USE_TMA"] else g

    def repair(self) -> "Tiles":
        """The same tiles, for a launch that looks at all and computes few."""
        few = min(self.tiles_m * self.tiles_n, self.processors)
        return replace(self, programs=few, arguments={**self.arguments, "n_programs": few, "FLATTEN": False})

    def launch(self, kernel: Any, **more: Any) -> None:
        with on(self.device):
            kernel[(self.programs,)](
                **self.arguments, **more, num_warps=self.config.warps, num_stages=self.config.stages
            )


def _descriptor(x: Tensor, rows: int, depth: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, depth])


def cdiv(a: int, b: int) -> int:
    return triton.cdiv(a, b)
