"""What the losses' backward passes share: they are first derivatives, and say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For an autograd Function's backward that has no derivative of its own.

    Torch's `once_differentiable` lets a graph be asked for and gives none where the incoming gradient is a constant, so
    that a penalty on gradients would silently have no effect.

    Raises:
        RuntimeError: a graph of the backward pass was asked for.
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "hf_infcl's losses have first derivatives only: create_graph=True (gradient penalties, Hessians) needs "
                "a dense loss"
            )
        return backward(ctx, *grads)

    return guarded
