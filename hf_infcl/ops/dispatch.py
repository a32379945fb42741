"""Which backend computes a sweep: decided from what is known before launching, never by trying."""

import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

BACKENDS = ("auto", "triton", "torch")
PRECISIONS = ("auto", "tf32", "tf32x3", "ieee")
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


def triton_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU (TRITON_INTERPRET=1, read by Triton when it is first imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that ``backend`` means for tensors of a device and dtype: ``"triton"`` or ``"torch"``.

    ``"auto"`` takes Triton on a CUDA device of compute capability 8.0 or newer for float32, float16 and bfloat16,
    PyTorch everywhere else.

    Raises:
        ValueError: the name is unknown, or ``"triton"`` cannot run there.

    Example:
        >>> resolve_backend("auto", torch.device("cpu"), torch.float32)
        'torch'
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    on_cuda = device.type == "cuda"
    if backend == "auto":
        able = on_cuda and dtype in _TRITON_DTYPES and triton_installed() and _is_recent(device)
        return "triton" if able else "torch"
    if backend == "triton":
        if not triton_installed():
            raise ValueError("backend='triton' needs the package triton, which is not installed; use backend='torch'")
        if dtype not in _TRITON_DTYPES:
            raise ValueError(f"backend='triton' takes float32, float16 or bfloat16 embeddings, got {dtype}")
        if not on_cuda and not (device.type == "cpu" and triton_interpreted()):
            raise ValueError(
                f"backend='triton' needs CUDA tensors (or TRITON_INTERPRET=1 on a CPU), got tensors on {device}; "
                "use backend='torch' or 'auto'"
            )
    return backend


def resolve_precision(precision: str, dtype: torch.dtype) -> str:
    """How float32 products are computed; ``"auto"`` is ``"ieee"``. Half precision ignores it."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    return "ieee" if precision == "auto" or dtype != torch.float32 else precision


@cache
def tiles(backend: str) -> ModuleType:
    """The module whose functions compute a chunk on a resolved backend."""
    if backend == "triton":
        from hf_infcl.ops import triton

        return triton
    from hf_infcl.ops import torch_tiles

    return torch_tiles
