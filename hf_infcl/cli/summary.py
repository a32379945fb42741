"""What `hf-infcl train` says at its end: the figures, where the result is, and what to type next."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_infcl.cli.arguments import AUTO_SPLIT

if TYPE_CHECKING:
    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
    from hf_infcl.trainer import InfCLConfig


def evaluate_command(
    script_args: "ScriptArguments", training_args: "InfCLConfig", model_args: "ModelArguments", *, is_adapter: bool
) -> str:
    """The command line that measures the result of a run as the run did."""
    folder = training_args.output_dir
    words = ["hf-infcl", "evaluate", "--model_name_or_path", model_args.model_name_or_path if is_adapter else folder]
    options = {
        "adapter": folder if is_adapter else None,
        "model_revision": model_args.model_revision if is_adapter else None,
        "dataset_name": script_args.dataset_name,
        "dataset_config": script_args.dataset_config,
        "dataset_revision": script_args.dataset_revision,
        "dataset_test_split": None if script_args.dataset_test_split == AUTO_SPLIT else script_args.dataset_test_split,
        "image_column": training_args.image_column,
        "caption_column": training_args.caption_column,
        "image_root": script_args.image_root,
        "delimiter": script_args.delimiter,
        "encoding": script_args.encoding,
        "on_bad_image": None if training_args.on_bad_image == "raise" else training_args.on_bad_image,
        "empty_captions": None if training_args.empty_captions == "raise" else training_args.empty_captions,
        "max_eval_samples": script_args.max_eval_samples,
    }
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(words)


def load_line(training_args: "InfCLConfig", model_args: "ModelArguments", *, is_adapter: bool) -> str:
    """The line of Python that loads the result of a run."""
    given = repr(training_args.output_dir)
    if is_adapter:
        given = f"{model_args.model_name_or_path!r}, adapter={given}"
        if model_args.model_revision is not None:
            given += f", revision={model_args.model_revision!r}"
    return f"model, processor = hf_infcl.load_dual_encoder({given})"


def print_summary(
    script_args: "ScriptArguments",
    training_args: "InfCLConfig",
    model_args: "ModelArguments",
    *,
    is_adapter: bool,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> None:
    """Prints the end of a run.

    Args:
        script_args, training_args, model_args: what the run was told.
        is_adapter: whether an adapter was trained, not the whole model.
        before, after: metrics of the trainer's evaluations; empty where there was none.
    """
    from hf_infcl.cli.tables import print_metrics

    evaluations = {"base": before, "trained": after}
    if after:
        print_metrics(
            {
                heading: {name.removeprefix("eval_"): value for name, value in metrics.items()}
                for heading, metrics in evaluations.items()
                if metrics
            }
        )
    what = "adapter" if is_adapter else "model"
    print(f"\nWritten to {training_args.output_dir}: {what}, processor, README.md and curves.png\n")
    if after:
        print(f"measure it:  {evaluate_command(script_args, training_args, model_args, is_adapter=is_adapter)}")
    print(f"load it:     {load_line(training_args, model_args, is_adapter=is_adapter)}")
