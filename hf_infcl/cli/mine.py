"""`hf-infcl mine`: the hard negatives of a data set, by a model or an adapter, as a data set of their own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_infcl.cli.arguments import EmbeddingArguments, check_choice, check_counts

if TYPE_CHECKING:
    from hf_infcl.cli.embedding import ModelAndPairs


_EXAMPLE = """example:
  hf-infcl mine --model_name_or_path demo-output/base --dataset_name sample:photo:1000 --output_dir mined"""


@dataclass
class MineArguments(EmbeddingArguments):
    """What is mined, with what, and what counts as a hard negative.

    Args: those of `EmbeddingArguments`, and
        output_dir (`str`): folder to write to: a folder of parquet files for each direction, `report.json`, a README
            and `index.html`, a page of pictures. A new one, or one that an earlier run wrote, whose files are replaced.
        dataset_train_split (`str`, defaults to `"train"`): split to mine.
        max_train_samples (`int`, *optional*): mine the first so many rows only.
        direction (`str`, defaults to `"both"`): `image_to_text` (captions are the negatives), `text_to_image`, `both`.
        num_negatives (`int`, defaults to 3): negatives for each pair.
        range_min (`int`, defaults to 0): hardest candidates passed over.
        range_max (`int`, *optional*): rank from which on none are taken; by default range_min + num_negatives.
        absolute_margin (`float`, *optional*): leave out candidates above the pair's score less this.
        relative_margin (`float`, *optional*): leave out candidates above pos - |pos| relative_margin.
        min_score (`float`, *optional*): leave out candidates below this score.
        max_score (`float`, *optional*): leave out candidates above this score.
        page_examples (`int`, defaults to 50): pairs of each direction on the page; 0 for no page.
    """

    output_dir: str = field(
        kw_only=True,
        metadata={"help": "Folder for the data set, the report and the page: new, or one that mine wrote before."},
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Split to mine."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Mine the first so many rows only."})
    direction: str = field(
        default="both",
        metadata={"help": "image_to_text (captions are the negatives), text_to_image or both."},
    )
    num_negatives: int = field(default=3, metadata={"help": "Negatives for each pair."})
    range_min: int = field(default=0, metadata={"help": "Hardest candidates passed over."})
    range_max: int | None = field(
        default=None, metadata={"help": "Rank from which on none are taken; by default range_min + num_negatives."}
    )
    absolute_margin: float | None = field(
        default=None, metadata={"help": "Leave out candidates above the pair's score less this."}
    )
    relative_margin: float | None = field(
        default=None, metadata={"help": "Leave out candidates above pos - |pos| times this."}
    )
    min_score: float | None = field(default=None, metadata={"help": "Leave out candidates below this score."})
    max_score: float | None = field(default=None, metadata={"help": "Leave out candidates above this score."})
    page_examples: int = field(default=50, metadata={"help": "Pairs of each direction on the page; 0: no page."})

    def __post_init__(self) -> None:
        from hf_infcl.evaluation.mining import DIRECTIONS, check_mining_options
        from hf_infcl.evaluation.mining_output import directions_of

        super().__post_init__()
        check_counts(self, "max_train_samples")
        check_counts(self, "page_examples", least=0)
        check_choice(self, "direction", (*DIRECTIONS, "both"))
        for direction in directions_of(self.direction):
            check_mining_options(direction, **_options(self))


def _options(args: MineArguments) -> dict[str, Any]:
    ranks = ("num_negatives", "range_min", "range_max")
    return {
        name: getattr(args, name) for name in (*ranks, "absolute_margin", "relative_margin", "min_score", "max_score")
    }


def main(args: MineArguments) -> dict[str, dict[str, float]]:
    """Embeds the split, mines each direction and writes the data set, the report and the page.

    Args:
        args: what is mined, and how.

    Returns:
        By direction, the report of `mine_hard_negatives`.
    """
    return _mine(*_prepare(args))


def _prepare(args: MineArguments) -> tuple[MineArguments, "ModelAndPairs"]:
    from hf_infcl.cli.embedding import load_pairs
    from hf_infcl.evaluation.mining import check_enough_candidates
    from hf_infcl.evaluation.mining_folder import check_folder

    check_folder(args.output_dir)
    loaded = load_pairs(args, split=args.dataset_train_split, max_samples=args.max_train_samples)
    check_enough_candidates(len(loaded.pairs), args.num_negatives, args.range_min)
    return args, loaded


def _mine(args: MineArguments, loaded: "ModelAndPairs") -> dict[str, dict[str, float]]:
    from hf_infcl.cli.embedding import embed
    from hf_infcl.evaluation import mine_hard_negatives
    from hf_infcl.evaluation.mining_folder import clear_folder
    from hf_infcl.evaluation.mining_output import directions_of, write_dataset, write_description, write_page

    embedded = embed(loaded)
    mined = {
        direction: mine_hard_negatives(
            embedded.image_embeds,
            embedded.text_embeds,
            embedded.ids,
            direction=direction,
            **_options(args),
        )
        for direction in directions_of(args.direction)
    }
    reports = {direction: found.report for direction, found in mined.items()}
    settings = {name: value for name, value in asdict(args).items() if value is not None and name != "output_dir"}
    folder = Path(args.output_dir)
    clear_folder(folder)
    for direction, found in mined.items():
        write_dataset(embedded.pairs, found, direction, folder / direction)
    if args.page_examples:
        write_page(embedded.pairs, mined, settings, folder / "index.html", examples=args.page_examples)
    write_description(reports, settings, folder)
    return reports


def _show(args: MineArguments, loaded: "ModelAndPairs") -> None:
    for direction, report in _mine(args, loaded).items():
        found = f"{report['pairs_with_negatives']} of {report['pairs']} pairs, {report['candidates']} candidates"
        scores = f"{report['mean_hardest_score']:.3f} against {report['mean_positive_score']:.3f} of the positive"
        print(f"{direction.replace('_', ' ')}: {found}; mean score of the hardest {scores}")
        if without := int(report["pairs_without"]):
            left = "pair is" if without == 1 else "pairs are"
            print(f"  {without} {left} not written: fewer than num_negatives {args.num_negatives} are left for them")
    print(f"\nWritten to {args.output_dir}:")
    for name, what in _files(args):
        print(f"  {name:16} {what}")


def _files(args: MineArguments) -> list[tuple[str, str]]:
    """What `main` leaves in the folder, and what each is for; the page to look at first."""
    from hf_infcl.evaluation.mining_output import directions_of

    page = [("index.html", "open this: the pairs whose negatives beat them by most, with their pictures")]
    data = [
        (f"{direction}/", "anchor, positive and negatives as parquet") for direction in directions_of(args.direction)
    ]
    about = [("README.md", "how to load them"), ("report.json", "settings, counts and scores")]
    return (page if args.page_examples else []) + data + about


def run(args: Sequence[str] | None = None, prog: str = "hf-infcl mine") -> int:
    """Parses a command line, mines, and prints a table of what was found.

    Returns:
        The exit status: 2 where command line, model or data cannot be used, else 0.
    """
    from hf_infcl.cli.errors import run_command
    from hf_infcl.cli.parser import OtherCommand, RecipeParser
    from hf_infcl.cli.train import recipe_fields

    # The folder that a recipe of train names is the model's.
    train = OtherCommand("train", recipe_fields, means_otherwise=("output_dir",))

    def prepare() -> tuple[MineArguments, "ModelAndPairs"]:
        (parsed,) = RecipeParser([MineArguments], recipes_of=train, prog=prog, epilog=_EXAMPLE).parse(args)
        return _prepare(parsed)

    return run_command(prog, prepare, _show)
