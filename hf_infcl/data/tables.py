"""Reading CSV, TSV, JSON and JSONL tables strictly: cells stay what the file says, faults have a line number."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
from pathlib import Path
from typing import Any

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")

_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_DELIMITERS = (",", "\t", ";", "|")


def read_table(
    path: str | os.PathLike[str], *, delimiter: str | None = None, encoding: str | None = None
) -> dict[str, list[Any]]:
    """A text table as columns.

    Words such as "None" or "NA" stay text, and so do numbers in a CSV; an empty CSV cell is an empty string.

    Args:
        path: a `.csv`, `.tsv`, `.jsonl`, `.ndjson` or `.json` file (a list of objects).
        delimiter: between a CSV's fields; by default the one the header has, of comma, tab, semicolon and bar.
        encoding: of the text; by default UTF-8, or what a byte-order mark says.

    Raises:
        ValueError: no rows, another encoding, a line with more or fewer fields than the header, quotes that do not
            close, bad JSON; the message names file, line and the option to set.
    """
    path = Path(path)
    text = _text(path, encoding)
    if path.suffix.lower() in (".csv", ".tsv"):
        columns = _read_csv(path, text, delimiter)
    else:
        columns = _read_json(path, text)
    if not any(columns.values()):
        raise ValueError(f"no rows in {path}")
    return columns


def _text(path: Path, encoding: str | None) -> str:
    data = path.read_bytes()
    if encoding is None:
        encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not {encoding}; set encoding to the file's own, "
            'such as "latin-1" or "utf-16"'
        ) from error
    except LookupError as error:
        raise ValueError(f"encoding={encoding!r} is not known to Python") from error
    if "\0" in text:
        raise ValueError(f'{path} has zero bytes where {encoding} has letters; set encoding, such as "utf-16-le"')
    return text


def _read_csv(path: Path, text: str, delimiter: str | None) -> dict[str, list[Any]]:
    if delimiter is None:
        delimiter = _delimiter(text, "\t" if path.suffix.lower() == ".tsv" else ",")
    # Strict: a quote that does not close would otherwise swallow the rest of the file into one field, silently.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        start = reader.line_num + 1
        for row in reader:
            if row and len(row) != len(header):
                raise ValueError(
                    f"{path}, line {start}: {len(row)} fields where the header has {len(header)} "
                    f"({', '.join(header)}); fields that contain {delimiter!r} have to be quoted, "
                    "or set delimiter to another sign"
                )
            if row:
                rows.append(row)
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}; a quote inside quotes is written twice") from error
    if len(set(header)) != len(header):
        raise ValueError(f"{path}: a column name occurs twice in the header: {', '.join(header)}")
    return {name: [row[number] for row in rows] for number, name in enumerate(header)}


def _delimiter(text: str, usual: str) -> str:
    header = text.partition("\n")[0]
    if usual in header:
        return usual
    return next((sign for sign in _DELIMITERS if sign in header), usual)


def _read_json(path: Path, text: str) -> dict[str, list[Any]]:
    whole = path.suffix.lower() == ".json" and text.lstrip().startswith("[")
    rows: list[tuple[int, Any]] = []
    try:
        if whole:
            rows = list(enumerate(json.loads(text), start=1))
        else:
            # Not splitlines: JSON strings may hold other line separators.
            for number, line in enumerate(text.split("\n"), start=1):
                if line.strip():
                    rows.append((number, json.loads(line)))
    except json.JSONDecodeError as error:
        line_number = error.lineno if whole else number
        raise ValueError(f"{path}, line {line_number}: no JSON ({error.msg}); expected one object a line") from error
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {'row' if whole else 'line'} {number}: {type(row).__name__}; expected an object")
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    return {name: _one_type([row.get(name) for _, row in rows]) for name in names}


def _one_type(values: list[Any]) -> list[Any]:
    """Arrow's columns have one type: where numbers stand beside strings, both become strings."""
    kinds = {type(value) for value in values} - {type(None)}
    if str in kinds and kinds <= {str, int, float}:
        return [value if value is None or isinstance(value, str) else str(value) for value in values]
    return values
