"""Checkpoints: whether one belongs to this run, and the state that transformers does not save."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import TrainingArguments

from hf_infcl.hub import find_peft_model
from hf_infcl.losses import MemoryBank

_ADAPTER, _MODEL, _INDEX = "adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json"
_TEMPERATURE = ("base_model.model.logit_scale", "base_model.model.logit_bias")
_SHOWN = 3


def check_checkpoint(path: str | Path, model: nn.Module, args: TrainingArguments, *, needs_bank: bool) -> None:
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
    needed = ["trainer_state.json", "optimizer.pt", "scheduler.pt", f"rng_state{suffix}.pth"]
    needed += [bank_file(args)] if needs_bank else []
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"the checkpoint {str(path)!r} lacks {', '.join(missing)}: training cannot go on exactly where it stopped "
            "(save_only_model=True writes checkpoints that can be loaded, but not resumed from)"
        )
    _check_weights(folder, model)


def _check_weights(folder: Path, model: nn.Module) -> None:
    peft_model = find_peft_model(model)
    wanted: dict[str, tuple[int, ...]]
    if peft_model is not None:
        files = [folder / _ADAPTER]
        state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    else:
        files = [folder / _MODEL]
        if not files[0].is_file() and (folder / _INDEX).is_file():
            shards = json.loads((folder / _INDEX).read_text())["weight_map"].values()
            files = [folder / name for name in sorted(set(shards))]
        state = model.state_dict()
    wanted = {name: tuple(value.shape) for name, value in state.items()}
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        kind = "an adapter" if peft_model is not None else "a whole model"
        raise ValueError(f"the checkpoint {str(folder)!r} lacks {', '.join(absent)}: this run trains {kind}")
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    # Of tensors that share their memory one stands for all in the file.
    shared = {value.data_ptr() for name, value in state.items() if name in found}
    lacking = [name for name in wanted if name not in found and state[name].data_ptr() not in shared]
    surplus = [name for name in found if name not in wanted and name not in _TEMPERATURE]
    other = [name for name in wanted if name in found and found[name] != wanted[name]]
    problems = []
    for what, names in (("lacks", lacking), ("has besides", surplus)):
        if names:
            problems.append(f"it {what} {len(names)} tensors ({', '.join(names[:_SHOWN])})")
    if other:
        name = other[0]
        problems.append(f"{len(other)} tensors have another shape ({name}: {found[name]} instead of {wanted[name]})")
    if problems:
        raise ValueError(f"the checkpoint {str(folder)!r} is of another model: {'; '.join(problems)}")


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
