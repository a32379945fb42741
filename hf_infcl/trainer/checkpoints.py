"""Checkpoints: whether one belongs to this run, and the state that transformers does not save."""

import json
import logging
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import nn
from transformers import TrainingArguments

from hf_infcl.hub import find_peft_model
from hf_infcl.hub.weights import Shapes, find_misfits, tensor_shapes
from hf_infcl.losses import MemoryBank
from hf_infcl.trainer.checks import listed
from hf_infcl.trainer.config import InfCLConfig

_ADAPTER, _MODEL, _INDEX = "adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json"
_TEMPERATURE = ("base_model.model.logit_scale", "base_model.model.logit_bias")
_OPTIONS, _STARTED, _TRAINED = "contrastive_options.json", "run_started", "trained_tensors"
# What transformers writes last.
_STATE = "trainer_state.json"
# Without these in common, what was saved of the optimizer or of the memory bank does not fit.
_FIXED_OPTIONS = ("memory_bank_size", "freeze_vision_model", "freeze_text_model")
_FIXED = (*_FIXED_OPTIONS, "optim", _TRAINED)
# What an adapter's configuration adds to its tensors.
_ADAPTER_FORMULA = ("lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "fan_in_fan_out")

logger = logging.getLogger(__name__)


def check_checkpoint(path: str | Path, model: nn.Module, args: InfCLConfig, *, needs_bank: bool) -> None:
    """Refuses to resume from a folder that lacks a file or holds another model, before anything is loaded.

    Args:
        path: the checkpoint's folder.
        model: the model that is to go on.
        args: the run's arguments.
        needs_bank: whether the run has a memory bank.

    Raises:
        ValueError: names what is missing or does not fit.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"resume_from_checkpoint={str(path)!r} is no folder")
    # What DeepSpeed and FSDP write is theirs to check.
    if args.deepspeed or args.fsdp:
        return
    suffix = f"_{args.process_index}" if args.world_size > 1 else ""
    needed = [_STATE, "optimizer.pt", "scheduler.pt", f"rng_state{suffix}.pth"]
    needed += [bank_file(args)] if needs_bank else []
    missing = [name for name in needed if not (folder / name).is_file()]
    there = [name for name in (*needed, _OPTIONS, "adapter_config.json", _INDEX) if (folder / name).is_file()]
    damaged = [name for name in there if not _is_whole(folder / name)]
    if missing or damaged:
        states = (("lacks", missing), ("has damaged files, empty or cut short:", damaged))
        what = " and ".join(f"{verb} {', '.join(names)}" for verb, names in states if names)
        raise ValueError(f"the checkpoint {str(path)!r} {what}: {_reason(folder, damaged)}. {_others(folder)}")
    _check_weights(folder, model)
    _check_adapter_config(folder, model)
    _check_options(folder, args, trained_tensors(model))


def _is_whole(file: Path) -> bool:
    """Whether a file was written to its end: JSON closes there, and torch's archives have their index there."""
    if file.suffix != ".json":
        return zipfile.is_zipfile(file)
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except ValueError:
        return False


def _was_saved(folder: Path) -> bool:
    """Whether a checkpoint was saved to its end."""
    return (folder / _STATE).is_file() and _is_whole(folder / _STATE)


def _reason(folder: Path, damaged: list[str]) -> str:
    if not _was_saved(folder):
        return "its run was probably interrupted while saving it"
    if damaged:
        return "copy it again, or resume from another"
    return (
        "training cannot go on exactly where it stopped (save_only_model=True writes checkpoints that can be loaded, "
        "but not resumed from)"
    )


def _others(folder: Path) -> str:
    others = [str(other) for other in _checkpoints(folder.parent) if other.name != folder.name and _was_saved(other)]
    return f"Whole ones beside it, the newest first: {listed(others)}" if others else "There is no whole one beside it"


def _check_adapter_config(folder: Path, model: nn.Module) -> None:
    """That the adapter's tensors mean what they meant: a scale or a formula is no part of them."""
    peft_model, file = find_peft_model(model), folder / "adapter_config.json"
    if peft_model is None or not file.is_file():
        return
    saved, config = json.loads(file.read_text()), peft_model.active_peft_config
    for name in _ADAPTER_FORMULA:
        now = getattr(config, name, None)
        if name in saved and saved[name] != now:
            raise ValueError(
                f"the checkpoint {str(folder)!r} has an adapter with {name}={saved[name]!r}, this run {now!r}: the "
                "same weights would mean another model"
            )


def _check_options(folder: Path, args: InfCLConfig, trained: int) -> None:
    file = folder / _OPTIONS
    if not file.is_file():
        return
    saved, now = json.loads(file.read_text()), {**_options(args), _TRAINED: trained}
    saved.pop(_STARTED, None)
    misfits = [
        f"{name}={saved[name]}, this run {now[name]}" for name in _FIXED if name in saved and saved[name] != now[name]
    ]
    if misfits:
        raise ValueError(
            f"the checkpoint {str(folder)!r} has {'; '.join(misfits)}: what it saved of the optimizer or the memory "
            "bank does not fit. Resume with the same options and the same parameters trained, or begin anew"
        )
    changed = [f"{name}={now[name]} instead of {value}" for name, value in saved.items() if now.get(name) != value]
    if changed and args.process_index == 0:
        logger.warning(
            "resumed with other options than the checkpoint's, so not as the uninterrupted run would go on: %s",
            ", ".join(changed),
        )


def _options(args: InfCLConfig) -> dict[str, Any]:
    """What a resumed run should have in common with the one it resumes, beyond what transformers compares."""
    names = ("contrastive_batch_size", "seed", "data_seed", *_FIXED_OPTIONS)
    # A fused optimizer keeps the same state.
    optimizer = str(getattr(args.optim, "value", args.optim)).removesuffix("_fused")
    return {"optim": optimizer, **{name: getattr(args, name) for name in names}}


def mark_unsaved(folder: str | Path) -> None:
    """Before a checkpoint is written over an earlier run's: interrupted, it is not to be taken for a whole one."""
    Path(folder, _STATE).unlink(missing_ok=True)


def trained_tensors(model: nn.Module) -> int:
    """How many tensors of a model are trained."""
    return sum(parameter.requires_grad for parameter in model.parameters())


def save_options(folder: str | Path, args: InfCLConfig, model: nn.Module, started: float) -> None:
    """Notes the options that `check_checkpoint` compares, and when the run began, for `newest_checkpoint`."""
    if args.should_save:
        Path(folder).mkdir(parents=True, exist_ok=True)
        noted = {**_options(args), _TRAINED: trained_tensors(model), _STARTED: started}
        Path(folder, _OPTIONS).write_text(json.dumps(noted, allow_nan=False) + "\n", encoding="utf-8")


def newest_checkpoint(output_dir: str | Path) -> str | None:
    """The last checkpoint of the run that began last in a folder, or None.

    A run that begins anew in the folder of a longer one leaves that one's checkpoints, of later steps, beside its own.
    One that was not saved to its end is the newest only where there is no other.

    Args:
        output_dir: the folder of the runs; it need not exist.
    """
    newest = next(iter(_checkpoints(output_dir)), None)
    return None if newest is None else str(newest)


def how_to_go_on(saved: str | None, output_dir: str | Path) -> str | None:
    """What an interrupted run should say of going on, or None.

    Args:
        saved: the last checkpoint it saved, or else resumed from.
        output_dir: its folder, in which those of earlier runs may lie.
    """
    newest = newest_checkpoint(output_dir)
    if newest is not None and not _was_saved(Path(newest)):
        newest = None
    if saved is None:
        return None if newest is None else f"This run had saved no checkpoint yet: {newest} is an earlier run's"
    if not _was_saved(Path(saved)):  # stopped after a newer one had taken its place
        saved = newest
    if saved is None:
        return None
    is_last = newest is not None and Path(newest) == Path(saved)
    return (
        f"To go on from {saved}: trainer.train(resume_from_checkpoint={True if is_last else repr(saved)}), or on the "
        f"command line --resume_from_checkpoint {'last' if is_last else saved}"
    )


def checkpoint_to_resume(args: TrainingArguments) -> str:
    """The newest checkpoint of `output_dir`; says which were passed over because they were not saved to their end.

    Raises:
        ValueError: there is none.
    """
    newest = newest_checkpoint(args.output_dir)
    if newest is None:
        raise ValueError(
            f"there is no checkpoint in output_dir={args.output_dir!r} to resume from; leave resume_from_checkpoint "
            "out to begin anew, or name the folder of a checkpoint"
        )
    torn = [str(folder) for folder in _checkpoints(args.output_dir) if not _was_saved(folder)]
    if newest not in torn and torn and args.process_index == 0:
        logger.warning("resuming from %s; passed over, for they were not saved to their end: %s", newest, listed(torn))
    return newest


def _checkpoints(output_dir: str | Path) -> list[Path]:
    """The newest first, and last those that were not saved to their end."""
    steps = {
        folder: int(number[1])
        for folder in Path(output_dir).glob("checkpoint-*")
        if (number := re.fullmatch(r"checkpoint-(\d+)", folder.name)) and folder.is_dir()
    }
    return sorted(steps, key=lambda folder: (_was_saved(folder), _started(folder), steps[folder]), reverse=True)


def _started(folder: Path) -> float:
    """When the run of a checkpoint began, in seconds since 1970; 0 where it is not noted."""
    file = folder / _OPTIONS
    return json.loads(file.read_text()).get(_STARTED, 0.0) if file.is_file() and _is_whole(file) else 0.0


def _check_weights(folder: Path, model: nn.Module) -> None:
    peft_model = find_peft_model(model)
    if peft_model is not None:
        files = [folder / _ADAPTER]
        state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    else:
        files = [folder / _MODEL]
        if not files[0].is_file() and (folder / _INDEX).is_file():
            shards = json.loads((folder / _INDEX).read_text())["weight_map"].values()
            files = [folder / name for name in sorted(set(shards))]
        state = model.state_dict()
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        kind = "an adapter" if peft_model is not None else "a whole model"
        raise ValueError(f"the checkpoint {str(folder)!r} lacks {', '.join(absent)}: this run trains {kind}")
    found: Shapes = {}
    for file in files:
        found |= tensor_shapes(file)
    temperature = {name: value for name, value in model.state_dict().items() if name.endswith(_TEMPERATURE)}
    misfits = find_misfits(found, state, temperature)
    if misfits:
        raise ValueError(f"the checkpoint {str(folder)!r} is of another model: {misfits}")


def saved_step(folder: str | Path) -> int:
    """How many optimizer steps a run had taken when it saved a checkpoint."""
    return int(json.loads(Path(folder, _STATE).read_text())["global_step"])


def what_is_left(folder: str | Path, max_steps: int) -> str | None:
    """What a run of `max_steps` that resumes from a checkpoint should be told of its length; None: all is as it was."""
    planned = int(json.loads(Path(folder, _STATE).read_text())["max_steps"])
    if saved_step(folder) >= max_steps:
        return "no step is left to take: raise max_steps or num_train_epochs to train further"
    if planned == max_steps:
        return None
    return (
        f"the checkpoint's run was to take {planned:,} steps, this one {max_steps:,}: its first step still goes by the "
        "learning rate that the checkpoint holds (0 where its schedule had run out), the others by the new schedule"
    )


def stream_position(folder: str | Path) -> tuple[int, int]:
    """Where in a data set without a length a run stood when it saved a checkpoint.

    transformers takes an epoch of such a set to be `max_steps` long and so looks for the position in the first pass.
    What it saves as `epoch` tells it: the number of the pass, and the steps taken in it as a share of `max_steps`.

    Returns:
        Whole passes before it, and the optimizer steps of the pass it was in (at least one).
    """
    state = json.loads(Path(folder, _STATE).read_text())
    passes = max(0, math.ceil(state["epoch"]) - 1)
    return passes, round((state["epoch"] - passes) * state["max_steps"])


def bank_file(args: TrainingArguments) -> str:
    """The name of the file that holds this process's part of the memory bank."""
    return "memory_bank.pt" if args.world_size == 1 else f"memory_bank_{args.process_index}.pt"


def save_bank(bank: MemoryBank | None, folder: str | Path, args: TrainingArguments) -> None:
    """Saves a memory bank, or that it is still empty."""
    state: dict[str, Any] = {} if bank is None else bank.state_dict()
    # This process may be here before the one that makes the folder.
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(state, Path(folder, bank_file(args)))


def load_bank(size: int, folder: str | Path, args: TrainingArguments) -> MemoryBank | None:
    """Loads a memory bank as it was saved.

    Raises:
        ValueError: it was saved with another size.
    """
    state = torch.load(Path(folder, bank_file(args)), map_location="cpu", weights_only=True)
    if not state:
        return None
    saved = state["_extra_state"]["size"]
    if saved != size:
        raise ValueError(f"the checkpoint {str(folder)!r} has memory_bank_size={saved}, this run {size}")
    images = state["_images"]
    bank = MemoryBank(size, images.shape[1], dtype=images.dtype, device=args.device)
    bank.load_state_dict(state)
    return bank
