"""From the arguments of a recipe to the objects a trainer takes."""

import logging
import re
from typing import TYPE_CHECKING, Any

from hf_infcl.cli.arguments import AUTO_SPLIT

if TYPE_CHECKING:
    from hf_infcl.cli.arguments import DatasetArguments, ModelArguments, ScriptArguments
    from hf_infcl.trainer import InfCLConfig

logger = logging.getLogger(__name__)


def load_datasets(script_args: "ScriptArguments", training_args: "InfCLConfig") -> tuple[Any, Any]:
    """The training and the evaluation split that a recipe names.

    Returns:
        Both as `load_image_text_dataset` gives them; the second is None where no test split is wanted, and where none
        was named, none is there and `eval_strategy` asks for no evaluation.

    Raises:
        ValueError: the split to evaluate on is not there, or `eval_strategy` asks for evaluations without one.
    """
    from transformers import IntervalStrategy

    train = _split(script_args, training_args, script_args.dataset_train_split, script_args.dataset_streaming)
    train = first_rows(train, script_args.max_train_samples)
    if script_args.dataset_test_split is None:
        if training_args.eval_strategy != "no":
            strategy = IntervalStrategy(training_args.eval_strategy).value
            raise ValueError(
                f"eval_strategy is {strategy!r} but dataset_test_split is none; "
                "name a split to evaluate on, or set eval_strategy to no"
            )
        return train, None
    test = _test_split(script_args, training_args, script_args.dataset_test_split)
    return train, None if test is None else first_rows(test, script_args.max_eval_samples)


def _test_split(script_args: "ScriptArguments", training_args: Any, wanted: str) -> Any:
    """The split to evaluate on; None where nobody asked for one and there is none."""
    try:
        return _split(script_args, training_args, "test" if wanted == AUTO_SPLIT else wanted, streaming=False)
    except MissingSplitError as error:
        train, test = held_back(script_args.dataset_train_split)
        lines = f'`dataset_train_split: "{train}"` and `dataset_test_split: "{test}"`'
        if wanted == AUTO_SPLIT and training_args.eval_strategy == "no":
            if training_args.process_index == 0:
                logger.warning(
                    "training without evaluation: %s; dataset_test_split names another. To hold a tenth back: %s",
                    error,
                    lines,
                )
            return None
        also = "" if training_args.eval_strategy == "no" else " and `eval_strategy: no`"
        raise ValueError(
            f"{error}; name a split to evaluate on by dataset_test_split, hold a tenth back by {lines}, or train "
            f"without evaluation: `dataset_test_split: none`{also}"
        ) from error


class MissingSplitError(ValueError):
    """The data set has other splits than the one asked for.

    Attributes:
        there: their names.
    """

    def __init__(self, dataset: str, split: str, there: list[str]):
        super().__init__(f"{dataset} has no split {split!r} (it has {', '.join(there)})")
        self.there = there


def held_back(split: str) -> tuple[str, str]:
    """A split as two slices, nine tenths to train on and one to evaluate on.

    Example:
        >>> held_back("train")
        ('train[:90%]', 'train[90%:]')
    """
    name = re.split(r"[\[+]", split)[0]
    return f"{name}[:90%]", f"{name}[90%:]"


def _splits_named_in(error: ValueError) -> list[str]:
    """The splits that a loader lists where it lacks the one asked for; none for any other error."""
    found = re.search(
        r"(?:split=.* is not in .*; it has |Should be one of \[|Available splits: \[)([^\]]*)", str(error)
    )
    return re.sub(r"['\"]", "", found[1]).split(", ") if found else []


def _configs_named_in(error: ValueError) -> list[str]:
    """The configurations that `datasets` lists where none was named, or one that is not there."""
    found = re.search(r"(?:available configs: |BuilderConfig .* not found\. Available: )\[([^\]]*)\]", str(error))
    return re.sub(r"['\"]", "", found[1]).split(", ") if found else []


def load_split(data: "DatasetArguments", split: str, **options: Any) -> Any:
    """One split of the data set that a command names.

    Args:
        data: where it is, and how it is read.
        split: which one, or a slice of it.
        options: further ones of `load_image_text_dataset`, such as the columns.

    Raises:
        MissingSplitError: it has no such split.
        ValueError, OSError: as `load_image_text_dataset`.
    """
    from hf_infcl.data import load_image_text_dataset

    try:
        return load_image_text_dataset(
            data.dataset_name,
            config=data.dataset_config,
            split=split,
            revision=data.dataset_revision,
            image_root=data.image_root,
            delimiter=data.delimiter,
            encoding=data.encoding,
            **options,
        )
    except ValueError as error:
        if configs := _configs_named_in(error):
            lacks = (
                "several configurations" if data.dataset_config is None else f"no configuration {data.dataset_config!r}"
            )
            raise ValueError(
                f"{data.dataset_name} has {lacks}; name one of {', '.join(configs)}: --dataset_config {configs[0]}"
            ) from error
        there = _splits_named_in(error)
        if not there:
            raise
        raise MissingSplitError(data.dataset_name, split, there) from error


def first_rows(dataset: Any, count: int | None) -> Any:
    """The first `count` rows of a table or a stream; all of them for None."""
    if count is None:
        return dataset
    if hasattr(dataset, "__len__"):
        return dataset.select(range(min(count, len(dataset))))
    return dataset.take(count)


def _split(script_args: "ScriptArguments", training_args: Any, split: str, streaming: bool) -> Any:
    return load_split(
        script_args,
        split,
        image_column=training_args.image_column,
        caption_column=training_args.caption_column,
        on_bad_image=training_args.on_bad_image,
        streaming=streaming,
    )


def model_init_kwargs(training_args: "InfCLConfig", model_args: "ModelArguments") -> dict[str, Any]:
    """What `from_pretrained` gets: the recipe's `model_init_kwargs` and the model arguments, which win."""
    given: Any = training_args.model_init_kwargs  # TrainingArguments has read a JSON string into a dictionary by now
    kwargs: dict[str, Any] = dict(given or {})
    for name, value in (
        ("revision", model_args.model_revision),
        ("dtype", model_args.dtype),
        ("attn_implementation", model_args.attn_implementation),
    ):
        if value is not None:
            kwargs[name] = value
    return kwargs


def lora_config(model_args: "ModelArguments") -> Any:
    """The adapter that a recipe asks for, or None. A lone target with a sign of regular expressions is one."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    targets: list[str] | str | None = model_args.lora_target_modules
    if targets and len(targets) == 1 and (targets[0] == "all-linear" or set(targets[0]) & set("*+|()[]^$\\")):
        targets = targets[0]
    return LoraConfig(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=targets,
        modules_to_save=model_args.lora_modules_to_save,
        task_type=model_args.lora_task_type,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )
