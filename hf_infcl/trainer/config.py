"""The options of a contrastive fine-tuning run."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from hf_infcl.trainer.hardware import check_bf16, check_device, join_on_cpu, meets_on_cpu
from hf_infcl.trainer.naming import suggesting_names

_KIND_NAMES: dict[type, str] = {int: "an integer", float: "a number"}
LOSS_TYPES = ("contrastive", "hard_negative", "sigmoid")
BATCH_SAMPLERS = ("batch_sampler", "no_duplicates")
DEFAULT_BEST_METRIC = "mean_recall@1"
# Of the metrics an evaluation reports, those that get better by getting smaller.
_SMALLER_IS_BETTER = ("loss", "median_rank")


@suggesting_names("field")
@dataclass
class InfCLConfig(TrainingArguments):
    """Configuration of the `InfCLTrainer`.

    Holds what is particular to contrastive fine-tuning; everything else is `transformers.TrainingArguments`. The batch
    that is contrasted, every image with every text, is `per_device_train_batch_size` x `gradient_accumulation_steps` x
    processes, exactly: memory follows the first, quality the product.

    Parameters:
        > Parameters that control the model

        model_init_kwargs (`dict` or `str`, *optional*):
            Keyword arguments for `from_pretrained`, used when the trainer is given its model by name.
        freeze_vision_model (`bool`, defaults to `False`):
            Whether to lock the vision tower and its pretrained projection (locked-image tuning).
        freeze_text_model (`bool`, defaults to `False`):
            Whether to lock the text tower and its pretrained projection.
        train_logit_scale (`bool`, *optional*):
            Whether the logit scale (and SigLIP's logit bias) is trained. By default it is, except with a PEFT adapter.
        logit_scale_max (`float`, *optional*):
            Largest multiplier of the cosines, enforced at the start and after every step. By default what the family
            was trained under: 100 for CLIP, none for SigLIP. `inf` lifts it.

        > Parameters that control the data

        image_column (`str`, *optional*):
            Column of the dataset that holds the images. Found by its type when not given.
        caption_column (`str`, *optional*):
            Column of the dataset that holds the captions. Found by its type when not given.
        captions (`str`, defaults to `"single"`):
            What becomes of several captions of an image: `draw` one per epoch by the seed, `expand` them to rows, or
            `single` to refuse them. Evaluation expands them in either case.
        empty_captions (`str`, defaults to `"raise"`):
            What a row without a caption means: `raise`, or `drop` to leave such rows out, counted.
        on_bad_image (`str`, defaults to `"raise"`):
            What an unreadable or missing picture means: `raise`, or `skip` to read every picture once beforehand and
            leave the pairs with bad ones out, counted.
        batch_sampler (`str`, defaults to `"batch_sampler"`):
            How contrastive batches are drawn: `batch_sampler` in the sampler's order, `no_duplicates` so that no two
            rows of one batch share an id (image or caption).

        > Parameters that control the loss

        loss_type (`str`, *optional*):
            What is minimised: `contrastive` (symmetric InfoNCE), `hard_negative` (the hardest negatives only) or
            `sigmoid` (SigLIP's, for models with a logit bias). By default what the family was pretrained with.
        duplicates (`str`, defaults to `"mask"`):
            What becomes of other rows with the same image or caption: `mask` leaves them out of the negatives,
            `positive` makes them positives, `keep` takes them for negatives.
        num_hard_negatives (`int`, defaults to `64`):
            Hardest negatives kept per row and direction by `hard_negative`.
        hard_negative_block_size (`int`, *optional*):
            Columns of a block in the search for hard negatives. Changes memory and speed, not the result.
        hard_negative_start (`float`, defaults to `0`):
            Step (or, below 1, share of training) from which `hard_negative` replaces plain InfoNCE.
        absolute_margin (`float`, *optional*):
            Candidates that score above the pair's own cosine less this margin are held for unlabelled positives and
            left out by `hard_negative`.
        relative_margin (`float`, *optional*):
            The same with a margin relative to the pair's own cosine: pos - |pos| x margin.
        max_score (`float`, *optional*):
            Candidates that score above this cosine are left out by `hard_negative`.
        memory_bank_size (`int`, defaults to `0`):
            Pairs of earlier batches kept as further negatives; 0 for none.
        loss_block_size (`int`, *optional*):
            Rows and columns of a block of the loss. Changes memory and speed, not the result. Chosen when not given.
        loss_backend (`str`, defaults to `"auto"`):
            Backend of the loss: `auto`, `triton` or `torch`.
        loss_precision (`str`, defaults to `"auto"`):
            Precision of the loss's float32 products: `auto`, `ieee`, `tf32` or `tf32x3`.

    These defaults differ from `TrainingArguments`: `logging_steps` is 10, `logging_nan_inf_filter` is `False` (it hides
    what it filters), `ddp_find_unused_parameters` is `False` (parameters the loss cannot reach are refused at the
    start), and the best model is chosen by `mean_recall@1`.

    Example:
        >>> from hf_infcl import InfCLConfig
        >>> args = InfCLConfig("out", per_device_train_batch_size=64, gradient_accumulation_steps=16)  # 1,024 pairs
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    # Defaults that differ from TrainingArguments
    logging_steps: float = field(
        default=10,
        metadata={"help": "Log every X updates steps. Below 1, a share of the total training steps."},
    )
    metric_for_best_model: str | None = field(
        default=None,
        metadata={
            "help": "The metric by which the best model is chosen, as an evaluation names it, with or without `eval_`. "
            "`mean_recall@1` where a best model is kept."
        },
    )
    greater_is_better: bool | None = field(
        default=None,
        metadata={"help": "Whether a greater metric is better. By default it is, but for a loss or a median rank."},
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Whether to leave NaN and infinite losses out of the logs, which hides them."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={
            "help": "Passed to DistributedDataParallel. Unreachable parameters are refused at the start instead."
        },
    )

    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "Checkpoint to go on from: a folder, or `last` for the newest in `output_dir`. For the command "
            "line; in Python, pass it to `trainer.train`, where True means the newest."
        },
    )

    # Parameters that control the model
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Keyword arguments for `from_pretrained`, used when the trainer is given its model by name."},
    )
    freeze_vision_model: bool = field(
        default=False,
        metadata={"help": "Whether to lock the vision tower and its pretrained projection (locked-image tuning)."},
    )
    freeze_text_model: bool = field(
        default=False,
        metadata={"help": "Whether to lock the text tower and its pretrained projection."},
    )
    train_logit_scale: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the logit scale (and SigLIP's logit bias) is trained. By default it is, except with a "
            "PEFT adapter."
        },
    )
    logit_scale_max: float | None = field(
        default=None,
        metadata={
            "help": "Largest multiplier of the cosines, enforced at the start and after every step. By default what "
            "the family was trained under: 100 for CLIP, none for SigLIP. `inf` lifts it."
        },
    )

    # Parameters that control the data
    image_column: str | None = field(
        default=None,
        metadata={"help": "Column of the dataset that holds the images. Found by its type when not given."},
    )
    caption_column: str | None = field(
        default=None,
        metadata={"help": "Column of the dataset that holds the captions. Found by its type when not given."},
    )
    captions: Literal["single", "draw", "expand"] = field(
        default="single",
        metadata={
            "help": "What becomes of several captions of an image: `draw` one per epoch by the seed, `expand` them to "
            "rows, or `single` to refuse them. Evaluation expands them in either case.",
            "choices": ["single", "draw", "expand"],
        },
    )
    empty_captions: Literal["raise", "drop"] = field(
        default="raise",
        metadata={
            "help": "What a row without a caption means: `raise`, or `drop` to leave such rows out, counted.",
            "choices": ["raise", "drop"],
        },
    )
    on_bad_image: Literal["raise", "skip"] = field(
        default="raise",
        metadata={
            "help": "What an unreadable or missing picture means: `raise`, or `skip` to read every picture once "
            "beforehand and leave the pairs with bad ones out, counted.",
            "choices": ["raise", "skip"],
        },
    )
    batch_sampler: str = field(
        default="batch_sampler",
        metadata={
            "help": "How contrastive batches are drawn: `batch_sampler` in the sampler's order, `no_duplicates` so "
            "that no two rows of one batch share an id (image or caption).",
            "choices": list(BATCH_SAMPLERS),
        },
    )

    # Parameters that control the loss
    loss_type: str | None = field(
        default=None,
        metadata={
            "help": "What is minimised: `contrastive` (symmetric InfoNCE), `hard_negative` (the hardest negatives "
            "only) or `sigmoid` (SigLIP's, for models with a logit bias). By default what the family was pretrained "
            "with.",
            "choices": list(LOSS_TYPES),
        },
    )
    duplicates: str = field(
        default="mask",
        metadata={
            "help": "What becomes of other rows with the same image or caption: `mask` leaves them out of the "
            "negatives, `positive` makes them positives, `keep` takes them for negatives.",
            "choices": ["mask", "positive", "keep"],
        },
    )
    num_hard_negatives: int = field(
        default=64,
        metadata={"help": "Hardest negatives kept per row and direction by `hard_negative`."},
    )
    hard_negative_block_size: int | None = field(
        default=None,
        metadata={
            "help": "Columns of a block in the search for hard negatives. Changes memory and speed, not the result."
        },
    )
    hard_negative_start: float = field(
        default=0.0,
        metadata={"help": "Step (or, below 1, share of training) from which `hard_negative` replaces plain InfoNCE."},
    )
    absolute_margin: float | None = field(
        default=None,
        metadata={
            "help": "Candidates that score above the pair's own cosine less this margin are held for unlabelled "
            "positives and left out by `hard_negative`."
        },
    )
    relative_margin: float | None = field(
        default=None,
        metadata={"help": "The same with a margin relative to the pair's own cosine: pos - |pos| x margin."},
    )
    max_score: float | None = field(
        default=None,
        metadata={"help": "Candidates that score above this cosine are left out by `hard_negative`."},
    )
    memory_bank_size: int = field(
        default=0,
        metadata={"help": "Pairs of earlier batches kept as further negatives; 0 for none."},
    )
    loss_block_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows and columns of a block of the loss. Changes memory and speed, not the result. Chosen when "
            "not given."
        },
    )
    loss_backend: str = field(
        default="auto",
        metadata={
            "help": "Backend of the loss: `auto`, `triton` or `torch`.",
            "choices": ["auto", "triton", "torch"],
        },
    )
    loss_precision: str = field(
        default="auto",
        metadata={
            "help": "Precision of the loss's float32 products: `auto`, `ieee`, `tf32` or `tf32x3`.",
            "choices": ["auto", "ieee", "tf32", "tf32x3"],
        },
    )

    def __post_init__(self) -> None:
        self._read_numbers()
        self._choose_best_metric()
        self._check_strategies()
        check_bf16(self)
        self.use_cpu = meets_on_cpu(self)
        join_on_cpu(self)
        super().__post_init__()
        if self.device.type == "cpu":
            # On several processes it is "cpu:0", to which transformers 5.17 cannot restore an optimizer.
            self.__dict__["_setup_devices"] = torch.device("cpu")
        check_device(self)
        self._check_own_fields()

    @property
    def contrastive_batch_size(self) -> int:
        """Pairs that are contrasted with each other in one optimizer step, over all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.world_size

    def _read_numbers(self) -> None:
        """Numbers that came as text, such as the `1e-4` that YAML reads as text, are made numbers here.

        Raises:
            ValueError: the text is no number.
        """
        for name, kind in self._number_fields().items():
            value = getattr(self, name)
            if not isinstance(value, str):
                continue
            try:
                setattr(self, name, kind(value))
            except ValueError:
                raise ValueError(f"{name} must be {_KIND_NAMES[kind]}, got {value!r}") from None

    @classmethod
    def _number_fields(cls) -> dict[str, type]:
        """Fields that are a number or nothing. Those that may be text as well are left to transformers."""
        kinds = {}
        for name, hint in get_type_hints(cls).items():
            parts = set(get_args(hint) or (hint,)) - {type(None)}
            if name in cls.__dataclass_fields__ and len(parts) == 1 and (kind := parts.pop()) in _KIND_NAMES:
                kinds[name] = kind
        return kinds

    def _choose_best_metric(self) -> None:
        """The best model is the one that retrieves best, and a metric that shrinks as it improves is minimised."""
        # A learning rate schedule that waits for a plateau reads the same metric and expects it to fall: the loss.
        follows_metric = self.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
        keeps_best = self.load_best_model_at_end or self.save_strategy == "best"
        if keeps_best and self.metric_for_best_model is None and not follows_metric:
            self.metric_for_best_model = DEFAULT_BEST_METRIC
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith(_SMALLER_IS_BETTER)

    def _check_strategies(self) -> None:
        """As transformers refuses them, in the values that a user writes."""
        evaluates, saves = (str(getattr(it, "value", it)) for it in (self.eval_strategy, self.save_strategy))
        if self.load_best_model_at_end and saves not in ("best", evaluates):
            raise ValueError(
                "load_best_model_at_end=True needs an evaluation for each checkpoint, but eval_strategy is "
                f"{evaluates!r} and save_strategy {saves!r}; set both to the same, or save_strategy='best'"
            )

    def _check_own_fields(self) -> None:
        own = {name: entry for name, entry in self.__dataclass_fields__.items() if "choices" in entry.metadata}
        for name, entry in own.items():
            value, choices = getattr(self, name), entry.metadata["choices"]
            if value not in choices and not (value is None and entry.default is None):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        for name, kind in self._number_fields().items():
            if kind is float and getattr(self, name) is not None and math.isnan(getattr(self, name)):
                raise ValueError(f"{name} must be a number, got nan")
        if self.max_steps <= 0 and not 0 <= self.num_train_epochs < math.inf:
            raise ValueError(f"num_train_epochs must be a finite number >= 0, got {self.num_train_epochs!r}")
        for name, least in (
            ("num_hard_negatives", 1),
            ("hard_negative_block_size", 1),
            ("memory_bank_size", 0),
            ("loss_block_size", 1),
        ):
            value = getattr(self, name)
            if value is None and self.__dataclass_fields__[name].default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        for name in ("hard_negative_start", "logit_scale_max"):
            value = getattr(self, name)
            if value is None and name == "logit_scale_max":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value < 0:
                raise ValueError(f"{name} must be a number >= 0, got {value!r}")
        if self.logit_scale_max == 0:
            raise ValueError("logit_scale_max must be greater than 0; use inf to lift the cap")
        if not 0 <= self.label_smoothing_factor < 1:
            raise ValueError(f"label_smoothing_factor must be in [0, 1), got {self.label_smoothing_factor!r}")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
