"""What a run is about to do, in one line."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from hf_infcl.hub import find_peft_model
from hf_infcl.ops import resolve_backend


def describe_run(trainer: Any) -> str:
    """The data, what is trained, the batch and the device of an `InfCLTrainer`, in one line.

    Args:
        trainer: the trainer, before or after its run.

    Returns:
        Such as "8,192 training pairs, 1,024 evaluation pairs; 0.2 of 1.5 million parameters trained, an adapter in both
        towers; contrastive batch 1,024 = 64 a micro-batch x 16 accumulated x 1 process; ContrastiveLoss by torch on
        cpu".

    Raises:
        ValueError: the loss's backend cannot run on the device.
    """
    args, parameters = trainer.args, list(trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    what = "an adapter " if find_peft_model(trainer.model) is not None else ""
    processes = f"{args.world_size} process" + ("" if args.world_size == 1 else "es")
    return "; ".join(
        (
            f"{_pairs(trainer.train_dataset, 'training')}, {_pairs(trainer.eval_dataset, 'evaluation')}",
            f"{trained:,} of {sum(parameter.numel() for parameter in parameters):,} parameters trained, "
            f"{what}in {_WHERE[trainer.trained_sides]}",
            f"contrastive batch {args.contrastive_batch_size:,} = {args.train_batch_size:,} a micro-batch x "
            f"{args.gradient_accumulation_steps:,} accumulated x {processes}",
            f"{type(trainer.loss).__name__}{_backend(trainer)} on {args.device}",
        )
    )


# By whether anything is trained on the image side and on the text side.
_WHERE = {
    (True, True): "both towers",
    (True, False): "the vision tower only",
    (False, True): "the text tower only",
    (False, False): "neither tower",
}


def _pairs(dataset: Any, kind: str) -> str:
    count = count_rows(dataset)
    return f"{count} {kind} pair{'' if count == '1' else 's'}"


def count_rows(dataset: Any) -> str:
    """How many rows a data set, or each of a dictionary of such, has; a stream is called one."""
    if isinstance(dataset, Mapping):
        return " + ".join(map(count_rows, dataset.values()))
    if dataset is None:
        return "no"
    return "a stream of" if isinstance(dataset, IterableDataset) else f"{len(dataset):,}"


def _backend(trainer: Any) -> str:
    """Nothing is known of a loss of the user's own."""
    if trainer.loss_type is None:
        return ""
    return f" by {resolve_backend(trainer.args.loss_backend, trainer.args.device, trainer.loss_dtype)}"
