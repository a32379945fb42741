"""How a loss becomes an opaque operator of torch, differentiable, with the shapes that `torch.compile` asks for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ring.derivatives import without_autocast

Gradients = Sequence[Tensor | None]


def differentiable(
    name: str,
    inputs: str,
    leaves: int,
    forward: Callable[..., Sequence[Tensor]],
    backward: Callable[..., Gradients],
    shapes: Callable[..., list[Tensor]],
) -> Callable[..., list[Tensor]]:
    """Registers ``hf_infcl::<name>_forward`` and ``hf_infcl::<name>_backward``, two nodes in a graph.

    Args:
        name: the loss.
        inputs: what it takes, in the words of torch's schemas; all tensors first.
        leaves: how many of the inputs, from the first on, may get a gradient.
        forward: called with the inputs, outside of autocast; returns the loss, and what the backward has to know. No
            tensor may be a view of another.
        backward: called with the loss's gradient, the list that the forward returned after the loss, which leaves need
            a gradient, and the inputs; returns the gradients of the leaves.
        shapes: called with the inputs; empty tensors like those that the forward returns.

    Returns:
        The first of the two, which differentiates by the second.
    """
    tensors = inputs.count("Tensor")

    def go(*arguments: Any) -> list[Tensor]:
        with without_autocast(arguments[0].device):
            return list(forward(*arguments))

    def go_back(grad: Tensor, found: list[Tensor], needs: list[bool], *arguments: Any) -> list[Tensor]:
        with without_autocast(grad.device):
            return [one for one in backward(grad, found, tuple(needs), *arguments) if one is not None]

    def shapes_back(_: Tensor, __: list[Tensor], needs: list[bool], *arguments: Any) -> list[Tensor]:
        given = zip(arguments[:leaves], needs, strict=True)
        return [torch.empty_like(leaf).contiguous() for leaf, need in given if need]

    there = torch.library.custom_op(f"hf_infcl::{name}_forward", go, mutates_args=(), schema=f"({inputs}) -> Tensor[]")
    back = torch.library.custom_op(
        f"hf_infcl::{name}_backward",
        go_back,
        mutates_args=(),
        schema=f"(Tensor grad, Tensor[] found, bool[] needs, {inputs}) -> Tensor[]",
    )
    there.register_fake(shapes)
    back.register_fake(shapes_back)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], *output[1:])

    def derive(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        saved, needs = ctx.saved_tensors, list(ctx.needs_input_grad[:leaves])
        made = iter(back(grads[0], list(saved[tensors:]), needs, *saved[:tensors], *ctx.options))
        others = tensors - leaves + len(ctx.options)
        return *(next(made) if need else None for need in needs), *[None] * others

    there.register_autograd(derive, setup_context=setup)
    return there
