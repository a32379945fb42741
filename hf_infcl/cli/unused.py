"""Options of the recipe's data and adapter that were given and have no effect: said at the start, in one line each."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments

_DELIMITED = {".csv", ".tsv"}


def unused_options(script_args: "ScriptArguments", model_args: "ModelArguments", *, evaluates: bool) -> list[str]:
    """One line for each group of options that have no effect; those of the trainer are the trainer's to name.

    An option counts as given where its value is not the default.

    Args:
        script_args: the data.
        model_args: the model and its adapter.
        evaluates: whether there is a split to evaluate on.

    Example:
        >>> unused_options(ScriptArguments("pairs.csv", max_eval_samples=8), ModelArguments("a"), evaluates=False)
        ['max_eval_samples has no effect without a split to evaluate on']
    """
    from hf_infcl.data.tables import TABLE_SUFFIXES
    from hf_infcl.trainer.unused import lines_of

    place = Path(script_args.dataset_name).expanduser()
    is_sample = script_args.dataset_name.removeprefix("hf_infcl/").partition(":")[0] == "sample"
    is_table = place.is_file() and place.suffix.lower() in TABLE_SUFFIXES
    suffixes = {place.suffix.lower()} if place.is_file() else {file.suffix.lower() for file in place.rglob("*")}
    reads_text = not is_sample and not suffixes.isdisjoint(TABLE_SUFFIXES)
    adapter = [entry.name for entry in fields(model_args) if entry.name.startswith(("lora_", "use_rslora", "use_dora"))]
    return [
        *lines_of(
            script_args,
            (not evaluates, ("max_eval_samples", "evaluate_base"), "without a split to evaluate on"),
            (not reads_text, ("delimiter", "encoding"), f"without a text table ({', '.join(TABLE_SUFFIXES)})"),
            (reads_text and suffixes.isdisjoint(_DELIMITED), ("delimiter",), "without a CSV"),
            (is_sample or place.exists(), ("dataset_revision",), "with data that is not on the Hub"),
            (is_sample or is_table, ("dataset_config",), "with data that has no configurations"),
            (is_sample, ("image_root",), "with the built-in scenes"),
        ),
        *lines_of(model_args, (not model_args.use_peft, adapter, "without use_peft: the whole model is trained")),
    ]
