"""The two products of the backward, G Y and G'X: the vendor's matrix product, with float32 results."""

import torch
from torch import Tensor

from hf_infcl.ops.sides import Side
from hf_infcl.ops.torch_tiles import matmul as float32_matmul

# Rows and columns of a chunk: 16,384 x 8,192 forward, where a chunk costs only its tiles' statistics (6 MiB) and its Y
# is to stay in L2 (16 MiB at a depth of 1,024), and 8,192^2 backward, where G takes 128 MiB in bfloat16.
_STATISTICS_CHUNK = (16384, 8192)
_WEIGHTS_CHUNK = (8192, 8192)

# |G| <= 2, and most of it is near 1/n: in float16 it is kept 2^14 times larger, clear of the subnormals below 6e-5.
_FLOAT16_GAIN = 2.0**14


def chunk_shape(device: torch.device, block_size: int | None, forward: bool = False) -> tuple[int, int]:
    """Rows and columns of a chunk, of the forward or the backward sweep; `block_size` sets both."""
    if block_size is not None:
        return block_size, block_size
    return _STATISTICS_CHUNK if forward else _WEIGHTS_CHUNK


def gain(dtype: torch.dtype) -> float:
    """Power of two that G is multiplied by."""
    return _FLOAT16_GAIN if dtype == torch.float16 else 1.0


def empty_weights(rows: Side, cols: Side) -> Tensor:
    """Room for a chunk of G; its rows start on 16-byte boundaries, whatever its width."""
    return empty_matrix(len(rows), len(cols), rows.embeds.dtype, rows.embeds.device)


def empty_matrix(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n_rows, n_cols) to be written, its rows on 16-byte boundaries.

    Between them are zeros: a product that reads on to the next boundary, and multiplies that by zero, meets no NaN.
    """
    step = 16 // dtype.itemsize
    room = torch.empty(n_rows, -(-n_cols // step) * step, device=device, dtype=dtype)
    if n_cols % step == 0:
        return room
    room[:, n_cols:].zero_()
    return room[:, :n_cols]


def matmul(a: Tensor, b: Tensor, precision: str, out: Tensor | None = None, add: bool = True) -> Tensor:
    """a @ b in float32, in `out` where that is given: added to what is there, or instead of it."""
    if a.device.type != "cuda" or a.dtype == torch.float32:
        into = out if add else None
        if precision == "tf32x3" and a.dtype == torch.float32:
            a_high, b_high = _high(a), _high(b)
            a_low, b_low = a - a_high, b - b_high
            into = float32_matmul(a_low, b_high, "tf32", into)
            into = float32_matmul(a_high, b_low, "tf32", into)
            made = float32_matmul(a_high, b_high, "tf32", into)
        else:
            made = float32_matmul(a, b, precision, into)
        return made if out is None or add else out.copy_(made)
    if out is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    if not add:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)


def _high(x: Tensor) -> Tensor:
    """The part of float32 numbers that tf32 holds exactly (10 bits of fraction)."""
    return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)
