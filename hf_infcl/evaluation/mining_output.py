"""Mined negatives as files: a data set to train on, a report, and a page of pictures to look at."""

import base64
import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, List, Value
from jinja2 import Environment, PackageLoader

from hf_infcl.evaluation.mining import MinedNegatives
from hf_infcl.evaluation.mining_folder import REPORT_NAME, own_files

_SHARD_ROWS = 2000  # rows decoded at once
_THUMBNAIL = 112  # pixels of a picture's longer side on the page


def write_dataset(pairs: Any, mined: MinedNegatives, direction: str, folder: str | Path) -> None:
    """Writes anchor, positive, negative_1 ... negative_n and their scores, a row for each pair, as parquet files.

    The columns are those of sentence-transformers' n-tuples with scores: ``scores`` holds the positive's and then the
    negatives'. ``row`` is the pair's row in the data set, ``negative_rows`` are those of the negatives.

    Args:
        pairs: the data set mined: ``pairs[row]`` gives a dictionary with ``image`` and ``caption``.
        mined: what was found.
        direction: ``"image_to_text"``: the anchor is a picture, positive and negatives are captions; or
            ``"text_to_image"``.
        folder: where the files go; made where it does not exist.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    anchor, other = ("image", "caption") if direction == "image_to_text" else ("caption", "image")
    kinds = {"image": Image(), "caption": Value("string")}
    names = [f"negative_{number + 1}" for number in range(mined.negatives.shape[1])]
    features = Features(
        {"anchor": kinds[anchor], "positive": kinds[other]}
        | dict.fromkeys(names, kinds[other])
        | {"scores": List(Value("float32")), "row": Value("int64"), "negative_rows": List(Value("int64"))}
    )
    rows, negatives = mined.rows.tolist(), mined.negatives.tolist()
    scores = [[p, *n] for p, n in zip(mined.positive_scores.tolist(), mined.negative_scores.tolist(), strict=True)]
    for number, start in enumerate(range(0, max(len(rows), 1), _SHARD_ROWS)):
        part = slice(start, start + _SHARD_ROWS)
        columns: dict[str, list[Any]] = {name: [] for name in ("anchor", "positive", *names)}
        for row, others in zip(rows[part], negatives[part], strict=True):
            pair = pairs[row]
            columns["anchor"].append(pair[anchor])
            columns["positive"].append(pair[other])
            for name, negative in zip(names, others, strict=True):
                columns[name].append(pairs[negative][other])
        shard = columns | {"scores": scores[part], "row": rows[part], "negative_rows": negatives[part]}
        Dataset.from_dict(shard, features=features).to_parquet(folder / f"train-{number:05d}.parquet")


def write_description(reports: dict[str, dict[str, float]], settings: dict[str, Any], folder: str | Path) -> None:
    """Writes the README by which `datasets.load_dataset` finds each direction as a configuration, and ``report.json``.

    The report names every file of the folder, so that a later run knows which it may replace: it comes last.

    Args:
        reports: by direction, the report of `mine_hard_negatives`.
        settings: what was mined and how.
        folder: of the data set.
    """
    folder = Path(folder)
    number = _number(folder)
    text = _environment().get_template("mined_readme.md.j2").render(reports=reports, settings=settings, number=number)
    (folder / "README.md").write_text(text, encoding="utf-8")
    report = {"settings": settings, **reports, "files": sorted({*own_files(folder), REPORT_NAME})}
    (folder / REPORT_NAME).write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _number(folder: Path) -> int:
    """A number of the folder's data, for the version of its configurations.

    `datasets.load_dataset` caches what a configuration names under the folder's last name, the configuration's and this
    version: without it, another mining into a folder of that name would be read from the cache as the first one.
    """
    number = 0
    for path in sorted(folder.glob("*/*.parquet")):
        with path.open("rb") as file:
            while part := file.read(2**24):
                number = zlib.crc32(part, number)
    return number


def write_page(
    pairs: Any,
    mined: dict[str, MinedNegatives],
    settings: dict[str, Any],
    path: str | Path,
    *,
    examples: int = 50,
) -> None:
    """Writes one HTML page, pictures included: the pairs whose hardest negative beats them by most, with the negatives.

    Those are where unlabelled positives show: look at them before training on the negatives.

    Args:
        pairs: the data set mined, as for `write_dataset`.
        mined: by direction.
        settings: what was mined and how; shown at the top.
        path: of the page.
        examples: pairs of each direction.
    """
    sections = []
    for direction, found in mined.items():
        excess = found.negative_scores[:, 0] - found.positive_scores
        order = excess.argsort(descending=True, stable=True)[:examples].tolist()
        sections.append((direction, found.report, [_example(pairs, found, direction, place) for place in order]))
    page = _environment().get_template("mined_page.html.j2").render(sections=sections, settings=settings)
    Path(path).write_text(page, encoding="utf-8")


def _example(pairs: Any, found: MinedNegatives, direction: str, place: int) -> dict[str, Any]:
    row, negatives = int(found.rows[place]), found.negatives[place].tolist()
    anchor, other = ("image", "caption") if direction == "image_to_text" else ("caption", "image")
    return {
        "row": row,
        "anchor": _cell(pairs[row][anchor]),
        "positive": _cell(pairs[row][other]) | {"score": float(found.positive_scores[place])},
        "negatives": [
            _cell(pairs[negative][other]) | {"score": score, "row": negative}
            for negative, score in zip(negatives, found.negative_scores[place].tolist(), strict=True)
        ],
    }


def _cell(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"text": value}
    picture = value.convert("RGB")
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return {"image": "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()}


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("hf_infcl.evaluation", "templates"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def directions_of(choice: str) -> Sequence[str]:
    """The directions that ``both``, ``image_to_text`` or ``text_to_image`` mean."""
    return ("image_to_text", "text_to_image") if choice == "both" else (choice,)
