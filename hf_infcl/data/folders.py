"""Folders of pictures or tables: which files belong to a split, and which caption to which picture."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_infcl.data.tables import TABLE_SUFFIXES, read_table

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"))

NAME_COLUMN = "file_name"  # of a `metadata` table, as `datasets` has it

# What a folder or a file is called when it belongs to a split; the same words that `datasets` goes by.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NAMED = 3


def split_files(folder: Path, files: Sequence[Path], split: str) -> list[Path]:
    """The files of a split, told by the words in their paths; where no path says a split, all are `train`.

    Raises:
        ValueError: no file of this split; the message lists the splits there are.
    """
    by_split: dict[str, list[Path]] = {}
    rest: list[Path] = []
    for file in files:
        name = _split_of(file.relative_to(folder))
        if name is None:
            rest.append(file)
        else:
            by_split.setdefault(name, []).append(file)
    if not by_split:
        by_split, rest = {"train": rest}, []
    wanted = next((name for name, words in _WORDS.items() if split in words), split)
    if wanted not in by_split:
        raise ValueError(f"split={split!r} is not in {folder}; it has {', '.join(by_split)}")
    return by_split[wanted]


def _split_of(path: Path) -> str | None:
    """By the folders first, outermost first, then by the file's own name; numbers of shards do not count."""
    for part in (*path.parts[:-1], path.stem):
        words = re.split(r"[-._ \d]+", part.lower())
        for name, known in _WORDS.items():
            if any(word in known for word in words):
                return name
    return None


def read_image_folder(
    folder: Path,
    chosen: Sequence[Path],
    files: Sequence[Path],
    *,
    delimiter: str | None = None,
    encoding: str | None = None,
) -> dict[str, list[Any]]:
    """Pictures and their `metadata` tables as columns; a table's `file_name` is relative to the table.

    A picture that no table names is left out, and their number is reported. A row whose picture is missing stays, for
    the caller to refuse.

    Args:
        folder: the dataset's folder.
        chosen: the files of the split.
        files: all files, for a `metadata` table above the splits' folders.

    Raises:
        ValueError: no metadata table, or one without a `file_name` column.
    """
    pictures = {os.path.abspath(file) for file in chosen if file.suffix.lower() in IMAGE_SUFFIXES}
    tables = [file for file in chosen if _is_metadata(file)] or [file for file in files if _is_metadata(file)]
    if not tables:
        others = [str(file) for file in chosen if file.suffix.lower() in TABLE_SUFFIXES]
        hint = f"; or load {others[0]} itself, by its path" if others else ""
        raise ValueError(
            f"no caption column found; columns: image. {folder} has {len(pictures)} pictures but no metadata table: "
            f"put a metadata.csv or metadata.jsonl with the columns file_name and caption beside them{hint}"
        )
    columns: dict[str, list[Any]] = {}
    named: set[str] = set()
    for table in tables:
        read = read_table(table, delimiter=delimiter, encoding=encoding)
        if NAME_COLUMN not in read:
            raise ValueError(f"{table}: no column {NAME_COLUMN!r} found; columns: {', '.join(read)}")
        paths = [os.path.abspath(table.parent / str(name).replace("\\", "/")) for name in read.pop(NAME_COLUMN)]
        # A table above the splits names the pictures of all of them: an existing picture of another split is not ours.
        rows = [row for row, path in enumerate(paths) if path in pictures or not os.path.isfile(path)]
        named.update(paths)
        before = len(columns.get("image", []))
        columns.setdefault("image", []).extend(paths[row] for row in rows)
        for name in {**columns, **read}.keys() - {"image"}:
            columns.setdefault(name, [None] * before).extend(
                [read[name][row] for row in rows] if name in read else [None] * len(rows)
            )
    if without := sorted(pictures - named):
        shown = ", ".join(os.path.relpath(path, folder) for path in without[:_NAMED])
        more = ", ..." if len(without) > _NAMED else ""
        plural = "pictures have" if len(without) > 1 else "picture has"
        logger.warning("%s: %d %s no caption and will not be used: %s%s", folder, len(without), plural, shown, more)
    return columns


def _is_metadata(file: Path) -> bool:
    return file.stem.lower() == "metadata" and file.suffix.lower() in TABLE_SUFFIXES
