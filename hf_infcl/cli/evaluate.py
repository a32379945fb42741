"""`hf-infcl evaluate`: retrieval metrics of a model or an adapter on a data set."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_infcl.cli.embedding import ModelAndPairs


@dataclass
class EvaluateArguments:
    """What is measured, and on what.

    Args:
        model_name_or_path (`str`): Hub id or folder of a model, or of an adapter that names its base.
        dataset_name (`str`): Hub id, a local file or folder, or the built-in scenes: `sample:drawing`, `sample:photo`.
        adapter (`str`, *optional*): Hub id or folder of an adapter to put on the model.
        model_revision (`str`, *optional*): branch, tag or commit of `model_name_or_path`.
        dtype (`str`, *optional*): dtype of the weights; by default the one they were saved in.
        dataset_config (`str`, *optional*): configuration of the data set.
        dataset_revision (`str`, *optional*): branch, tag or commit of the data set.
        dataset_test_split (`str`, defaults to `"test"`): split to measure on.
        image_column (`str`, *optional*): column of the images; found by type where not given.
        caption_column (`str`, *optional*): column of the captions; several captions an image all count.
        image_root (`str`, *optional*): folder that relative image paths start from.
        max_eval_samples (`int`, *optional*): measure on the first so many rows.
        per_device_eval_batch_size (`int`, defaults to 64): pairs embedded at once; changes no metric.
        dataloader_num_workers (`int`, defaults to 0): processes that read and prepare images.
        ks (`list[int]`, defaults to 1 5 10): the k of recall@k.
        output_file (`str`, *optional*): JSON file to write the metrics to.
    """

    model_name_or_path: str = field(
        metadata={"help": "Hub id or folder of a model, or of an adapter that names its base."}
    )
    dataset_name: str = field(
        metadata={"help": "Hub id, a local file or folder, or the built-in scenes: sample:drawing, sample:photo."}
    )
    adapter: str | None = field(default=None, metadata={"help": "Hub id or folder of an adapter to put on the model."})
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model."})
    dtype: str | None = field(default=None, metadata={"help": "Dtype of the weights; by default as saved."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the data set."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to measure on."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found where not given."})
    caption_column: str | None = field(
        default=None, metadata={"help": "Column of the captions; several captions an image all count."}
    )
    image_root: str | None = field(default=None, metadata={"help": "Folder that relative image paths start from."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Measure on the first so many rows."})
    per_device_eval_batch_size: int = field(
        default=64, metadata={"help": "Images and captions embedded at once. The metrics do not depend on it."}
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that read and prepare images."})
    ks: list[int] = field(default_factory=lambda: [1, 5, 10], metadata={"help": "The k of recall@k."})
    output_file: str | None = field(default=None, metadata={"help": "JSON file to write the metrics to."})


def main(args: EvaluateArguments) -> dict[str, float]:
    """Embeds the split and measures retrieval in both directions.

    Args:
        args: what is measured, and on what.

    Returns:
        The dictionary of `retrieval_metrics`.
    """
    from hf_infcl.cli.embedding import load_pairs

    return _measure(args, load_pairs(args, split=args.dataset_test_split, max_samples=args.max_eval_samples))


def _measure(args: EvaluateArguments, loaded: "ModelAndPairs") -> dict[str, float]:
    from hf_infcl.cli.embedding import embed
    from hf_infcl.evaluation import dataset_retrieval_metrics

    embedded = embed(loaded)
    return dataset_retrieval_metrics(embedded.image_embeds, embedded.text_embeds, embedded.ids, ks=args.ks)


def run(args: Sequence[str] | None = None, prog: str = "hf-infcl evaluate") -> int:
    """Parses a command line, measures, prints a table and writes the metrics where asked to.

    Returns:
        The exit status: 2 where command line, model or data cannot be used, else 0.
    """
    from hf_infcl.cli.embedding import load_pairs
    from hf_infcl.cli.errors import report_error
    from hf_infcl.cli.parser import RecipeParser
    from hf_infcl.cli.tables import print_metrics

    try:
        (parsed,) = RecipeParser([EvaluateArguments], prog=prog).parse(args)
        loaded = load_pairs(parsed, split=parsed.dataset_test_split, max_samples=parsed.max_eval_samples)
    except (ValueError, OSError) as error:
        return report_error(prog, error)
    metrics = _measure(parsed, loaded)
    print_metrics({parsed.adapter or parsed.model_name_or_path: metrics})
    if parsed.output_file is not None:
        Path(parsed.output_file).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return 0
