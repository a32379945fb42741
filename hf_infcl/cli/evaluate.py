"""`hf-infcl evaluate`: retrieval metrics of a model or an adapter on a data set."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hf_infcl.cli.arguments import AUTO_SPLIT, EmbeddingArguments, check_counts

if TYPE_CHECKING:
    from hf_infcl.cli.embedding import ModelAndPairs


_EXAMPLE = """example:
  hf-infcl evaluate --model_name_or_path demo-output/base --adapter demo-output/adapter --dataset_name sample:photo"""


@dataclass
class EvaluateArguments(EmbeddingArguments):
    """What is measured, and on what.

    Args: those of `EmbeddingArguments`, and
        dataset_test_split (`str`, defaults to `"test"`): split to measure on; `auto`, in recipes of `train`, is `test`.
        max_eval_samples (`int`, *optional*): measure on the first so many rows.
        ks (`list[int]`, defaults to 1 5 10): the k of recall@k.
        output_file (`str`, *optional*): JSON file to write the metrics to.
    """

    dataset_test_split: str = field(default="test", metadata={"help": "Split to measure on."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Measure on the first so many rows."})
    ks: list[int] = field(default_factory=lambda: [1, 5, 10], metadata={"help": "The k of recall@k."})
    output_file: str | None = field(default=None, metadata={"help": "JSON file to write the metrics to."})

    def __post_init__(self) -> None:
        from hf_infcl.evaluation.checks import check_ks

        super().__post_init__()
        check_counts(self, "max_eval_samples")
        check_ks(self.ks)
        if self.dataset_test_split == AUTO_SPLIT:
            self.dataset_test_split = "test"
        if self.output_file is not None:
            _check_output_file(Path(self.output_file))


def _check_output_file(path: Path) -> None:
    """Metrics of an earlier run are replaced, and nothing else is."""
    if path.is_dir():
        raise ValueError(f"output_file {str(path)!r} is a folder; expected a file")
    if not path.exists():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        content = None
    if not isinstance(content, dict) or not any(name.startswith("mean_recall@") for name in content):
        raise ValueError(f"output_file {str(path)!r} exists and holds no metrics of evaluate; name another")


def main(args: EvaluateArguments) -> dict[str, float]:
    """Embeds the split and measures retrieval in both directions.

    Args:
        args: what is measured, and on what.

    Returns:
        The dictionary of `retrieval_metrics`.
    """
    return _measure(*_prepare(args))


def _prepare(args: EvaluateArguments) -> tuple[EvaluateArguments, "ModelAndPairs"]:
    from hf_infcl.cli.building import MissingSplitError, held_back
    from hf_infcl.cli.embedding import load_pairs

    try:
        return args, load_pairs(args, split=args.dataset_test_split, max_samples=args.max_eval_samples)
    except MissingSplitError as error:
        there = "train" if "train" in error.there else error.there[0]
        raise ValueError(
            f"{error}; name a split to evaluate on: --dataset_test_split {there}, or the tenth held back in training: "
            f'--dataset_test_split "{held_back(there)[1]}"'
        ) from error


def _measure(args: EvaluateArguments, loaded: "ModelAndPairs") -> dict[str, float]:
    from hf_infcl.cli.embedding import embed
    from hf_infcl.evaluation import dataset_retrieval_metrics

    embedded = embed(loaded)
    return dataset_retrieval_metrics(embedded.image_embeds, embedded.text_embeds, embedded.ids, ks=args.ks)


def _show(args: EvaluateArguments, loaded: "ModelAndPairs") -> None:
    from hf_infcl.cli.tables import print_metrics

    metrics = _measure(args, loaded)
    print_metrics({args.adapter or args.model_name_or_path: metrics})
    if args.output_file is not None:
        Path(args.output_file).write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def run(args: Sequence[str] | None = None, prog: str = "hf-infcl evaluate") -> int:
    """Parses a command line, measures, prints a table and writes the metrics where asked to.

    Returns:
        The exit status: 2 where command line, model or data cannot be used, else 0.
    """
    from hf_infcl.cli.errors import run_command
    from hf_infcl.cli.parser import OtherCommand, RecipeParser
    from hf_infcl.cli.train import recipe_fields

    note = "model_name_or_path is what is measured: name the outcome of a training by --adapter or --model_name_or_path"
    train = OtherCommand("train", recipe_fields, note=note)

    def prepare() -> tuple[EvaluateArguments, "ModelAndPairs"]:
        (parsed,) = RecipeParser([EvaluateArguments], recipes_of=train, prog=prog, epilog=_EXAMPLE).parse(args)
        if parsed.output_file is not None:
            Path(parsed.output_file).parent.mkdir(parents=True, exist_ok=True)
        return _prepare(parsed)

    return run_command(prog, prepare, _show)
