"""What the trainer's tests share: pairs without pictures to decode, and runs of a few steps."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from hf_infcl import InfCLConfig, InfCLTrainer
from tests.tiny import tiny_batch, tiny_clip


class Rows(Dataset):
    """Rows that are tensors already, all different: `ids` are the row's number in both columns."""

    def __init__(self, n: int, family: str = "clip", ids: list[tuple[int, int]] | None = None, seed: int = 0):
        batch = tiny_batch(family, n, seed)
        self.rows = [{name: value[i] for name, value in batch.items()} for i in range(n)]
        for i, row in enumerate(self.rows):
            row["ids"] = torch.tensor((i, i) if ids is None else ids[i])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]

    def ids(self, index: int) -> tuple[int, ...]:
        return tuple(self.rows[index]["ids"].tolist())


class Stream(IterableDataset):
    """The rows of a data set one after the other, without a length."""

    def __init__(self, rows: Rows):
        self._rows = rows

    def __iter__(self):
        return (self._rows[i] for i in range(len(self._rows)))


def stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def config(folder: Path, **options: Any) -> InfCLConfig:
    """Few steps, no files, nothing reported; the options come on top."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "use_cpu": True,
    }
    return InfCLConfig(str(folder), **{**defaults, **options})


def trainer(folder: Path, model: nn.Module | None = None, n: int = 16, **options: Any) -> InfCLTrainer:
    """A trainer over `n` rows; what is no field of the configuration goes to the trainer."""
    own = ("loss", "peft_config", "train_dataset", "eval_dataset", "compute_metrics", "callbacks", "optimizers")
    given = {name: options.pop(name) for name in own if name in options}
    given.setdefault("train_dataset", Rows(n))
    model = tiny_clip() if model is None else model
    return InfCLTrainer(model, config(folder, **options), data_collator=stack, **given)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "init_lora_weights": False, **options})


def dropout_clip(p: float = 0.5) -> nn.Module:
    """A tiny CLIP with attention dropout in both towers."""
    model = tiny_clip()
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = p
    return model


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
