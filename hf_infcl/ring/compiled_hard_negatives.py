"""The hard-negative loss as an opaque operator, for `torch.compile`."""

import torch
from torch import Tensor

from hf_infcl.ops import Limits, accumulator_dtype
from hf_infcl.ring.hard_negatives import (
    HardNegativeCounts,
    HardNegativeSpec,
    hard_negative_backward,
    hard_negative_forward,
)
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.traversal import Banks


def _spec(k: int, limits: list[float | None], direction: str, block_size: int | None, engine: str) -> HardNegativeSpec:
    backend, precision = engine.split("/")
    return HardNegativeSpec("mask", 0.0, direction, block_size, False, backend, precision, k, Limits(*limits))


def _layout(images: Tensor, bank_images: Tensor | None) -> Layout:
    return Layout.alone(len(images), 0 if bank_images is None else len(bank_images))


@torch.library.custom_op("hf_infcl::hard_negative_forward", mutates_args=())
def _forward(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    bank_images: Tensor | None,
    bank_texts: Tensor | None,
    bank_ids: Tensor | None,
    k: int,
    absolute_margin: float | None,
    relative_margin: float | None,
    max_score: float | None,
    direction: str,
    block_size: int | None,
    engine: str,
) -> list[Tensor]:
    spec = _spec(k, [absolute_margin, relative_margin, max_score], direction, block_size, engine)
    banks = bank_images, bank_texts, bank_ids
    with torch.autocast(images.device.type, enabled=False):
        made = hard_negative_forward(images, texts, scale, ids, banks, spec, _layout(images, bank_images))
    return [made[0], made[1].clone(), *made[2:]]


@_forward.register_fake
def _(images, texts, scale, ids, bank_images, bank_texts, bank_ids, k, absolute, relative, most, direction, *_):  # type: ignore[no-untyped-def]
    n, dtype, spec = images.shape[0], accumulator_dtype(images.dtype), HardNegativeSpec(direction=direction)
    made = [images.new_empty((), dtype=dtype)]
    made.append(images.new_empty(len(HardNegativeCounts._fields), dtype=torch.float64))
    for wanted in (spec.for_rows, spec.for_cols):
        made.append(images.new_empty((n, k) if wanted else (0,), dtype=dtype))
        made.append(images.new_empty((n, k) if wanted else (0,), dtype=torch.int64 if wanted else dtype))
        made.append(images.new_empty((4, n) if wanted else (0,), dtype=dtype))
    return made


@torch.library.custom_op("hf_infcl::hard_negative_backward", mutates_args=())
def _backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    bank_images: Tensor | None,
    bank_texts: Tensor | None,
    bank_ids: Tensor | None,
    found: list[Tensor],
    k: int,
    absolute_margin: float | None,
    relative_margin: float | None,
    max_score: float | None,
    direction: str,
    block_size: int | None,
    engine: str,
    needs: list[bool],
) -> list[Tensor]:
    spec = _spec(k, [absolute_margin, relative_margin, max_score], direction, block_size, engine)
    banks = bank_images, bank_texts, bank_ids
    with torch.autocast(images.device.type, enabled=False):
        gradients = hard_negative_backward(
            grad,
            images,
            texts,
            scale,
            ids,
            banks,
            tuple(found),
            spec,
            _layout(images, bank_images),
            (needs[0], needs[1], needs[2]),
        )
    return [gradient for gradient in gradients if gradient is not None]


@_backward.register_fake
def _(grad, images, texts, scale, *rest):  # type: ignore[no-untyped-def]
    return [torch.empty_like(t).contiguous() for t, need in zip((images, texts, scale), rest[-1], strict=True) if need]


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    tensors, ctx.options = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *output[2:])


def _autograd(ctx, grads):  # type: ignore[no-untyped-def]
    needs = list(ctx.needs_input_grad[:3])
    saved = ctx.saved_tensors
    gradients = iter(_backward(grads[0], *saved[:7], list(saved[7:]), *ctx.options, needs))
    return *[next(gradients) if need else None for need in needs], *[None] * 11


_forward.register_autograd(_autograd, setup_context=_setup)


def compiled_hard_negative_loss(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: HardNegativeSpec
) -> tuple[Tensor, Tensor]:
    """`hf_infcl.ring.hard_negative_loss` as one opaque operator."""
    limits = spec.limits
    made = _forward(
        images,
        texts,
        scale,
        ids,
        *banks,
        spec.k,
        limits.absolute_margin,
        limits.relative_margin,
        limits.max_score,
        spec.direction,
        spec.block_size,
        f"{spec.backend}/{spec.precision}",
    )
    return made[0], made[1].detach()
