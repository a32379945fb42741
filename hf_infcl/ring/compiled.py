"""The losses of a process alone as opaque operators, for `torch.compile`: no unrolled chunk loop in the graph."""

from collections.abc import Sequence
from typing import Any

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
from hf_infcl.ring.operators import Gradients, differentiable
from hf_infcl.ring.sigmoid import sigmoid_backward, sigmoid_forward
from hf_infcl.ring.softmax import softmax_backward, softmax_forward
from hf_infcl.ring.spec import Spec
from hf_infcl.ring.traversal import Banks

# What a graph may hold of a `Spec`: its fields but for the group.
_SPEC = "str duplicates, float label_smoothing, str direction, int? block_size, str backend, str precision"
_SIDES = "Tensor images, Tensor texts, Tensor scale"
_BANKS = "Tensor? bank_images, Tensor? bank_texts, Tensor? bank_ids"
_LIMITS = "int k, float? absolute_margin, float? relative_margin, float? max_score"


def _options(spec: Spec) -> tuple[Any, ...]:
    engine = spec.block_size, spec.backend, spec.precision
    return spec.duplicates, spec.label_smoothing, spec.direction, *engine


def _spec(options: Sequence[Any]) -> Spec:
    duplicates, smoothing, direction, block_size, backend, precision = options
    return Spec(duplicates, smoothing, direction, block_size, False, backend, precision)


def _hard_negative_spec(options: Sequence[Any]) -> HardNegativeSpec:
    k, *limits = options[6:]
    return HardNegativeSpec(**vars(_spec(options[:6])), k=k, limits=Limits(*limits))


def _layout(images: Tensor, bank_images: Tensor | None = None) -> Layout:
    return Layout.alone(len(images), 0 if bank_images is None else len(bank_images))


def _softmax(x: Tensor, y: Tensor, s: Tensor, ids: Tensor | None, *rest: Any) -> Sequence[Tensor]:
    banks, spec = rest[:3], _spec(rest[3:])
    return softmax_forward(x, y, s, ids, banks, spec, _layout(x, banks[0]))


def _softmax_back(grad: Tensor, found: list[Tensor], needs: Any, *inputs: Any) -> Gradients:
    (x, y, s, ids), banks, spec = inputs[:4], inputs[4:7], _spec(inputs[7:])
    rows, cols = found
    return softmax_backward(grad, x, y, s, ids, banks, rows, cols, spec, _layout(x, banks[0]), needs)


def _softmax_shapes(x: Tensor, y: Tensor, s: Tensor, ids: Tensor | None, *rest: Any) -> list[Tensor]:
    spec, dtype = _spec(rest[3:]), accumulator_dtype(x.dtype)
    shape = (6 if spec.label_smoothing else 4, len(x))
    return [
        x.new_empty((), dtype=dtype),
        *(x.new_empty(shape if wanted else (0,), dtype=dtype) for wanted in (spec.for_rows, spec.for_cols)),
    ]


def _sigmoid(x: Tensor, y: Tensor, s: Tensor, b: Tensor, ids: Tensor | None, *options: Any) -> Sequence[Tensor]:
    return (sigmoid_forward(x, y, s, b, ids, _spec(options), _layout(x)),)


def _sigmoid_back(grad: Tensor, _: list[Tensor], needs: Any, *inputs: Any) -> Gradients:
    x, y, s, b, ids, *options = inputs
    return sigmoid_backward(grad, x, y, s, b, ids, _spec(options), _layout(x), needs)


def _sigmoid_shapes(x: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty((), dtype=accumulator_dtype(x.dtype))]


def _hard_negatives(x: Tensor, y: Tensor, s: Tensor, ids: Tensor | None, *rest: Any) -> Sequence[Tensor]:
    banks, spec = rest[:3], _hard_negative_spec(rest[3:])
    loss, counts, *found = hard_negative_forward(x, y, s, ids, banks, spec, _layout(x, banks[0]))
    return loss, counts.clone(), *found


def _hard_negatives_back(grad: Tensor, found: list[Tensor], needs: Any, *inputs: Any) -> Gradients:
    (x, y, s, ids), banks, spec = inputs[:4], inputs[4:7], _hard_negative_spec(inputs[7:])
    _, *selected = found
    return hard_negative_backward(grad, x, y, s, ids, banks, tuple(selected), spec, _layout(x, banks[0]), needs)


def _hard_negatives_shapes(x: Tensor, y: Tensor, s: Tensor, ids: Tensor | None, *rest: Any) -> list[Tensor]:
    n, dtype, spec = len(x), accumulator_dtype(x.dtype), _hard_negative_spec(rest[3:])
    made = [x.new_empty((), dtype=dtype), x.new_empty(len(HardNegativeCounts._fields), dtype=torch.float64)]
    for wanted in (spec.for_rows, spec.for_cols):
        made.append(x.new_empty((n, spec.k) if wanted else (0,), dtype=dtype))
        made.append(x.new_empty((n, spec.k) if wanted else (0,), dtype=torch.int64 if wanted else dtype))
        made.append(x.new_empty((4, n) if wanted else (0,), dtype=dtype))
    return made


_softmax_operator = differentiable(
    "softmax", f"{_SIDES}, Tensor? ids, {_BANKS}, {_SPEC}", 3, _softmax, _softmax_back, _softmax_shapes
)
_sigmoid_operator = differentiable(
    "sigmoid", f"{_SIDES}, Tensor bias, Tensor? ids, {_SPEC}", 4, _sigmoid, _sigmoid_back, _sigmoid_shapes
)
_hard_negative_operator = differentiable(
    "hard_negative",
    f"{_SIDES}, Tensor? ids, {_BANKS}, {_SPEC}, {_LIMITS}",
    3,
    _hard_negatives,
    _hard_negatives_back,
    _hard_negatives_shapes,
)


def compiled_softmax_loss(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec
) -> Tensor:
    """`hf_infcl.ring.softmax_loss` as one opaque operator."""
    return _softmax_operator(images, texts, scale, ids, *banks, *_options(spec))[0]


def compiled_sigmoid_loss(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec
) -> Tensor:
    """`hf_infcl.ring.sigmoid_loss` as one opaque operator."""
    return _sigmoid_operator(images, texts, scale, bias, ids, *_options(spec))[0]


def compiled_hard_negative_loss(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: HardNegativeSpec
) -> tuple[Tensor, Tensor]:
    """`hf_infcl.ring.hard_negative_loss` as one opaque operator."""
    limits = spec.limits
    limited = spec.k, limits.absolute_margin, limits.relative_margin, limits.max_score
    loss, counts, *_ = _hard_negative_operator(images, texts, scale, ids, *banks, *_options(spec), *limited)
    return loss, counts.detach()
