"""Which layers LoRA adapts in both towers of a dual encoder, and whether the layers somebody asked for exist."""

import copy
import difflib
import logging
import re
from collections.abc import Sequence
from typing import Any

from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from hf_infcl.models.access import unwrap
from hf_infcl.models.families import family_of

logger = logging.getLogger(__name__)

TOWERS = {"vision": "vision_model", "text": "text_model"}
_PROJECTIONS = {"vision": "visual_projection", "text": "text_projection"}


def lora_target_modules(model: nn.Module, towers: Sequence[str] = ("vision", "text")) -> list[str]:
    """Returns the full names of the layers that LoRA adapts by default.

    These are the linear layers of attention, MLP and pooling in both towers, and in convolutional towers the ungrouped
    1 x 1 convolutions, which are linear layers over channels. A given number of parameters does more when spread over
    many kinds of layers (Hu et al. 2021, section 7.1), MLPs included (Dettmers et al. 2023, section 4).

    Left out are layers whose weight somebody else reads, so that an adapter on them would learn nothing: whatever is
    inside an nn.MultiheadAttention (SigLIP's pooling head). So are patch and word embeddings, and the projections
    behind the towers, which are small and where new are trained whole (`modules_to_save`).

    Args:
        model: a dual encoder without adapters.
        towers: "vision", "text" or both.
    """
    return [
        f"{TOWERS[tower]}.{name}" for tower in towers for name in _linear_names(getattr(unwrap(model), TOWERS[tower]))
    ]


def _linear_names(module: nn.Module, prefix: str = "") -> list[str]:
    if isinstance(module, nn.Linear) or (
        isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    ):
        return [prefix]
    if isinstance(module, nn.MultiheadAttention) or type(module).__name__.endswith("Embeddings"):
        return []
    return [
        name
        for child_name, child in module.named_children()
        for name in _linear_names(child, f"{prefix}.{child_name}" if prefix else child_name)
    ]


def modules_to_save(model: nn.Module) -> list[str]:
    """Returns the projections that start untrained in this family, to be trained whole and saved with the adapter.

    A VisionTextDualEncoder's checkpoint does not tell whether its projections were trained; training trained ones on is
    harmless, leaving new ones random is not.
    """
    return list(family_of(model).new_projections)


def complete_lora_config(model: nn.Module, config: Any, towers: Sequence[str] = ("vision", "text")) -> Any:
    """Returns a copy of a PEFT configuration that fits this dual encoder.

    Missing targets, and PEFT's "all-linear", become `lora_target_modules`; new projections are added to
    `modules_to_save` unless they are among the targets; a `task_type` is set aside with a notice, for it makes PEFT
    call the model with arguments that no dual encoder takes.

    Args:
        model: a dual encoder without adapters.
        config: a `LoraConfig` or another PEFT configuration with `target_modules`.
        towers: the towers that are to be adapted; one that is kept frozen needs no target.

    Raises:
        ValueError: as `check_lora_targets` does, for a pattern that is no regular expression, and for a name in
            `modules_to_save` that no module has.
    """
    config = copy.deepcopy(config)
    if config.task_type is not None:
        logger.warning("task_type=%s is left out: a dual encoder is trained and called without one", config.task_type)
        config.task_type = None
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ValueError(f"LoRA target_modules {targets!r} is no regular expression: {error}") from error
    if targets == "all-linear" or (targets is None and not getattr(config, "target_parameters", None)):
        config.target_modules = set(lora_target_modules(model, towers))
    _check_modules_to_save(model, config)
    new = [name for name in modules_to_save(model) if not check_target_module_exists(config, name)]
    if new:
        config.modules_to_save = sorted({*(config.modules_to_save or ()), *new})
    check_lora_targets(model, config, towers)
    return config


def _check_modules_to_save(model: nn.Module, config: Any) -> None:
    """Refuses names that PEFT would pass over without a word."""
    names = [name for name, _ in unwrap(model).named_modules()]
    for wanted in config.modules_to_save or ():
        if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
            near = difflib.get_close_matches(wanted, {*names, *(name.rpartition(".")[2] for name in names)}, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"LoRA modules_to_save names {wanted!r}, which no module of the model has{hint}")


def check_lora_targets(model: nn.Module, config: Any, towers: Sequence[str] = ("vision", "text")) -> None:
    """Refuses LoRA targets that match nothing on one side, as one family's layer names do on another.

    A side is a tower and the projection behind it. Targets that name one side in full (`"vision_model.*q_proj"`,
    `"visual_projection"`, or every entry of a list) say that the other one is meant to stay as it is.

    Args:
        model: a dual encoder without adapters.
        config: a PEFT configuration with its `target_modules` set.
        towers: the towers that are to be adapted.

    Raises:
        ValueError: naming the tower, what was asked for and names of layers that are there.
    """
    targets = getattr(config, "target_modules", None)
    if not targets:
        return
    entries = [targets] if isinstance(targets, str) else list(targets)
    for tower in towers:
        module = getattr(unwrap(model), TOWERS[tower])
        other = next(name for name in TOWERS if name != tower)
        if all(TOWERS[other] in entry or _PROJECTIONS[other] in entry for entry in entries):
            continue
        names = [f"{TOWERS[tower]}.{name}" for name, _ in module.named_modules()]
        names += [_PROJECTIONS[tower]] if hasattr(unwrap(model), _PROJECTIONS[tower]) else []
        if any(check_target_module_exists(config, name) for name in names):
            continue
        there = sorted({name.rsplit(".", 1)[-1] for name in _linear_names(module)})
        raise ValueError(
            f"LoRA target_modules {_short(entries)} match nothing in the {tower} tower ({type(module).__name__}); "
            f"layers there are named: {', '.join(there)}. Leave target_modules out to adapt both towers, or say that "
            f"the other one alone is meant by a pattern such as '{TOWERS[other]}.*(NAME|NAME)'"
        )


def _short(entries: list[str]) -> str:
    shown = ", ".join(repr(entry) for entry in sorted(entries)[:6])
    return f"{shown} and {len(entries) - 6} more" if len(entries) > 6 else shown
