"""From a trainer that has run to the facts of its card."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_infcl import __version__
from hf_infcl.hub.adapters import WEIGHTS_NAME, find_peft_model
from hf_infcl.hub.card import RunFacts, write_model_card
from hf_infcl.hub.plots import PLOT_NAME, plot_history

# What decides how a run goes, besides the batch, in the order of the card.
_HYPERPARAMETERS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs", "weight_decay", "optim",
    "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "memory_bank_size", "num_hard_negatives",
    "freeze_vision_model", "freeze_text_model", "logit_scale_max", "train_logit_scale", "batch_sampler", "captions",
    "seed",
)  # fmt: skip
# Options that say something only when they are switched on, or only beside another.
_SILENT = (None, False, "", 0, 0.0, "batch_sampler", "single")
_VERSIONS = ("torch", "transformers", "peft", "accelerate", "datasets")


def run_facts(
    trainer: Any,
    *,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
    **known: Any,
) -> RunFacts:
    """Collects what a trainer knows about its run.

    Args:
        trainer: an `InfCLTrainer` after `train()` (or before: then less is known).
        before: metrics of an evaluation before the training, as `trainer.evaluate()` returns them.
        after: metrics of an evaluation after it.
        known: fields of `RunFacts` that only the caller knows (`base_model`, `dataset`, ...) or knows better.

    Returns:
        The facts.
    """
    args, model = trainer.args, trainer.model
    peft_model = find_peft_model(model)
    config = getattr(model, "config", None)
    facts: dict[str, Any] = {
        "name": Path(args.hub_model_id or args.output_dir).name,
        "base_model": getattr(config, "_name_or_path", None) or None,
        "model_type": getattr(config, "model_type", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "train_rows": _length(trainer.train_dataset),
        "eval_rows": _length(trainer.eval_dataset),
        "skipped_rows": len(getattr(trainer.train_dataset, "skipped", None) or []) or None,
        "image_column": getattr(trainer.train_dataset, "image_column", args.image_column),
        "caption_column": getattr(trainer.train_dataset, "caption_column", args.caption_column),
        **_text_kwargs(trainer),
        "loss": type(trainer.loss).__name__,
        "loss_options": trainer.loss.get_config_dict() if hasattr(trainer.loss, "get_config_dict") else {},
        "citation": getattr(trainer.loss, "citation", None),
        "per_device_batch_size": args.train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "processes": args.world_size,
        "contrastive_batch_size": args.contrastive_batch_size,
        "hyperparameters": _hyperparameters(args),
        "steps": trainer.state.global_step,
        "before": _plain(before),
        "after": _plain(after),
        "seconds": _logged(trainer, "train_runtime"),
        "peak_memory_bytes": _peak_memory(trainer),
        "device": _device(args),
        "versions": {"hf_infcl": __version__, **{name: version(name) for name in _VERSIONS}},
    }
    if peft_model is not None:
        facts["adapter"] = _adapter(peft_model.active_peft_config)
        weights = Path(args.output_dir, WEIGHTS_NAME)
        facts["adapter_bytes"] = weights.stat().st_size if weights.exists() else None
    return RunFacts(**{**facts, **known})


def write_run(
    trainer: Any,
    output_dir: str | Path | None = None,
    *,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
    **known: Any,
) -> Path:
    """Writes the card of a run and the picture of its curves beside the saved model.

    Args:
        trainer: an `InfCLTrainer` after `train()`.
        output_dir: the folder; by default the trainer's.
        before, after, known: see `run_facts`.

    Returns:
        The path of the card.
    """
    folder = Path(output_dir or trainer.args.output_dir)
    history = list(trainer.state.log_history)
    if before:
        history.insert(0, {**before, "step": 0})
    plot_history(history, folder / PLOT_NAME)
    return write_model_card(run_facts(trainer, before=before, after=after, plot=PLOT_NAME, **known), folder)


def _plain(metrics: Mapping[str, float] | None) -> dict[str, float]:
    return {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") and not isinstance(dataset, dict) else None


def _text_kwargs(trainer: Any) -> dict[str, Any]:
    """Of a collator of the user's own nothing is known."""
    kwargs = getattr(trainer.data_collator, "text_kwargs", None)
    return {"text_kwargs": dict(kwargs)} if kwargs else {}


def _hyperparameters(args: Any) -> dict[str, Any]:
    shown = {}
    for name in _HYPERPARAMETERS:
        value = getattr(args, name, None)
        value = getattr(value, "value", value)
        redundant = (name == "num_train_epochs" and args.max_steps > 0) or (
            name == "num_hard_negatives" and args.loss_type != "hard_negative"
        )
        if (value not in _SILENT or name == "seed") and not redundant:
            shown[name] = value
    return shown


def _adapter(config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"method": {"LORA": "LoRA"}.get(config.peft_type.value, config.peft_type.value)}
    for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "modules_to_save"):
        value = getattr(config, name, None)
        if value not in (None, False):
            options[name] = sorted(value) if isinstance(value, (set, list)) else value
    return options


def _logged(trainer: Any, name: str) -> Any:
    return next((entry[name] for entry in reversed(trainer.state.log_history) if name in entry), None)


def _peak_memory(trainer: Any) -> int | None:
    gib = _logged(trainer, "peak_memory_gib")
    return None if gib is None else int(gib * 2**30)


def _device(args: Any) -> str:
    if args.device.type != "cuda":
        return f"CPU ({platform.machine()}, threads: {torch.get_num_threads()})"
    name = torch.cuda.get_device_name(args.device)
    return f"{args.world_size} x {name}" if args.world_size > 1 else name
