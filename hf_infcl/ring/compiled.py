"""The losses as opaque operators, for `torch.compile`: one node in the graph instead of an unrolled chunk loop."""

import torch
from torch import Tensor

from hf_infcl.ops import accumulator_dtype
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.sigmoid import sigmoid_backward, sigmoid_forward
from hf_infcl.ring.softmax import softmax_backward, softmax_forward
from hf_infcl.ring.spec import Spec
from hf_infcl.ring.traversal import Banks


def _spec(duplicates: str, label_smoothing: float, direction: str, block_size: int | None, engine: str) -> Spec:
    backend, precision = engine.split("/")
    return Spec(duplicates, label_smoothing, direction, block_size, False, backend, precision)


def _layout(images: Tensor, bank_images: Tensor | None = None) -> Layout:
    return Layout.alone(len(images), 0 if bank_images is None else len(bank_images))


@torch.library.custom_op("hf_infcl::softmax_forward", mutates_args=())
def _softmax_forward(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    bank_images: Tensor | None,
    bank_texts: Tensor | None,
    bank_ids: Tensor | None,
    duplicates: str,
    label_smoothing: float,
    direction: str,
    block_size: int | None,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = _spec(duplicates, label_smoothing, direction, block_size, engine)
    with torch.autocast(images.device.type, enabled=False):
        banks = bank_images, bank_texts, bank_ids
        return softmax_forward(images, texts, scale, ids, banks, spec, _layout(images, bank_images))


@_softmax_forward.register_fake
def _(images, texts, scale, ids, bank_images, bank_texts, bank_ids, duplicates, label_smoothing, direction, *_):  # type: ignore[no-untyped-def]
    spec = Spec(duplicates, label_smoothing, direction)
    dtype, fields = accumulator_dtype(images.dtype), 6 if label_smoothing else 4
    row, col = (
        images.new_empty((fields, images.shape[0]) if wanted else (0,), dtype=dtype)
        for wanted in (spec.for_rows, spec.for_cols)
    )
    return images.new_empty((), dtype=dtype), row, col


@torch.library.custom_op("hf_infcl::softmax_backward", mutates_args=())
def _softmax_backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    bank_images: Tensor | None,
    bank_texts: Tensor | None,
    bank_ids: Tensor | None,
    rows: Tensor,
    cols: Tensor,
    duplicates: str,
    label_smoothing: float,
    direction: str,
    block_size: int | None,
    engine: str,
    needs: list[bool],
) -> list[Tensor]:
    spec = _spec(duplicates, label_smoothing, direction, block_size, engine)
    banks = bank_images, bank_texts, bank_ids
    with torch.autocast(images.device.type, enabled=False):
        gradients = softmax_backward(
            grad,
            images,
            texts,
            scale,
            ids,
            banks,
            rows,
            cols,
            spec,
            _layout(images, bank_images),
            (needs[0], needs[1], needs[2]),
        )
    return [gradient for gradient in gradients if gradient is not None]


@_softmax_backward.register_fake
def _(grad, images, texts, scale, *rest):  # type: ignore[no-untyped-def]
    return [torch.empty_like(t).contiguous() for t, need in zip((images, texts, scale), rest[-1], strict=True) if need]


def _scatter(gradients: list[Tensor], needs: list[bool]) -> list[Tensor | None]:
    given = iter(gradients)
    return [next(given) if need else None for need in needs]


def _softmax_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    tensors, ctx.options = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *output[1:])


def _softmax_autograd(ctx, grad, *_):  # type: ignore[no-untyped-def]
    needs = list(ctx.needs_input_grad[:3])
    gradients = _softmax_backward(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *_scatter(gradients, needs), *[None] * 9


_softmax_forward.register_autograd(_softmax_autograd, setup_context=_softmax_setup)


def compiled_softmax_loss(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec
) -> Tensor:
    """`hf_infcl.ring.softmax_loss` as one opaque operator."""
    engine = f"{spec.backend}/{spec.precision}"
    return _softmax_forward(
        images,
        texts,
        scale,
        ids,
        *banks,
        spec.duplicates,
        spec.label_smoothing,
        spec.direction,
        spec.block_size,
        engine,
    )[0]


@torch.library.custom_op("hf_infcl::sigmoid_forward", mutates_args=())
def _sigmoid_forward(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids: Tensor | None,
    block_size: int | None,
    engine: str,
) -> Tensor:
    with torch.autocast(images.device.type, enabled=False):
        spec = _spec("mask", 0.0, "both", block_size, engine)
        return sigmoid_forward(images, texts, scale, bias, ids, spec, _layout(images))


@_sigmoid_forward.register_fake
def _(images, *_):  # type: ignore[no-untyped-def]
    return images.new_empty((), dtype=accumulator_dtype(images.dtype))


@torch.library.custom_op("hf_infcl::sigmoid_backward", mutates_args=())
def _sigmoid_backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids: Tensor | None,
    block_size: int | None,
    engine: str,
    needs: list[bool],
) -> list[Tensor]:
    spec = _spec("mask", 0.0, "both", block_size, engine)
    with torch.autocast(images.device.type, enabled=False):
        gradients = sigmoid_backward(
            grad, images, texts, scale, bias, ids, spec, _layout(images), (needs[0], needs[1], needs[2], needs[3])
        )
    return [gradient for gradient in gradients if gradient is not None]


@_sigmoid_backward.register_fake
def _(grad, images, texts, scale, bias, *rest):  # type: ignore[no-untyped-def]
    given = zip((images, texts, scale, bias), rest[-1], strict=True)
    return [torch.empty_like(t).contiguous() for t, need in given if need]


def _sigmoid_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _sigmoid_autograd(ctx, grad):  # type: ignore[no-untyped-def]
    needs = list(ctx.needs_input_grad[:4])
    gradients = _sigmoid_backward(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *_scatter(gradients, needs), None, None, None


_sigmoid_forward.register_autograd(_sigmoid_autograd, setup_context=_sigmoid_setup)


def compiled_sigmoid_loss(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec
) -> Tensor:
    """`hf_infcl.ring.sigmoid_loss` as one opaque operator."""
    return _sigmoid_forward(images, texts, scale, bias, ids, spec.block_size, f"{spec.backend}/{spec.precision}")
