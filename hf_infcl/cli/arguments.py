"""What a recipe or a command says besides the training arguments: the data and the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

AUTO_SPLIT = "auto"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class DatasetArguments:
    """Where a data set is, and how it is read.

    Args:
        dataset_name (`str`): Hub id, a local file or folder, or the built-in scenes: `sample:drawing`, `sample:photo`.
        dataset_config (`str`, *optional*): configuration of the data set.
        dataset_revision (`str`, *optional*): branch, tag or commit of the data set on the Hub.
        image_root (`str`, *optional*): folder that relative image paths start from.
        delimiter (`str`, *optional*): separator of a CSV; by default the one its header has.
        encoding (`str`, *optional*): encoding of a text table; by default UTF-8 or what its byte-order mark says.
    """

    dataset_name: str = field(
        metadata={"help": "Hub id, a local file or folder, or the built-in scenes: sample:drawing, sample:photo."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the data set on the Hub."}
    )
    image_root: str | None = field(
        default=None, metadata={"help": "Folder that relative image paths start from (default: the table's own)."}
    )
    delimiter: str | None = field(
        default=None, metadata={"help": "Separator of a CSV (default: the one its header has)."}
    )
    encoding: str | None = field(
        default=None, metadata={"help": "Encoding of a text table (default: UTF-8, or by its byte-order mark)."}
    )


@dataclass
class ScriptArguments(DatasetArguments):
    """The data of a run.

    Args: those of `DatasetArguments`, and
        dataset_train_split (`str`, defaults to `"train"`): split to train on.
        dataset_test_split (`str`, defaults to `"auto"`): split to evaluate on; `none` for no evaluation, `auto` for
            `test` where there is one.
        dataset_streaming (`bool`, defaults to `False`): read the training split as a stream, without downloading it.
        max_train_samples (`int`, *optional*): train on the first so many rows.
        max_eval_samples (`int`, *optional*): evaluate on the first so many rows.
        evaluate_base (`bool`, defaults to `True`): evaluate before training too, for the model card's comparison.
    """

    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str | None = field(
        default=AUTO_SPLIT,
        metadata={"help": "Split to evaluate on; none for no evaluation, auto for test where there is one."},
    )
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Read the training split as a stream, without downloading it."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many rows."})
    evaluate_base: bool = field(
        default=True, metadata={"help": "Evaluate before training too, for the model card's comparison."}
    )

    def __post_init__(self) -> None:
        if self.dataset_test_split is not None and self.dataset_test_split.lower() in ("none", "null", ""):
            self.dataset_test_split = None
        check_counts(self, "max_train_samples", "max_eval_samples")


@dataclass
class EmbeddingArguments(DatasetArguments):
    """The data set that is embedded, and with what.

    Args: those of `DatasetArguments`, and
        model_name_or_path (`str`): Hub id or folder of a model, or of an adapter that names its base.
        adapter (`str`, *optional*): Hub id or folder of an adapter to put on the model.
        model_revision (`str`, *optional*): branch, tag or commit of `model_name_or_path`.
        dtype (`str`, *optional*): dtype of the weights; by default the one they were saved in.
        image_column (`str`, *optional*): column of the images; found by type where not given.
        caption_column (`str`, *optional*): column of the captions; each of several captions an image counts.
        on_bad_image (`str`, defaults to `"raise"`): what an unreadable picture means: `raise`, or `skip` it.
        empty_captions (`str`, defaults to `"raise"`): what a row without a caption means: `raise`, or `drop`.
        per_device_eval_batch_size (`int`, defaults to 64): pairs embedded at once; changes no result.
        dataloader_num_workers (`int`, defaults to 0): processes that read and prepare images.
    """

    model_name_or_path: str = field(
        kw_only=True, metadata={"help": "Hub id or folder of a model, or of an adapter that names its base."}
    )
    adapter: str | None = field(default=None, metadata={"help": "Hub id or folder of an adapter to put on the model."})
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model."})
    dtype: str | None = field(
        default=None, metadata={"help": "Dtype of the weights: float32, bfloat16, float16; by default as saved."}
    )
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found where not given."})
    caption_column: str | None = field(
        default=None, metadata={"help": "Column of the captions; each of several captions an image counts."}
    )
    on_bad_image: Literal["raise", "skip"] = field(
        default="raise", metadata={"help": "What an unreadable picture means: raise, or skip to leave it out, counted."}
    )
    empty_captions: Literal["raise", "drop"] = field(
        default="raise",
        metadata={"help": "What a row without a caption means: raise, or drop to leave it out, counted."},
    )
    per_device_eval_batch_size: int = field(
        default=64, metadata={"help": "Pairs embedded at once. The result does not depend on it."}
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that read and prepare images."})

    def __post_init__(self) -> None:
        check_counts(self, "per_device_eval_batch_size")
        check_counts(self, "dataloader_num_workers", least=0)
        check_choice(self, "dtype", DTYPES)


def check_counts(arguments: Any, *names: str, least: int = 1) -> None:
    """Refuses counts below the least there can be; None is no count."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")


def check_choice(arguments: Any, name: str, choices: Sequence[str]) -> None:
    """Refuses what is none of the choices; None is no choice."""
    value = getattr(arguments, name)
    if value is not None and value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices)}")


@dataclass
class ModelArguments:
    """The model of a run and its adapter.

    Args:
        model_name_or_path (`str`): Hub id or folder of the dual encoder.
        model_revision (`str`, *optional*): branch, tag or commit on the Hub.
        dtype (`str`, *optional*): `float32`, `bfloat16`, `float16` or `auto` (as saved); `float32` where it is trained.
        attn_implementation (`str`, *optional*): attention of both towers, such as `sdpa` or `eager`.
        use_peft (`bool`, defaults to `False`): train a LoRA adapter instead of the whole model.
        lora_r (`int`, defaults to 16): rank. Larger learns more and costs more.
        lora_alpha (`int`, defaults to 32): scale of the update, relative to the rank.
        lora_dropout (`float`, defaults to 0.05): dropout before the adapter.
        lora_target_modules (`list[str]`, *optional*): names or one regex; by default both towers' linear layers.
        lora_modules_to_save (`list[str]`, *optional*): modules trained in full and saved with the adapter.
        lora_task_type (`str`, *optional*): PEFT's task type; leave it out, dual encoders have none.
        use_rslora (`bool`, defaults to `False`): rank-stabilised scale, alpha / sqrt(r).
        use_dora (`bool`, defaults to `False`): weight-decomposed adapter.
    """

    model_name_or_path: str = field(metadata={"help": "Hub id or folder of the dual encoder."})
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit on the Hub."})
    dtype: str | None = field(
        default=None,
        metadata={"help": "Dtype of the weights: float32, bfloat16, float16, or auto (as saved)."},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention of both towers, such as sdpa or eager."}
    )
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter instead of the whole model."})
    lora_r: int = field(default=16, metadata={"help": "Rank. Larger learns more and costs more."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the update, relative to the rank."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapter."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Module names or one regex; by default both towers' linear layers."}
    )
    lora_modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained in full and saved with the adapter."}
    )
    lora_task_type: str | None = field(
        default=None, metadata={"help": "PEFT's task type; leave it out, dual encoders have none."}
    )
    use_rslora: bool = field(default=False, metadata={"help": "Rank-stabilised scale, alpha / sqrt(r)."})
    use_dora: bool = field(default=False, metadata={"help": "Weight-decomposed adapter (DoRA)."})

    def __post_init__(self) -> None:
        check_choice(self, "dtype", DTYPES)
