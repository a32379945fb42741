"""What a recipe says besides the training arguments: the data and the model."""

import logging
from dataclasses import dataclass, field, fields

logger = logging.getLogger(__name__)

AUTO_SPLIT = "auto"


@dataclass
class ScriptArguments:
    """The data of a run.

    Args:
        dataset_name (`str`): Hub id, a local file or folder, or the built-in scenes: `sample:drawing`, `sample:photo`.
        dataset_config (`str`, *optional*): configuration of the data set.
        dataset_revision (`str`, *optional*): branch, tag or commit of the data set on the Hub.
        dataset_train_split (`str`, defaults to `"train"`): split to train on.
        dataset_test_split (`str`, defaults to `"auto"`): split to evaluate on; `none` for no evaluation, `auto` for
            `test` where there is one.
        dataset_streaming (`bool`, defaults to `False`): read the training split as a stream, without downloading it.
        image_root (`str`, *optional*): folder that relative image paths start from.
        delimiter (`str`, *optional*): separator of a CSV; by default the one its header has.
        encoding (`str`, *optional*): encoding of a text table; by default UTF-8 or what its byte-order mark says.
        max_train_samples (`int`, *optional*): train on the first so many rows.
        max_eval_samples (`int`, *optional*): evaluate on the first so many rows.
        evaluate_base (`bool`, defaults to `True`): evaluate before training too, for the model card's comparison.
    """

    dataset_name: str = field(
        metadata={"help": "Hub id, a local file or folder, or the built-in scenes: sample:drawing, sample:photo."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the data set on the Hub."}
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str | None = field(
        default=AUTO_SPLIT,
        metadata={"help": "Split to evaluate on; none for no evaluation, auto for test where there is one."},
    )
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Read the training split as a stream, without downloading it."}
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
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many rows."})
    evaluate_base: bool = field(
        default=True, metadata={"help": "Evaluate before training too, for the model card's comparison."}
    )

    def __post_init__(self) -> None:
        if self.dataset_test_split is not None and self.dataset_test_split.lower() in ("none", "null", ""):
            self.dataset_test_split = None
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")


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
        dtypes = (None, "auto", "float32", "bfloat16", "float16")
        if self.dtype not in dtypes:
            raise ValueError(f"dtype is {self.dtype!r}; expected one of {', '.join(str(name) for name in dtypes[1:])}")
        adapter = [entry for entry in fields(self) if entry.name.startswith(("lora_", "use_rslora", "use_dora"))]
        changed = [entry.name for entry in adapter if getattr(self, entry.name) != entry.default]
        if changed and not self.use_peft:
            logger.warning("%s have no effect without use_peft: the whole model is trained", ", ".join(changed))
