"""Rows of a table as image-text pairs, with identities that say which pairs are the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from hf_infcl.data.captions import SEVERAL, CaptionError, caption_list, choose, is_list, stable_hash
from hf_infcl.data.columns import find_columns
from hf_infcl.data.images import UnreadableImageError, read_image, resolve_path

logger = logging.getLogger(__name__)

CaptionChoice = Literal["single", "draw", "expand"]

_ROWS_AT_ONCE = 1000  # of a column read to be checked: bounds memory, and hides the cost of a call
_NAMED = 3  # how many rows or files a message names


class Pair(TypedDict):
    """One row as it goes to the collator."""

    image: Image.Image
    caption: str
    ids: tuple[int, int]


class ImageTextDataset(Dataset):
    """Image-text pairs from a `datasets.Dataset` (or any sequence of dicts), read row by row.

    Captions are checked when the dataset is made (where rows come from a transform or another dataset class, when they
    are read), pictures when they are read.

    Every pair carries `ids`, (image id, caption id): two pairs are the same if they agree in either. The image id is
    the value of `image_id_column`, or else a 63-bit hash of the stored bytes or of the path, or else the row's number;
    the caption id is a 63-bit hash of the text. They are the same in every process and in every run.

    Args:
        dataset: the table.
        image_column: the pictures; found by name or type where not given.
        caption_column: the captions; found by name where not given.
        captions: for cells that hold lists of captions: `"draw"` takes one per epoch, by a hash of (seed, epoch, row),
            the same under any number of workers and after resuming; `"expand"` makes a row of each caption;
            `"single"` refuses lists.
        empty_captions: what a row without a caption means: `"raise"`, or `"drop"` to leave such rows out, counted.
        on_bad_image: what an unreadable picture means: `"raise"` when it is met, or `"skip"` to read every picture once
            now and leave the pairs with unreadable ones out, counted (so the rows are the same on every rank).
        image_id_column: integers or strings that identify pictures.
        image_root: the folder that relative paths start from.
        seed: for `captions="draw"`.

    Attributes:
        skipped: `(row of the table, reason)` for every row left out.

    Raises:
        ValueError: missing columns, no rows, list captions under `"single"`, empty captions under `"raise"`.

    Example:
        >>> pairs = ImageTextDataset(sample_dataset("drawing", size=8))
        >>> pairs[0]["caption"], pairs[0]["image"].size
        ('a big blue square above a large plain brown triangle, grey behind', (32, 32))
    """

    def __init__(
        self,
        dataset: Any,
        image_column: str | None = None,
        caption_column: str | None = None,
        *,
        captions: CaptionChoice = "single",
        empty_captions: Literal["raise", "drop"] = "raise",
        on_bad_image: Literal["raise", "skip"] = "raise",
        image_id_column: str | None = None,
        image_root: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        _check_choice("captions", captions, ("single", "draw", "expand"))
        _check_choice("empty_captions", empty_captions, ("raise", "drop"))
        _check_choice("on_bad_image", on_bad_image, ("raise", "skip"))
        if len(dataset) == 0:
            raise ValueError("the dataset has no rows")
        self.image_column, self.caption_column = find_columns(
            dataset, image_column, caption_column, extra=(image_id_column,)
        )
        self.captions, self.seed = captions, seed
        self.image_id_column, self.image_root = image_id_column, image_root
        self.skipped: list[tuple[int, str]] = []
        self._table, self._cheap = _undecoded(dataset, self.image_column)
        # Shared memory: persistent workers see the epoch too, which a plain attribute copied at their start would not.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        counts = self._caption_counts(empty_captions)
        if on_bad_image == "skip":
            counts[self._unreadable_rows(np.flatnonzero(counts))] = 0
        if not counts.any():
            raise ValueError(f"no usable row is left of {len(counts)}: {self.skip_report()}")
        rows = np.flatnonzero(counts)
        self._numbers: np.ndarray | None = None
        if captions == "expand":
            self._rows = np.repeat(rows, counts[rows])
            self._numbers = np.concatenate([np.arange(count) for count in counts[rows]])
        else:
            self._rows = rows
        if self.skipped:
            logger.warning("%s", self.skip_report())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Pair:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Pair]:
        """Several rows at once, which PyTorch's loader asks for: one look-up in the table for all of them."""
        indices = [range(len(self))[index] for index in indices]
        rows = [int(self._rows[index]) for index in indices]
        cells = _rows_of(self._table, rows)
        return [self._pair(index, row, cell) for index, row, cell in zip(indices, rows, cells, strict=True)]

    def set_epoch(self, epoch: int) -> None:
        """Which epoch `captions="draw"` draws for; reaches running worker processes."""
        self._epoch.fill_(epoch)

    def ids(self, index: int) -> tuple[int, int]:
        """The ids of a row in the current epoch, without decoding its picture."""
        index = range(len(self))[index]
        row = int(self._rows[index])
        (cell,) = _rows_of(self._table, [row])
        return self._image_id(row, cell), stable_hash(self._caption(index, row, cell))

    def skip_report(self) -> str:
        """How many rows of the table were left out, with the first few reasons."""
        shown = "; ".join(f"row {row}: {reason}" for row, reason in self.skipped[:_NAMED])
        more = "" if len(self.skipped) <= _NAMED else f"; and {len(self.skipped) - _NAMED} more"
        return f"{len(self.skipped)} of {len(self._table)} rows skipped" + (f" ({shown}{more})" if shown else "")

    def _pair(self, index: int, row: int, cell: dict[str, Any]) -> Pair:
        caption = self._caption(index, row, cell)
        return {
            "image": self._image(row, cell[self.image_column]),
            "caption": caption,
            "ids": (self._image_id(row, cell), stable_hash(caption)),
        }

    def _image(self, row: int, value: Any) -> Image.Image:
        try:
            return read_image(value, root=self.image_root)
        except UnreadableImageError as error:
            raise UnreadableImageError(
                f'row {row} has an unreadable image: {error}. Set on_bad_image="skip" to leave such rows out'
            ) from error

    def _caption(self, index: int, row: int, cell: dict[str, Any]) -> str:
        texts = self._texts(row, cell[self.caption_column])
        if not texts:
            raise CaptionError(f"row {row}, column {self.caption_column!r} has no caption")
        if self._numbers is not None:
            return texts[self._numbers[index]]
        return texts[choose(len(texts), seed=self.seed, epoch=int(self._epoch), row=row)]

    def _texts(self, row: int, value: Any) -> list[str]:
        try:
            if self.captions == "single" and is_list(value):
                raise CaptionError(SEVERAL)
            return caption_list(value)
        except CaptionError as error:
            raise CaptionError(f"row {row}, column {self.caption_column!r} {error}") from error

    def _image_id(self, row: int, cell: dict[str, Any]) -> int:
        if self.image_id_column is not None:
            value = cell[self.image_id_column]
            if isinstance(value, str | bytes):
                return stable_hash(value)
            try:
                return int(value)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"row {row}, column {self.image_id_column!r}: {value!r} is no integer or string"
                ) from error
        value = cell[self.image_column]
        if isinstance(value, dict):
            value = value["path"] if value.get("bytes") is None else value["bytes"]
        if isinstance(value, bytes):
            return stable_hash(value)
        if isinstance(value, str | os.PathLike):
            return stable_hash(os.path.abspath(resolve_path(value, self.image_root)))
        return row

    def _caption_counts(self, empty_captions: str) -> np.ndarray:
        """How many captions each row of the table has; the rows without one are refused or noted as skipped."""
        if not self._cheap and self.captions != "expand" and empty_captions == "raise":
            return np.ones(len(self._table), np.int64)  # looked at when read: now, every picture would be decoded
        counts = np.zeros(len(self._table), np.int64)
        for row, value in self._column(self.caption_column):
            counts[row] = len(self._texts(row, value))
        empty = np.flatnonzero(counts == 0)
        if empty.size and empty_captions == "raise":
            rows = ", ".join(map(str, empty[:_NAMED].tolist())) + (", ..." if empty.size > _NAMED else "")
            raise CaptionError(
                f"column {self.caption_column!r} has no caption in {empty.size} of {counts.size} rows (rows {rows}); "
                'set empty_captions="drop" to leave them out'
            )
        self.skipped += [(row, "no caption") for row in empty.tolist()]
        return counts

    def _unreadable_rows(self, rows: np.ndarray) -> list[int]:
        def reason(item: tuple[int, Any]) -> tuple[int, str] | None:
            try:
                read_image(item[1], root=self.image_root)
            except UnreadableImageError as error:
                return item[0], str(error)
            return None

        wanted = set(rows.tolist())
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside the interpreter's lock
            found: list[tuple[int, str]] = []
            for start in range(0, len(self._table), 64):
                block = [
                    item
                    for item in self._column(self.image_column, start, min(start + 64, len(self._table)))
                    if item[0] in wanted
                ]
                found += [bad for bad in pool.map(reason, block) if bad is not None]
        self.skipped = sorted(self.skipped + found)
        return [row for row, _ in found]

    def _column(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Any]]:
        narrow = self._cheap and hasattr(self._table, "select_columns")
        table = self._table.select_columns([name]) if narrow else self._table
        stop = len(table) if stop is None else stop
        for first in range(start, stop, _ROWS_AT_ONCE):
            rows = range(first, min(first + _ROWS_AT_ONCE, stop))
            yield from zip(rows, (cell[name] for cell in _rows_of(table, rows)), strict=True)


def _rows_of(table: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    if hasattr(table, "__getitems__"):
        return table.__getitems__(list(rows))
    return [table[row] for row in rows]


def _undecoded(dataset: Any, image_column: str) -> tuple[Any, bool]:
    """The same table with stored bytes and paths in place of decoded pictures, so that this package decodes them.

    Also returns whether a row can be looked at without decoding its picture.
    """
    features = getattr(dataset, "features", None)
    if features is None:
        return dataset, isinstance(dataset, list | tuple)
    if dataset.format["type"] == "custom":  # a user's own transform makes the pictures
        return dataset, False
    from datasets import Image as ImageFeature

    dataset = dataset.with_format(None)
    if isinstance(features[image_column], ImageFeature) and features[image_column].decode:
        dataset = dataset.cast_column(image_column, ImageFeature(decode=False))
    return dataset, True


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(map(repr, known))}")
