"""Reaching a dual encoder's parts through whatever wraps it."""

from typing import Any

import torch
from torch import nn


def unwrap(model: Any) -> Any:
    """Returns the transformers model inside torch.compile, DistributedDataParallel and PEFT, adapters in place."""
    while True:
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):  # PeftModel
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module):  # DDP, DeepSpeed
            model = model.module
        else:
            return model


def vision_tower(model: nn.Module) -> Any:
    """Returns the vision tower, without the projection behind it."""
    return unwrap(model).vision_model


def text_tower(model: nn.Module) -> Any:
    """Returns the text tower, without the projection behind it."""
    return unwrap(model).text_model


def logit_scale_parameter(model: nn.Module) -> nn.Parameter | None:
    """Returns the logarithm of the multiplier as a parameter of shape () or (1,), or None where the model has none."""
    return getattr(unwrap(model), "logit_scale", None)


def logit_bias_parameter(model: nn.Module) -> nn.Parameter | None:
    """Returns SigLIP's bias as a parameter of shape (1,), or None where the model has none."""
    return getattr(unwrap(model), "logit_bias", None)


def logit_scale(model: nn.Module) -> torch.Tensor:
    """Returns the multiplier of the cosines: exp of the parameter in float32 or wider, with its gradient."""
    parameter = logit_scale_parameter(model)
    if parameter is None:
        raise ValueError(f"{type(unwrap(model)).__name__} has no logit_scale")
    # float16 ends at 65504: a log-scale above 11.09 would be infinite there.
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32)).exp()
