"""The model card of a run: a README.md made of what is known about it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from hf_infcl.hub.adapters import is_hub_id

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
_TAG = "hf_infcl"
DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}
_TEMPLATE = Path(__file__).with_name("card_template.md.j2")


@dataclass
class RunFacts:
    """What a card tells. Everything is optional: what is unknown is left out.

    Args:
        name: the model's name, used as title.
        base_model: Hub id or path of the model that was fine-tuned. A path is named in no card: it tells nobody
        anything.
        base_model_revision: its commit, tag or branch.
        model_type: the family, as in `config.model_type`.
        adapter: options of the adapter (`method`, `r`, `lora_alpha`, ...), or None where the whole model was saved.
        parameters: number of parameters of the model, adapter included.
        trainable_parameters: number of those that were trained.
        adapter_bytes: size of the adapter's file.
        dataset: Hub id, path or name of the training data; a path is not shown.
        dataset_revision: its commit, tag or branch.
        train_rows: rows of the training split (None for a stream).
        eval_rows: rows of the evaluation split.
        skipped_rows: rows of the training split that were left out (unreadable picture, no caption).
        image_column: column of the images.
        caption_column: column of the captions.
        text_kwargs: how the model's text has to be padded and cut (SigLIP's: to its full length).
        loss: name of the loss's class.
        loss_options: what `get_config_dict()` of the loss returns.
        citation: BibTeX of the loss's source.
        per_device_batch_size: pairs of a micro-batch.
        gradient_accumulation_steps: micro-batches of a step.
        processes: number of processes.
        contrastive_batch_size: pairs that were contrasted with each other.
        hyperparameters: further options of the training.
        steps: optimizer steps taken.
        before: metrics of the base model, under the names of `retrieval_metrics`.
        after: metrics of the result.
        seconds: duration of the training.
        peak_memory_bytes: most memory held.
        device: the device in words.
        versions: package name -> version.
        plot: file name of the curves, beside the card.
        license: licence identifier of the Hub.
        tags: further tags.
    """

    name: str = "Dual encoder"
    base_model: str | None = None
    base_model_revision: str | None = None
    model_type: str | None = None
    adapter: dict[str, Any] | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    adapter_bytes: int | None = None
    dataset: str | None = None
    dataset_revision: str | None = None
    train_rows: int | None = None
    eval_rows: int | None = None
    skipped_rows: int | None = None
    image_column: str | None = None
    caption_column: str | None = None
    text_kwargs: dict[str, Any] = field(default_factory=lambda: {"padding": True, "truncation": True})
    loss: str | None = None
    loss_options: dict[str, Any] = field(default_factory=dict)
    citation: str | None = None
    per_device_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    processes: int | None = None
    contrastive_batch_size: int | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    device: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    plot: str | None = None
    license: str | None = None
    tags: list[str] = field(default_factory=list)


def write_model_card(facts: RunFacts | Mapping[str, Any], path: str | Path) -> Path:
    """Writes the model card of a run.

    The front matter names the base model and the data set only where they are Hub ids, never a path of this machine.
    A file in its place that is no card of this package stays, and the card is written beside it, with a notice.

    Args:
        facts: a `RunFacts`, or a mapping with the names of its fields.
        path: the folder of the model, or the card's own path.

    Returns:
        The path of the card.

    Raises:
        ValueError: a fact of an unknown name.

    Example:
        >>> write_model_card({"name": "clip-emoji", "base_model": "openai/clip-vit-base-patch32"}, "out")
        PosixPath('out/README.md')
    """
    path = Path(path)
    if path.suffix != ".md":
        path = path / CARD_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not is_own_card(path):
        beside = path.with_stem(f"{path.stem}-{_TAG}")
        logger.warning("%s is no card of this package and stays as it is; the card is in %s", path, beside.name)
        path = beside
    path.write_text(render_model_card(facts), encoding="utf-8")
    return path


def render_model_card(facts: RunFacts | Mapping[str, Any]) -> str:
    """The text of the model card; see `write_model_card`."""
    if isinstance(facts, Mapping):
        unknown = set(facts) - {entry.name for entry in fields(RunFacts)}
        if unknown:
            raise ValueError(f"a card knows no {', '.join(sorted(unknown))}")
        facts = RunFacts(**facts)
    base_id = facts.base_model if is_hub_id(facts.base_model) else None
    dataset_id = facts.dataset if is_hub_id(facts.dataset) and "/" in str(facts.dataset) else None
    body = _template().render(
        facts=facts,
        base_id=base_id,
        dataset_id=dataset_id,
        dataset_label=dataset_id or _label(facts.dataset),
        metrics=_metric_rows(facts),
    )
    return f"---\n{_front_matter(facts, base_id, dataset_id)}\n---\n\n{body.strip()}\n"


def is_own_card(path: Path) -> bool:
    """Whether there is a card of this package: by the tag in the front matter, which stays where the text is edited."""
    return path.is_file() and f"\n- {_TAG}\n" in path.read_text(encoding="utf-8", errors="replace")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    environment.filters.update(count=_count, size=_size, duration=_duration, value=_value, code=_code)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _front_matter(facts: RunFacts, base_id: str | None, dataset_id: str | None) -> str:
    tags = [_TAG, "contrastive", "image-text-retrieval", "generated_from_trainer"]
    tags += ["lora"] if (facts.adapter or {}).get("method") == "LoRA" else []
    tags += [facts.model_type] if facts.model_type else []
    extra: dict[str, Any] = {}
    if base_id:
        extra["base_model_relation"] = "adapter" if facts.adapter else "finetune"
    return ModelCardData(
        base_model=base_id,
        datasets=[dataset_id] if dataset_id else None,
        eval_results=_eval_results(facts, dataset_id),
        library_name="peft" if facts.adapter else "transformers",
        license=facts.license,
        metrics=["recall"] if facts.after else None,
        model_name=facts.name if facts.after else None,
        pipeline_tag="zero-shot-image-classification",
        tags=list(dict.fromkeys([*tags, *facts.tags])),
        **extra,
    ).to_yaml()


def _eval_results(facts: RunFacts, dataset_id: str | None) -> list[EvalResult] | None:
    label = _label(facts.dataset) or "evaluation set"
    results = []
    for direction, words in DIRECTIONS.items():
        for metric, value in facts.after.items():
            if metric.startswith(f"{direction}/recall@"):
                k = metric.rpartition("@")[2]
                results.append(
                    EvalResult(
                        task_type=f"{direction.replace('_', '-')}-retrieval",
                        task_name=f"{words.capitalize()} retrieval",
                        dataset_type=dataset_id or "custom",
                        dataset_name=label,
                        metric_type="recall",
                        metric_name=f"Recall@{k}",
                        metric_value=round(value, 4),
                    )
                )
    return results or None


def _label(dataset: str | None) -> str | None:
    """The data's name without the place where it lies."""
    return Path(dataset).name if dataset else None


def _metric_rows(facts: RunFacts) -> list[tuple[str, float | None, float | None]]:
    names = list(dict.fromkeys([*facts.after, *facts.before]))
    shown = [name for name in names if "recall@" in name or name.endswith(("/median_rank", "/mrr"))]
    return [(_metric_words(name), facts.before.get(name), facts.after.get(name)) for name in shown]


def _metric_words(name: str) -> str:
    direction, _, metric = name.rpartition("/")
    words = metric.replace("_", " ").replace("mrr", "mean reciprocal rank")
    return f"{DIRECTIONS.get(direction, direction)}, {words}" if direction else words


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _code(option: Any) -> str:
    return f'"{option}"' if isinstance(option, str) else repr(option)


def _value(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"
