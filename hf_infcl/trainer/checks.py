"""What is refused before the first step, with what came, what was expected and what to do about it."""

import difflib
import os
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftConfig
from torch import nn
from transformers import TrainingArguments

from hf_infcl.evaluation import dataset_retrieval_metrics
from hf_infcl.models import logit_bias_parameter, logit_scale_parameter, unreachable_parameters, unwrap
from hf_infcl.trainer.config import InfCLConfig

_SHOWN = 5
# What transformers adds to the metrics of an evaluation.
_SPEED_METRICS = ("runtime", "samples_per_second", "steps_per_second")


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextmanager
def failing_together() -> Iterator[None]:
    """What is refused inside on one process is refused on every process.

    Raises:
        ValueError: one process's; with several of them, what each that refused had to say.
    """
    refused: ValueError | None = None
    try:
        yield
    except ValueError as error:
        refused = error
    if not (dist.is_available() and dist.is_initialized()):
        if refused is not None:
            raise refused
        return
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if refused is None else str(refused))
    said = [f"process {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
    if said:
        raise ValueError("; ".join(said)) from refused


def check_arguments(args: TrainingArguments) -> None:
    """Options of transformers that contradict a loss over the whole batch."""
    if not isinstance(args, InfCLConfig):
        raise ValueError(
            f"args must be an InfCLConfig, got {type(args).__name__}; use InfCLConfig(...), which takes the same "
            "arguments"
        )
    output_dir = Path(args.output_dir)
    blocking = next((path for path in (output_dir, *output_dir.absolute().parents) if path.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise ValueError(f"output_dir={args.output_dir!r} cannot be made a folder: {str(blocking)!r} is a file")
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process, which transformers would use by DataParallel. Start one "
            f"process for each: `accelerate launch --num_processes {args.n_gpu} <script>`, or show this process one "
            "GPU: CUDA_VISIBLE_DEVICES=0"
        )
    if args.auto_find_batch_size and args.world_size > 1:
        raise ValueError(
            "auto_find_batch_size needs a single process: memory may run out on one and not on the others; set "
            "per_device_train_batch_size and gradient_accumulation_steps"
        )
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer in ("lomo", "adalomo"):
        raise ValueError(
            f"optim={optimizer} updates weights during the backward pass, between the micro-batches of one "
            "contrastive batch; choose another optimizer"
        )
    if args.batch_eval_metrics:
        raise ValueError("batch_eval_metrics would score one evaluation batch at a time; leave it out")
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} sorts text by length; use 'random' or "
            "'sequential'"
        )


def check_strategy(*, fsdp: bool, deepspeed: bool) -> None:
    """That the weights are whole on every process, whether arguments or launcher asked for them to be sharded."""
    if fsdp or deepspeed:
        raise ValueError(
            f"{'FSDP' if fsdp else 'DeepSpeed'} is not supported; start the processes by `accelerate launch` without "
            "it, which trains by DistributedDataParallel"
        )


def check_trainable(model: nn.Module, loss_type: str | None) -> None:
    """That there is something to train, and that the loss reaches it.

    Args:
        model: the prepared model.
        loss_type: None for a loss of the user's own, of which nothing is known.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError(
            "the model has no trainable parameter; unfreeze some, leave out freeze_vision_model or freeze_text_model, "
            "or pass peft_config"
        )
    unreachable = unreachable_parameters(model, loss_type) if loss_type is not None else []
    if unreachable:
        raise ValueError(
            f"{len(unreachable)} trainable parameters do not reach the {loss_type} loss: {listed(unreachable)}. Freeze "
            "them (requires_grad_(False)), leave them out of the adapter's target_modules, or set "
            "train_logit_scale=False for logit_bias"
        )


def check_gradients_are_averaged(model: nn.Module, world_size: int) -> None:
    """Of several processes none may go by its own gradients alone, which no figure of a run would show.

    Raises:
        RuntimeError: the model that is about to be trained is not wrapped by DistributedDataParallel.
    """
    is_wrapped = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())
    if world_size > 1 and not is_wrapped:
        raise RuntimeError(
            f"{world_size} processes train together, but the model that Accelerate prepared, a "
            f"{type(model).__name__}, is not wrapped by DistributedDataParallel: each would learn from its own "
            "gradients. Hand the trainer a model that accelerator.prepare() has not seen"
        )


def check_temperature(model: nn.Module, loss_type: str | None) -> None:
    """That the loss gets the multiplier and the bias it needs."""
    name = type(unwrap(model)).__name__
    if logit_scale_parameter(model) is None:
        raise ValueError(f"{name} has no logit_scale parameter")
    if loss_type == "sigmoid" and logit_bias_parameter(model) is None:
        raise ValueError(f"loss_type='sigmoid' needs a logit_bias, which {name} lacks; use loss_type='contrastive'")


def check_kinds(train_dataset: Any, eval_dataset: Any, loss: Any, peft_config: Any = None) -> None:
    """That data sets are data sets, not names or dictionaries of splits; likewise the loss and the adapter."""
    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        raise ValueError(
            f"peft_config must be a PeftConfig, got {type(peft_config).__name__}; pass one such as "
            "peft.LoraConfig(r=16)"
        )
    if isinstance(train_dataset, dict):
        first = "train" if "train" in train_dataset else next(iter(train_dataset), "train")
        raise ValueError(
            f"train_dataset is a {type(train_dataset).__name__} of {listed(map(str, train_dataset)) or 'nothing'}; "
            f"pass one of its data sets, such as train_dataset[{first!r}]"
        )
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    for name, split, datasets in (("train_dataset", "train", [train_dataset]), ("eval_dataset", "test", evaluated)):
        for dataset in datasets:
            if isinstance(dataset, str | os.PathLike):
                text = os.fspath(dataset)
                raise ValueError(
                    f"{name} is the name {text!r}; load it: "
                    f"hf_infcl.data.load_image_text_dataset({text!r}, split={split!r})"
                )
    if loss is not None and not isinstance(loss, nn.Module):
        kind = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
        raise ValueError(
            f"loss is {kind}; pass an instance of a module with ContrastiveLoss's forward, or name one by loss_type"
        )


def check_train_dataset(args: InfCLConfig, dataset: Any, least_rows: int) -> None:
    """That one contrastive batch can be made up, and has something to contrast.

    Args:
        args: the configuration.
        dataset: the training set, or None.
        least_rows: rows that a contrastive batch needs for its loss to have a gradient.
    """
    size = args.contrastive_batch_size
    options = (
        f"per_device_train_batch_size={args.per_device_train_batch_size} x "
        f"gradient_accumulation_steps={args.gradient_accumulation_steps} x {args.world_size} process(es)"
    )
    if size < least_rows:
        raise ValueError(
            f"a contrastive batch of one pair ({options}) has no negatives: a softmax loss is 0 and nothing is "
            "learnt. Use at least 2, a memory bank (memory_bank_size), or loss_type='sigmoid'"
        )
    # The length of a streamed data set is not known, or not to be trusted.
    if dataset is None or not isinstance(dataset, Sized) or isinstance(dataset, torch.utils.data.IterableDataset):
        return
    if args.batch_sampler == "no_duplicates" and not callable(getattr(dataset, "ids", None)):
        raise ValueError(
            "batch_sampler='no_duplicates' needs the ids of all rows beforehand: train_dataset has no method "
            f"ids(index) (it is a {type(dataset).__name__})"
        )
    n = len(dataset)
    if n < size:
        raise ValueError(
            f"train_dataset has {n} rows, fewer than one contrastive batch of {size} ({options}). Reduce "
            "per_device_train_batch_size or gradient_accumulation_steps"
        )


def check_eval_dataset(dataset: Any, world_size: int) -> None:
    """That every process has a row to embed.

    Args:
        dataset: an evaluation set, a dictionary of such, or None.
        world_size: processes.
    """
    if isinstance(dataset, dict):
        for one in dataset.values():
            check_eval_dataset(one, world_size)
    elif isinstance(dataset, Sized) and not isinstance(dataset, torch.utils.data.IterableDataset):
        n = len(dataset)
        if n == 0:
            raise ValueError("the evaluation set has no rows")
        if n < world_size:
            raise ValueError(
                f"the evaluation set has {n} rows, fewer than the {world_size} processes; evaluate on more rows or on "
                "fewer processes"
            )


def metric_names() -> list[str]:
    """Names of the metrics that an evaluation gives, without prefix."""
    rows = torch.eye(11)  # more candidates than the largest k
    return ["loss", *dataset_retrieval_metrics(rows, rows), *_SPEED_METRICS]


def resolve_best_metric(name: str, eval_dataset: Any, has_compute_metrics: bool) -> str:
    """Returns the metric's name as evaluations will give it, with several evaluation sets the first one's.

    Raises:
        ValueError: no evaluation will give it; suggests the nearest.
    """
    bare = name.removeprefix("eval_")
    known = metric_names()
    if isinstance(eval_dataset, dict):
        if bare in known and eval_dataset:
            return f"{next(iter(eval_dataset))}_{bare}"
        known = [f"{key}_{metric}" for key in eval_dataset for metric in known]
    # compute_metrics may give any name.
    if bare in known or has_compute_metrics:
        return bare
    near = difflib.get_close_matches(bare, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(
        f"metric_for_best_model={name!r} is no metric of the evaluation; {hint}There are: {', '.join(known)}"
    )
