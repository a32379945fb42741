"""From a name or a path to a table of image-text pairs, with every picture's place checked before a run begins."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_infcl.data.columns import find_columns, named_rows
from hf_infcl.data.folders import IMAGE_SUFFIXES, NAME_COLUMN, read_image_folder, split_files
from hf_infcl.data.images import resolve_path
from hf_infcl.data.tables import TABLE_SUFFIXES, read_table
from hf_infcl.locations import absence, check_location

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

_BINARY_SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
_SAMPLE = re.compile(r"(?:hf_infcl/)?sample(?::(?P<domain>\w+))?(?::(?P<size>\d+))?")
_SAMPLE_SIZES = {"train": 8192, "test": 1024}
_NAMED = 3  # how many missing files a message names


def load_image_text_dataset(
    name_or_path: str | os.PathLike[str],
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    image_root: str | os.PathLike[str] | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    on_bad_image: Literal["raise", "skip"] = "raise",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Load a table of image-text pairs.

    Args:
        name_or_path: one of
            * a Hub id, such as `"nlphuji/flickr30k"`;
            * a CSV, TSV, JSON or JSONL table whose image column holds paths, or a Parquet or Arrow file;
            * a folder of such tables, or of pictures with a `metadata` table, split by folder or file name;
            * a folder written by `Dataset.save_to_disk`;
            * `"sample:drawing"` or `"sample:photo"`, the built-in scenes (`"sample:photo:500"`: 500 of them).
        config: the dataset's configuration, for Hub ids.
        split: which split; a slice such as `"train[:10%]"` is one too.
        revision: branch, tag or commit, for Hub ids.
        image_column: the pictures; found by name or type where not given.
        caption_column: the captions; found by name where not given.
        image_root: the folder that relative paths start from; by default the table's own.
        delimiter: of a CSV; by default the one its header has.
        encoding: of a text table; by default UTF-8 or what its byte-order mark says.
        on_bad_image: whether missing files are an error or only a warning, for `ImageTextDataset` to leave out.
        streaming: return an `IterableDataset`; what is on the Hub or in Parquet files is then read as it is needed.

    Returns:
        The dataset with all its columns; paths and bytes in the image column have become a `datasets.Image`.

    Raises:
        FileNotFoundError: a path that does not exist, or a name that the Hub does not have or that cannot be reached.
        ValueError: missing columns, missing pictures (their number and the first few names), no rows, an unknown split,
            or a table that cannot be read; the message says what was found and which option to set.

    Example:
        >>> load_image_text_dataset("sample:photo:500", split="test").num_rows
        500
    """
    if on_bad_image not in ("raise", "skip"):
        raise ValueError(f"on_bad_image={on_bad_image!r}; expected 'raise' or 'skip'")
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    columns = (image_column, caption_column)
    text = {"delimiter": delimiter, "encoding": encoding}
    said: str | None = None  # what the user's table calls the pictures, where the dataset's column has another name
    if sample := _SAMPLE.fullmatch(name):
        dataset, root = _sample(sample["domain"] or "drawing", sample["size"], split), None
    elif any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        dataset, root = _saved(path, split), path
    elif path.is_dir() and (own := _own_folder(path, split, columns, text)) is not None:
        (dataset, said), root = own, None  # its paths are whole already
    elif path.is_file() and path.suffix.lower() in TABLE_SUFFIXES:
        dataset, root = (
            _slice(_as_dataset(read_table(path, **text)), split),
            path.parent,
        )
    elif path.exists():
        dataset, root = _by_datasets(path, config, split, streaming), path if path.is_dir() else path.parent
    elif path.suffix.lower() in {*TABLE_SUFFIXES, *_BINARY_SUFFIXES}:
        raise FileNotFoundError(f"no such file or folder: {path.absolute()}")
    else:
        check_location(name, "dataset")
        dataset, root = _from_hub(name, config, split, revision, streaming), None
    image_column, _ = find_columns(dataset, *columns)
    if not hasattr(dataset, "__len__"):
        return dataset
    if len(dataset) == 0:
        raise ValueError(f"no rows in {name} (split {split!r})")
    root = root if image_root is None else Path(image_root)
    dataset = _with_images(dataset, image_column, root, on_bad_image, said or image_column)
    return dataset.to_iterable_dataset() if streaming else dataset


def _sample(domain: str, size: str | None, split: str) -> Dataset:
    from hf_infcl.data.sample import sample_dataset

    name = re.split(r"[\[+]", split)[0]
    return _slice(sample_dataset(domain, name, int(size) if size else _SAMPLE_SIZES.get(name, 1)), split, name)


def _slice(dataset: Dataset, split: str, name: str = "train") -> Dataset:
    """The part of a dataset that `split` asks for, where the dataset is all of the split `name`."""
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(dataset)})
    except ValueError as error:
        raise ValueError(f"split={split!r}: {error}") from error
    if len(parts) == 1 and (parts[0].from_, parts[0].to) in ((None, None), (0, len(dataset))):
        return dataset
    rows = [row for part in parts for row in range(part.from_ or 0, len(dataset) if part.to is None else part.to)]
    return dataset.select(rows)


def _saved(path: Path, split: str) -> Dataset:
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(path))
    if not isinstance(saved, DatasetDict):
        return _slice(saved, split)
    name = re.split(r"[\[+]", split)[0]
    if name not in saved:
        raise ValueError(f"split={split!r} is not in {path}; it has {', '.join(saved)}")
    return _slice(saved[name], split, name)


def _own_folder(
    path: Path, split: str, names: tuple[str | None, str | None], text: dict[str, str | None]
) -> tuple[Dataset, str | None] | None:
    """A folder of text tables or of pictures, or None where it holds what `datasets` reads itself.

    Beside it what a folder of pictures calls their column in its metadata.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    kinds = {file.suffix.lower() for file in files}
    if kinds & _BINARY_SUFFIXES.keys() and not kinds & IMAGE_SUFFIXES:
        return None
    if not kinds & (IMAGE_SUFFIXES | set(TABLE_SUFFIXES)):
        raise ValueError(
            f"{path} holds neither pictures nor tables; expected {', '.join((*TABLE_SUFFIXES, *_BINARY_SUFFIXES))} "
            "files, or pictures with a metadata table"
        )
    name = re.split(r"[\[+]", split)[0]
    chosen = split_files(path, files, name)
    pictures = [file for file in chosen if file.suffix.lower() in IMAGE_SUFFIXES]
    tables = [file for file in chosen if file.suffix.lower() in TABLE_SUFFIXES]
    # Tables above or without pictures are read by themselves; beside pictures, only one called metadata counts.
    beside = {file.parent for file in pictures}
    if pictures and not any(table.stem.lower() != "metadata" and table.parent not in beside for table in tables):
        columns, said = read_image_folder(path, chosen, files, **text), NAME_COLUMN
    else:
        columns, said = _joined(tables, names, text), None
    return _slice(_as_dataset(columns), split, name), said


def _joined(
    tables: list[Path], names: tuple[str | None, str | None], text: dict[str, str | None]
) -> dict[str, list[Any]]:
    """The rows of several tables; each table's relative paths start from its own folder."""
    joined: dict[str, list[Any]] = {}
    for table in tables:
        columns = read_table(table, **text)
        image, _ = find_columns([{name: cells[0] for name, cells in columns.items()}], *names)
        columns[image] = [
            resolve_path(cell, table.parent) if isinstance(cell, str) and cell.strip() else cell
            for cell in columns[image]
        ]
        if joined and set(joined) != set(columns):
            raise ValueError(
                f"{table} has the columns {', '.join(columns)}, {tables[0]} has {', '.join(joined)}; "
                "tables of one split need the same columns"
            )
        for name, cells in columns.items():
            joined.setdefault(name, []).extend(cells)
    return joined


def _by_datasets(path: Path, config: str | None, split: str, streaming: bool) -> Any:
    import pyarrow as pa
    from datasets.exceptions import DatasetsError

    try:
        return _built(path, config, split, streaming)
    except (pa.ArrowException, tarfile.TarError, DatasetsError) as error:
        raise ValueError(f"{path} is damaged or of another kind than its name says: {error}") from error


def _built(path: Path, config: str | None, split: str, streaming: bool) -> Any:
    from datasets import load_dataset

    if path.is_dir():
        return load_dataset(str(path), config, split=split, streaming=streaming, cache_dir=_cache_of(path))
    kind = _BINARY_SUFFIXES.get(path.suffix.lower())
    if kind is None:
        known = ", ".join((*TABLE_SUFFIXES, *_BINARY_SUFFIXES))
        raise ValueError(f"{path}: {path.suffix or 'no suffix'} is no kind of table that can be read; expected {known}")
    return load_dataset(kind, data_files={"train": str(path)}, split=split, streaming=streaming)


def _cache_of(folder: Path) -> str | None:
    """Where `datasets` caches a folder; None: where it would anyway.

    It caches the configurations that a folder's README names by the folder's last name, whatever the files hold, and
    would go on with those of an earlier day.
    """
    from datasets import config

    if not (folder / "README.md").exists():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    state = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((str(folder.resolve()), state)).encode()).hexdigest()
    return str(Path(config.HF_DATASETS_CACHE) / f"folder-{digest[:16]}")


def _from_hub(name: str, config: str | None, split: str, revision: str | None, streaming: bool) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name, config, split=split, revision=revision, streaming=streaming)
    except (ConnectionError, FileNotFoundError) as error:
        raise FileNotFoundError(absence(name, error)) from error


def _as_dataset(columns: dict[str, list[Any]]) -> Dataset:
    import pyarrow as pa
    from datasets import Dataset

    try:
        return Dataset.from_dict(columns)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"a column has values of several types: {error}") from error


def _with_images(dataset: Dataset, column: str, root: Path | None, on_bad_image: str, said: str) -> Dataset:
    """Paths made whole and checked, and the column made a `datasets.Image` where it holds paths or bytes.

    `said` is the column in the words of the user's table.
    """
    from datasets import Image, Value

    feature = dataset.features[column]
    kind = feature.dtype if isinstance(feature, Value) else ""
    if not (
        isinstance(feature, Image)
        or kind.removeprefix("large_") in ("string", "binary")
        or (isinstance(feature, dict) and {"bytes", "path"} & set(feature))
    ):
        return dataset  # arrays: looked at when read
    stored = dataset.cast_column(column, Image(decode=False))
    if _all_bytes(stored, column):
        return dataset if isinstance(feature, Image) else dataset.cast_column(column, Image())
    whole: list[dict[str, Any]] = []
    missing: list[str] = []
    empty: list[int] = []
    for row, cell in enumerate(stored[column]):
        path = (cell or {}).get("path")
        if cell is None or (cell.get("bytes") is None and not (path or "").strip()):
            empty.append(row)
            cell = {"bytes": None, "path": None}
        elif cell.get("bytes") is None:
            cell = {"bytes": None, "path": _whole_path(path or "", root)}
            if "://" not in cell["path"] and not os.path.isfile(cell["path"]):
                missing.append(f"{cell['path']} (row {row})")
        whole.append(cell)
    _report_missing(missing, empty, len(stored), said, on_bad_image)
    order = dataset.column_names
    dataset = dataset.remove_columns(column).add_column(column, whole, feature=Image())
    return dataset.select_columns(order)


def _all_bytes(stored: Dataset, column: str) -> bool:
    """Whether every picture lies in the table itself; looked up without copying one."""
    table = stored.select_columns([column]).with_format("arrow")
    return not any(
        chunk.null_count or chunk.field("bytes").null_count
        for start in range(0, len(table), 10_000)
        for chunk in table[start : start + 10_000][column].chunks
    )


def _whole_path(path: str, root: Path | None) -> str:
    if path.startswith(("http://", "https://")):
        raise ValueError(f"the image column holds web addresses ({path}); download the pictures and name their files")
    return path if "://" in path else os.path.abspath(resolve_path(path, root))


def _report_missing(missing: list[str], empty: list[int], rows: int, column: str, on_bad_image: str) -> None:
    if not missing and not empty:
        return
    found = []
    if missing:
        names = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        are = "are" if len(missing) > 1 else "is"
        found.append(f"{len(missing)} of {rows} pictures named in column {column!r} {are} missing: {names}")
    if empty:
        have = "have" if len(empty) > 1 else "has"
        found.append(f"{len(empty)} of {rows} rows {have} no picture in column {column!r} ({named_rows(empty)})")
    message = "; ".join(found)
    if on_bad_image == "raise":
        raise ValueError(
            f"{message}. Relative paths start from the table's folder: set image_root if the pictures lie elsewhere, "
            'or on_bad_image="skip" to leave such rows out'
        )
    logger.warning("%s", message)
