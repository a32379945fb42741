"""From sides to kernel arguments: operands, tile grids and the launches themselves."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from hf_infcl.ops.dispatch import triton_interpreted
from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.configs import TileConfig, chip, config, uses_tma

_ALIGNMENT = 16  # bytes: what the copy engine asks of a base address and a row stride

_INTERPRETED = triton_interpreted()
# kernel, device and everything that its machine code depends on -> compiled kernel
_compiled: dict[tuple[Any, ...], Any] = {}
# kernel -> what takes from a launch's values (always several) those that Triton specialises on
_picks: dict[Any, "itemgetter[Any]"] = {}


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever its arguments are: makes theirs the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _trait(value: Any) -> Any:
    """What Triton's specialisation sees of a run-time argument."""
    kind = type(value)
    if kind is int:
        return value == 1, value % 16 == 0
    if kind is float or value is None:
        return kind
    if kind is Tensor or isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return value.base.dtype, *value.block_shape  # a tensor descriptor


def _traits(kernel: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The traits of the values that a kernel is specialised on."""
    pick = _picks.get(kernel.fn)
    if pick is None:
        looked_at = (i for i, one in enumerate(kernel.params) if not (one.is_constexpr or one.do_not_specialize))
        pick = _picks[kernel.fn] = itemgetter(*looked_at)
    return tuple(map(_trait, pick(values)))


def launch(
    kernel: Any,
    device: torch.device,
    programs: int,
    values: tuple[Any, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
    kind: Hashable = None,
) -> None:
    """Launches a kernel; from the second time on without Triton's binding of arguments, most of a launch's cost.

    Args:
        values: run-time arguments, in the kernel's order.
        constants: compile-time arguments, which follow them.
        kind: from which, with the constants, all follows that Triton specialises on in the values; None: they are
            looked at, most of what then is left.
    """
    if _INTERPRETED:
        kernel[(programs,)](*values, *constants, num_warps=warps, num_stages=stages)
        return
    # Triton's own hash of a kernel costs more than that of its function.
    key = (kernel.fn, device, warps, stages, constants, _traits(kernel, values) if kind is None else kind)
    found = _compiled.get(key)
    with on(device):
        if found is None:
            _compiled[key] = kernel[(programs,)](*values, *constants, num_warps=warps, num_stages=stages)
        else:
            stream = driver.active.get_current_stream(device.index)
            metadata = found.packed_metadata
            found.run(programs, 1, 1, stream, found.function, metadata, None, None, None, *values, *constants)


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


# What all kernels of the sweep take alike: the first of their run-time arguments, the last of their compile-time ones.
_VALUES = (
    "x", "y", "x_stride", "y_stride", "n_rows", "n_cols", "depth", "shift", "x_ids", "y_ids", "related",
    "related_stride",
)  # fmt: skip
_CONSTANTS = ("ID_COLUMNS", "CELLS", "MASK", "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP", "PRECISION", "USE_TMA")


@dataclass(frozen=True)
class Tiles:
    """A chunk cut into tiles.

    Attributes:
        x, y: the operands, as kernels can read them.
        shift: index of row 0 less that of column 0 in the global batch.
        x_ids, y_ids: ids where they matter.
        related: the chunk's cells of `hf_infcl.ops.triton.related`; None: the kernels compare the ids themselves.
        masks: rows that are the same are no candidates.
        uses_tma: operands and G go by the copy engine.
    """

    x: Tensor
    y: Tensor
    shift: int
    x_ids: Tensor | None
    y_ids: Tensor | None
    related: Tensor | None
    masks: bool
    precision: str
    config: TileConfig
    tiles_m: int
    tiles_n: int
    uses_tma: bool

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
        """
        x, y = operand(rows.embeds), operand(cols.embeds)
        n_rows, n_cols = x.shape[0], y.shape[0]
        device = x.device
        c = chosen or config(kernel, max(n_rows, n_cols), device, rows.embeds.dtype, precision)
        x_ids, y_ids = None, None
        if relates(rows, cols, rule):
            assert rows.ids is not None
            assert cols.ids is not None
            x_ids, y_ids = rows.ids.contiguous(), cols.ids.contiguous()
        masks = x_ids is not None and rule.duplicates == "mask"
        tiles_m, tiles_n = cdiv(n_rows, c.block_m), cdiv(n_cols, c.block_n)
        shift, tma = rows.offset - cols.offset, c.copy_engine and uses_tma(device)
        return cls(x, y, shift, x_ids, y_ids, related, masks, precision, c, tiles_m, tiles_n, tma)

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def processors(self) -> int:
        """Multiprocessors of the device."""
        return chip(self.device.index or 0)[1] if self.device.type == "cuda" else 2

    @property
    def has_ids(self) -> bool:
        return self.x_ids is not None

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """The run-time arguments that all kernels take first."""
        x, y, c, related = self.x, self.y, self.config, self.related
        (n_rows, depth), n_cols = x.shape, y.shape[0]
        return (
            descriptor(x, c.block_m, c.block_k) if self.uses_tma else x,
            descriptor(y, c.block_n, c.block_k) if self.uses_tma else y,
            x.stride(0), y.stride(0), n_rows, n_cols, depth, self.shift, self.x_ids, self.y_ids, related,
            0 if related is None else related.stride(0),
        )  # fmt: skip

    @cached_property
    def constants(self) -> tuple[Any, ...]:
        """The compile-time arguments that all kernels take last."""
        c = self.config
        columns = 0 if self.x_ids is None else self.x_ids.shape[1]
        shape = c.block_m, c.block_n, c.block_k, c.group
        return columns, self.related is not None, self.masks, *shape, self.precision, self.uses_tma

    @property
    def arguments(self) -> dict[str, Any]:
        """The shared arguments by name."""
        return dict(zip(_VALUES + _CONSTANTS, self.values + self.constants, strict=True))

    @property
    def by_pointers(self) -> "Tiles":
        """The same tiles without the copy engine: for launches that read few, for its descriptors cost the host."""
        mine = self.x, self.y, self.shift, self.x_ids, self.y_ids, self.related, self.masks, self.precision, self.config
        return Tiles(*mine, self.tiles_m, self.tiles_n, uses_tma=False)

    def weights(self, g: Tensor) -> Any:
        """A chunk of G as the kernels take it."""
        return descriptor(g, self.config.block_m, self.config.block_n // 2) if self.uses_tma else g

    def launch(
        self,
        kernel: Any,
        values: tuple[Any, ...],
        switches: tuple[Any, ...],
        repair: bool = False,
        kind: Hashable = None,
    ) -> None:
        """Launches a kernel on all tiles, or to look at all and compute few (`repair`).

        Args:
            values: its own run-time arguments; the number of programs follows them.
            switches: its own compile-time arguments.
            kind: as `launch` takes it.
        """
        c = self.config
        programs, warps = self.tiles_m * self.tiles_n, c.warps
        if repair:
            # Four programs a multiprocessor even out who meets how many; ids need twice the registers.
            programs = min(programs, 4 * self.processors)
            warps = 8 if c.block_m * c.block_n >= 2**14 else warps
        launch(
            kernel, self.device, programs, self.values + values + (programs,), switches + self.constants, warps,
            c.stages, kind,
        )  # fmt: skip


def relates(rows: Side, cols: Side, rule: Rule) -> bool:
    """Whether ids matter between two sides."""
    return rows.ids is not None and cols.ids is not None and rule.duplicates != "keep"


class _Address:
    """All that a tensor descriptor asks of its matrix. It keeps no memory, so that a descriptor can be kept."""

    def __init__(self, dtype: torch.dtype, pointer: int):
        self.dtype, self._pointer = dtype, pointer

    def data_ptr(self) -> int:
        return self._pointer


# Chunks come back in every step, mostly to the same addresses; a million pairs have a few hundred.
@lru_cache(maxsize=4096)
def _described(
    make: Callable[..., Any],
    dtype: torch.dtype,
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, int],
) -> Any:
    return make(_Address(dtype, pointer), list(shape), list(strides), list(box))


def described(make: Callable[..., Any], x: Tensor, box: tuple[int, int]) -> Any:
    """A matrix as the bulk tensor copy engine takes it, in boxes of (rows, columns), made once for each address.

    The matrix itself is the caller's to keep, until the kernel that reads it is launched.

    Args:
        make: makes the descriptor from an address, shape, strides and box.
    """
    return _described(make, x.dtype, x.data_ptr(), x.shape, x.stride(), box)


@cache
def _descriptors() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


def descriptor(x: Tensor, rows: int, depth: int) -> Any:
    """A matrix in boxes of rows x depth, for Triton's own kernels."""
    return described(_descriptors(), x, (rows, depth))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)  # Triton's own is made for kernels, and slow on the host
