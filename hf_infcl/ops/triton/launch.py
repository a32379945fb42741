"""From sides to kernel arguments: operands, tile grids and the launches themselves."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from hf_infcl.ops.dispatch import triton_interpreted
from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.configs import TileConfig, chip, config, uses_tma

_ALIGNMENT = 16  # bytes: what the copy engine asks of a base address and a row stride

# kernel, device and everything that its machine code depends on -> compiled kernel
_compiled: dict[tuple[Any, ...], Any] = {}


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever its arguments are: makes theirs the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def _parameters(kernel: Any) -> tuple[tuple[str, str], ...]:
    """Name and kind of a kernel's parameters: "constant", "size" (any number, one code) or "value"."""
    return tuple(
        (p.name, "constant" if p.is_constexpr else "size" if p.do_not_specialize else "value") for p in kernel.params
    )


def _trait(value: Any) -> Any:
    """What Triton's specialisation sees of a run-time argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    if isinstance(value, float) or value is None:
        return type(value)
    return value.base.dtype, *value.block_shape  # a tensor descriptor


def launch(
    kernel: Any, programs: int, arguments: dict[str, Any], device: torch.device, warps: int, stages: int
) -> None:
    """Launches a kernel; from the second time on without Triton's binding of arguments, most of a launch's cost."""
    if triton_interpreted():
        kernel[(programs,)](**arguments, num_warps=warps, num_stages=stages)
        return
    parameters = _parameters(kernel)
    values = [arguments[name] for name, _ in parameters]
    traits = [
        value if kind == "constant" else None if kind == "size" else _trait(value)
        for value, (_, kind) in zip(values, parameters, strict=True)
    ]
    key = (kernel, device, warps, stages, *traits)
    with on(device):
        found = _compiled.get(key)
        if found is not None:
            found[(programs, 1, 1)](*values)
        else:
            _compiled[key] = kernel[(programs,)](*values, num_warps=warps, num_stages=stages)


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
    processors: int
    device: torch.device

    @classmethod
    def of(
        cls,
        kernel: str,
        rows: Side,
        cols: Side,
        rule: Rule,
        precision: str,
        chosen: TileConfig | None = None,
        related: Tensor | None = None,
    ) -> "Tiles":
        """The tiles of a chunk.

        Args:
            chosen: tiles of one's own; None: the table's.
            related: the chunk's cells of `hf_infcl.ops.triton.related`; None: the kernels compare the ids themselves.
        """
        x, y = operand(rows.embeds), operand(cols.embeds)
        (n_rows, depth), n_cols = x.shape, y.shape[0]
        device = x.device
        c = chosen or config(kernel, max(n_rows, n_cols), device, rows.embeds.dtype, precision)
        tiles_m, tiles_n = -(-n_rows // c.block_m), -(-n_cols // c.block_n)
        processors = chip(device.index or 0)[1] if device.type == "cuda" else 2
        tma = c.copy_engine and uses_tma(device)
        x_ids, y_ids = (rows.ids, cols.ids) if relates(rows, cols, rule) else (None, None)
        arguments = {
            "x": descriptor(x, c.block_m, c.block_k) if tma else x,
            "y": descriptor(y, c.block_n, c.block_k) if tma else y,
            "x_stride": x.stride(0),
            "y_stride": y.stride(0),
            "n_rows": n_rows,
            "n_cols": n_cols,
            "depth": depth,
            "shift": rows.offset - cols.offset,
            "x_ids": None if x_ids is None else x_ids.contiguous(),
            "y_ids": None if y_ids is None else y_ids.contiguous(),
            "related": related,
            "related_stride": 0 if related is None else related.stride(0),
            "n_programs": tiles_m * tiles_n,
            "ID_COLUMNS": 0 if x_ids is None else x_ids.shape[1],
            "CELLS": related is not None,
            "MASK": x_ids is not None and rule.duplicates == "mask",
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "BLOCK_K": c.block_k,
            "GROUP": c.group,
            "PRECISION": precision,
            "USE_TMA": tma,
        }
        return cls(arguments, c, tiles_m, tiles_n, processors, device)

    @property
    def has_ids(self) -> bool:
        return bool(self.arguments["ID_COLUMNS"] > 0)

    def weights(self, g: Tensor) -> Any:
        """A chunk of G as the kernels take it."""
        return descriptor(g, self.config.block_m, self.config.block_n // 2) if self.arguments["USE_TMA"] else g

    def repair(self) -> "Tiles":
        """The same tiles, for a launch that looks at all and computes few: with ids, which need twice the registers."""
        few = min(self.arguments["n_programs"], self.processors)
        wide = replace(self.config, warps=8) if self.config.block_m * self.config.block_n >= 2**14 else self.config
        return replace(self, config=wide, arguments={**self.arguments, "n_programs": few})

    def launch(self, kernel: Any, **more: Any) -> None:
        """Launches a kernel on these tiles; what it does not take is left out."""
        arguments = {**self.arguments, **more}
        taken = {name: arguments[name] for name in kernel.arg_names}
        launch(kernel, self.arguments["n_programs"], taken, self.device, self.config.warps, self.config.stages)


def relates(rows: Side, cols: Side, rule: Rule) -> bool:
    """Whether ids matter between two sides."""
    return rows.ids is not None and cols.ids is not None and rule.duplicates != "keep"


def descriptor(x: Tensor, rows: int, depth: int) -> Any:
    """A matrix as the bulk tensor copy engine takes it, in boxes of rows x depth."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, depth])


def cdiv(a: int, b: int) -> int:
    return triton.cdiv(a, b)
