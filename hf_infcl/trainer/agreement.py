"""What the processes of a run must have in common: otherwise they wait for each other for ever, or learn apart."""

import json
from typing import Any

from hf_infcl.hub import find_peft_model
from hf_infcl.ring import World
from hf_infcl.trainer.description import count_rows

# Paths, reports and loaders are a host's or a process's own, and change no step.
_OWN_OPTIONS = frozenset(
    [
        "dataloader_multiprocessing_context",
        "dataloader_num_workers",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "disable_tqdm",
        "hub_always_push",
        "hub_model_id",
        "hub_private_repo",
        "hub_revision",
        "hub_strategy",
        "hub_token",
        "local_rank",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "logging_dir",
        "output_dir",
        "project",
        "push_to_hub",
        "report_to",
        "resume_from_checkpoint",
        "run_name",
        "trackio_bucket_id",
        "trackio_space_id",
        "trackio_static_space_id",
    ]
)
# These may name the process's device.
_OWN_MODEL_OPTIONS = ("device_map", "token")
# Where the model lies, not what it is.
_OWN_ADAPTER_OPTIONS = ("base_model_name_or_path",)


def check_agreement(values: dict[str, Any]) -> None:
    """That every process has the same values of what would otherwise lead them to different steps.

    Args:
        values: by name, as they are shown.

    Raises:
        ValueError: on every process; shows what differs, with each one's value.
    """
    world = World.of(None)
    differing = [] if world.is_alone else differences(world.gather_objects(values))
    if differing:
        raise ValueError(f"the processes must agree, and do not: {'; '.join(differing)}")


def differences(everyone: list[dict[str, Any]]) -> list[str]:
    """What differs between processes.

    Args:
        everyone: each process's values by name; one that has no such value has None.

    Returns:
        Lines such as "max_steps is 4 (process 0, 2), 5 (process 1)".
    """
    lines = []
    for name in dict.fromkeys(name for values in everyone for name in values):
        ranks: dict[str, list[str]] = {}
        for rank, values in enumerate(everyone):
            ranks.setdefault(str(values.get(name)), []).append(str(rank))
        if len(ranks) > 1:
            shown = ", ".join(f"{value} (process {', '.join(which)})" for value, which in ranks.items())
            lines.append(f"{name} is {shown}")
    return lines


def common_values(trainer: Any) -> dict[str, str]:
    """What of an `InfCLTrainer` must be the same on every process, by name, as text."""
    args, model = trainer.args, trainer.model
    values = {name: value for name, value in args.to_dict().items() if name not in _OWN_OPTIONS}
    if isinstance(args.model_init_kwargs, dict):
        values["model_init_kwargs"] = {
            name: value for name, value in args.model_init_kwargs.items() if name not in _OWN_MODEL_OPTIONS
        }
    values |= {
        "the number of training rows": count_rows(trainer.train_dataset),
        "the number of evaluation rows": count_rows(trainer.eval_dataset),
        "the loss": type(trainer.loss).__name__,
        "the resolved loss_type": trainer.loss_type,
        "the model": type(model).__name__,
        "the number of parameters": sum(parameter.numel() for parameter in model.parameters()),
        "the number of trained parameters": sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        ),
    }
    peft_model = find_peft_model(model)
    if peft_model is not None:
        adapter = peft_model.active_peft_config.to_dict()
        values |= {
            f"the adapter's {name}": value for name, value in adapter.items() if name not in _OWN_ADAPTER_OPTIONS
        }
    return {name: _as_text(value) for name, value in values.items()}


def _as_text(value: Any) -> str:
    """The same on every process for the same value: sets have no order, and objects show where they lie."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else type(value).__name__
