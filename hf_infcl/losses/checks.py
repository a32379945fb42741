"""What can be checked of a loss's arguments without reading device memory: one clear `ValueError` each."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops import BACKENDS, PRECISIONS, Limits, accumulator_dtype
from hf_infcl.ring import DIRECTIONS

DUPLICATES = ("mask", "positive", "keep")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def check_embeddings(name: str, value: Any, least: int = 1) -> None:
    """An (n, d) floating-point tensor with n >= least and d >= 1."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor of shape (n, d), got {type(value).__name__}")
    if value.ndim != 2 or value.shape[0] < least or value.shape[1] < 1:
        raise ValueError(f"{name} must have shape (n, d) with n >= {least} and d >= 1, got {_shape(value)}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {value.layout}; convert it with .to_dense()")
    if value.dtype not in _DTYPES:
        raise ValueError(f"{name} must be float32, float16, bfloat16 or float64, got {value.dtype}")


def check_pairs(image_embeds: Any, text_embeds: Any) -> None:
    """Two (n, d) tensors whose rows are pairs."""
    check_embeddings("image_embeds", image_embeds)
    check_embeddings("text_embeds", text_embeds)
    if image_embeds.shape != text_embeds.shape:
        raise ValueError(
            "image_embeds and text_embeds must have the same shape (row i of one is the pair of row i of the other), "
            f"got {_shape(image_embeds)} and {_shape(text_embeds)}"
        )
    check_alike("text_embeds", text_embeds, "image_embeds", image_embeds)


def check_alike(name: str, value: Tensor, reference_name: str, reference: Tensor) -> None:
    """Same dtype and device as a reference."""
    if value.dtype != reference.dtype:
        raise ValueError(
            f"{name} must have the dtype of {reference_name}, got {value.dtype} and {reference.dtype}; "
            "convert one with .to(dtype)"
        )
    if value.device != reference.device:
        raise ValueError(f"{name} must be on the device of {reference_name}, got {value.device} and {reference.device}")


def scalar(name: str, value: Any, like: Tensor, *, positive: bool) -> Tensor:
    """A number or one-element tensor as a tensor on the embeddings' device; a tensor keeps its graph and dtype."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a one-element tensor, got shape {_shape(value)}")
        if not value.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {value.dtype}")
        return value.to(like.device)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number or a one-element tensor, got {type(value).__name__}")
    dtype = accumulator_dtype(like.dtype)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).tiny  # less than the latter may be taken for 0
    number: Any = value  # an int may be larger than any float, so it is compared before it is converted
    if not -largest <= number <= largest or (positive and number < smallest):
        raise ValueError(f"{name} must be finite in {dtype}{' and greater than 0' if positive else ''}, got {value}")
    return torch.full((), float(number), device=like.device, dtype=dtype)


def check_ids(name: str, ids: Any, embeds: Tensor) -> Tensor | None:
    """(n,) or (n, m) integers as (n, m) int64."""
    if ids is None:
        return None
    if not isinstance(ids, Tensor):
        raise ValueError(f"{name} must be an integer tensor of shape (n,) or (n, m), got {type(ids).__name__}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {ids.dtype}")
    if ids.ndim not in (1, 2) or len(ids) != len(embeds) or 0 in ids.shape[1:]:
        raise ValueError(f"{name} must have shape (n,) or (n, m) with n = {len(embeds)}, got {_shape(ids)}")
    if ids.device != embeds.device:
        raise ValueError(f"{name} must be on the device of the embeddings, got {ids.device} and {embeds.device}")
    return (ids[:, None] if ids.ndim == 1 else ids).to(torch.int64)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_block_size(value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"block_size must be an integer >= 1 or None, got {value!r}")


def check_options(
    *, block_size: Any, backend: Any, precision: Any, direction: Any = "both", duplicates: Any = "mask"
) -> None:
    """The options that the losses share."""
    check_choice("direction", direction, DIRECTIONS)
    check_choice("duplicates", duplicates, DUPLICATES)
    check_choice("backend", backend, BACKENDS)
    check_choice("precision", precision, PRECISIONS)
    check_block_size(block_size)


def check_label_smoothing(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"label_smoothing must be a number in [0, 1), got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def limits(absolute_margin: Any, relative_margin: Any, max_score: Any) -> Limits:
    """The limits against false negatives, each a finite number or None."""
    given = {"absolute_margin": absolute_margin, "relative_margin": relative_margin, "max_score": max_score}
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number or None, got {value!r}")
        if name != "max_score" and value < 0:
            raise ValueError(f"{name} must be at least 0, got {value!r}")
    return Limits(**given)
