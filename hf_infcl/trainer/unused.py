"""Options that were given and have no effect beside the others: said at the start, in one line each."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from hf_infcl.trainer.config import InfCLConfig

_READING = ("image_column", "caption_column", "captions", "empty_captions", "on_bad_image")
# Of the options of a loss, those that no loss of the user's own gets to see.
_LOSS = (
    *("loss_type", "duplicates", "label_smoothing_factor", "num_hard_negatives", "hard_negative_block_size"),
    *("hard_negative_start", "absolute_margin", "relative_margin", "max_score"),
    *("loss_block_size", "loss_backend", "loss_precision"),
)


def unused_options(
    args: InfCLConfig, *, loss_type: str | None, named_model: bool, reads_tables: bool, streams: bool
) -> list[str]:
    """One line for each group of options that have no effect.

    An option counts as given where its value is not the default.

    Args:
        args: the configuration.
        loss_type: what is minimised, or None for a loss of the user's own.
        named_model: whether the model was given by name.
        reads_tables: whether some data set is a table or a stream of columns.
        streams: whether the training set is a stream.

    Example:
        >>> args = InfCLConfig("out", num_hard_negatives=8, loss_type="contrastive")
        >>> unused_options(args, loss_type="contrastive", named_model=True, reads_tables=True, streams=False)
        ["num_hard_negatives has no effect without loss_type='hard_negative': all negatives are kept"]
    """
    evaluates, saves = args.eval_strategy != "no", args.save_strategy != "no"
    chooses = args.load_best_model_at_end or args.save_strategy == "best" or evaluates
    searches = loss_type == "hard_negative"
    groups: tuple[tuple[bool, Iterable[str], str], ...] = (
        (loss_type is None, _LOSS, "with loss=: the loss passed has options of its own"),
        (
            loss_type is not None and not searches,
            ("num_hard_negatives", "hard_negative_block_size"),
            "without loss_type='hard_negative': all negatives are kept",
        ),
        (
            searches and args.hard_negative_block_size is not None and not args.hard_negative_start,
            ("loss_block_size",),
            "beside hard_negative_block_size: no step uses another loss",
        ),
        (not named_model, ("model_init_kwargs",), "with a model that is loaded already"),
        (not reads_tables, _READING, "without a table: the rows of the data set passed are taken as they are"),
        (streams, ("batch_sampler",), "with a stream: its rows come in its own order"),
        (args.eval_strategy != "steps", ("eval_steps",), "without eval_strategy='steps'"),
        (not evaluates, ("eval_delay",), "without eval_strategy"),
        (args.save_strategy != "steps", ("save_steps",), "without save_strategy='steps'"),
        (not saves, ("save_total_limit", "save_only_model"), "with save_strategy='no'"),
        (not chooses, ("metric_for_best_model",), "without evaluations: set eval_strategy"),
        (not args.push_to_hub, ("hub_model_id", "hub_revision"), "without push_to_hub"),
    )
    return lines_of(args, *groups)


def lines_of(arguments: Any, *groups: tuple[bool, Iterable[str], str]) -> list[str]:
    """One line for each group of a dataclass's options that applies and of which some were given."""
    defaults = {entry.name: entry.default for entry in fields(arguments)}
    lines = []
    for applies, names, reason in groups:
        given = [name for name in names if applies and getattr(arguments, name) not in (defaults[name], {})]
        if given:
            lines.append(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {reason}")
    return lines
