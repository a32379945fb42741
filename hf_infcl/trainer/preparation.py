"""From what the user hands over (a name, a model, an adapter configuration) to a model that is ready to be trained."""

import logging
import math
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoProcessor, PreTrainedModel

from hf_infcl.hub import DualEncoderPeftModel
from hf_infcl.hub.loading import expand_home, explain_absence, explain_damage
from hf_infcl.models import (
    Family,
    complete_lora_config,
    family_of,
    logit_bias_parameter,
    logit_scale_parameter,
    modules_to_save,
    prepare_dual_encoder,
    raise_trainable_to_float32,
    text_tower,
    unwrap,
    vision_tower,
)
from hf_infcl.trainer.accumulation import Sides
from hf_infcl.trainer.callbacks import round_down_scale
from hf_infcl.trainer.config import InfCLConfig

logger = logging.getLogger(__name__)

# Top-level parts of a dual encoder by side; its projection stands beside the tower.
_PARTS = {"image": ("vision_model", "visual_projection"), "text": ("text_model", "text_projection")}


def is_peft_model(model: Any) -> bool:
    """Whether the model is wrapped by PEFT."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def load_model(name_or_path: str, model_init_kwargs: Any = None) -> PreTrainedModel:
    """Loads a dual encoder by name or path.

    Weights come in float32 unless told otherwise: float16 checkpoints would else be trained in float16.

    Raises:
        OSError, ValueError: nothing can be loaded from there.
    """
    location = expand_home(name_or_path)
    with explain_absence(location), explain_damage(location):
        try:
            return AutoModel.from_pretrained(location, **{"dtype": torch.float32, **(model_init_kwargs or {})})
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ValueError(f"model_init_kwargs={model_init_kwargs!r}: {error}") from error


def load_processor(model: nn.Module, name_or_path: str | None, model_init_kwargs: Any = None) -> Any:
    """Loads the model's own processor, from where the model came.

    Raises:
        ValueError: there is none; says what to pass instead.
    """
    source = expand_home(name_or_path or getattr(unwrap(model).config, "_name_or_path", None) or "")
    kept = {key: (model_init_kwargs or {})[key] for key in ("revision", "token") if key in (model_init_kwargs or {})}
    try:
        return AutoProcessor.from_pretrained(source, **kept)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no processor could be loaded from {source!r}, where the model came from; pass processing_class "
            f"({' '.join(str(error).split())})"
        ) from error


def scale_cap(args: InfCLConfig, family: Family) -> float | None:
    """The largest multiplier that is allowed, or None."""
    cap = family.default_logit_scale_max if args.logit_scale_max is None else args.logit_scale_max
    return None if cap is None or math.isinf(cap) else cap


def prepare_model(
    model: nn.Module, args: InfCLConfig, peft_config: Any = None, processing_class: Any = None
) -> nn.Module:
    """Gives the model its forward, locks what is to be locked, and wraps it by PEFT where asked to.

    Raises:
        ValueError: an unsupported family, an adapter upon an adapter, or LoRA targets that a tower lacks.
    """
    prepare_dual_encoder(model, processing_class)
    cap = scale_cap(args, family_of(model))
    if cap is not None:
        round_down_scale(model, cap)
    if peft_config is not None:
        model = _add_adapter(model, peft_config, args)
    for side, locked in (("image", args.freeze_vision_model), ("text", args.freeze_text_model)):
        if locked:
            _lock(model, side)
    if args.train_logit_scale is not None or is_peft_model(model):
        for parameter in (logit_scale_parameter(model), logit_bias_parameter(model)):
            if parameter is not None:
                parameter.requires_grad_(bool(args.train_logit_scale))
    raise_trainable_to_float32(model)
    return model


def _add_adapter(model: nn.Module, peft_config: Any, args: InfCLConfig) -> nn.Module:
    # Knows the temperature of the adapter from the base's, so that what training changed is saved with it.
    if is_peft_model(model):
        raise ValueError(
            "peft_config was given with a model that has an adapter already; pass one of the two, or merge the adapter "
            "first (model.merge_and_unload())"
        )
    locked = {"vision": args.freeze_vision_model, "text": args.freeze_text_model}
    towers = [tower for tower, is_locked in locked.items() if not is_locked]
    config = complete_lora_config(model, peft_config, towers)
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    return DualEncoderPeftModel(model, config)


def _lock(model: nn.Module, side: str) -> None:
    """Locks a tower and its projection; a projection that is newly initialised has to be trained, and stays free."""
    new = modules_to_save(model)
    base = unwrap(model)
    for part in _PARTS[side]:
        module = getattr(base, part, None)
        if module is None:
            continue
        if part in new:
            logger.info("%s is newly initialised and stays trainable although its tower is locked", part)
            continue
        module.requires_grad_(False)


def sides_of(model: nn.Module) -> Sides:
    """What belongs to which side of the model, and on which sides anything is trained."""
    family = family_of(model)
    trained = {"image": False, "text": False}
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad or name in ("logit_scale", "logit_bias"):
            continue
        part = name.partition(".")[0]
        for side, parts in _PARTS.items():
            # A part of neither side may serve both.
            if part in parts or not any(part in known for known in _PARTS.values()):
                trained[side] = True
    return Sides(family.image_inputs, family.text_inputs, trained["image"], trained["text"])


def set_locked_towers_eval(model: nn.Module, sides: Sides) -> None:
    """Puts towers on which nothing is trained into eval mode: dropout there would only blur fixed features."""
    if not sides.image_trained:
        vision_tower(model).eval()
    if not sides.text_trained:
        text_tower(model).eval()
