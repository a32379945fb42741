"""What the losses' autograd Functions share: they compute outside of autocast, and have first derivatives only."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switches autocast off where it is on: a small batch waits for the host, which has to do with the switch too."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


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
