"""Rows of a table as image-text pairs, with identities that say which pairs are the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from hf_infcl.data.captions import CaptionError, stable_hash
from hf_infcl.data.columns import named_rows
from hf_infcl.data.images import UnreadableImageError, read_image
from hf_infcl.data.pairs import Pair, PairSource

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000  # of a column read to be checked: bounds memory, and hides the cost of a call
_NAMED = 3  # how many rows or files a message names


class ImageTextDataset(PairSource, Dataset):
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
        ('a big blue square above a large plain brown triangle on a grey background', (32, 32))
    """

    def _check_dataset(self, dataset: Any) -> None:
        if not hasattr(dataset, "__len__"):
            raise ValueError(f"a {type(dataset).__name__} has no rows by number; ImageTextStream reads streams")
        if len(dataset) == 0:
            raise ValueError("the dataset has no rows")

    def _open(self) -> None:
        self.skipped: list[tuple[int, str]] = []
        counts = self._caption_counts()
        if self._skips_bad:
            counts[self._unreadable_rows(np.flatnonzero(counts))] = 0
        if not counts.any():
            raise ValueError(f"no usable row is left of {len(counts)}: {self.skip_report()}")
        rows = np.flatnonzero(counts)
        self._numbers: np.ndarray | None = None
        if self._captions == "expand":
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
        cells = _rows_of(self._source, rows)
        return [self._pair(index, row, cell) for index, row, cell in zip(indices, rows, cells, strict=True)]

    def ids(self, index: int) -> tuple[int, int]:
        """The ids of a row in the current epoch, without decoding its picture."""
        index = range(len(self))[index]
        row = int(self._rows[index])
        (cell,) = _rows_of(self._source, [row])
        return self._image_id(row, cell), stable_hash(self._caption(index, row, cell))

    def skip_report(self) -> str:
        """How many rows of the table were left out, with the first few reasons."""
        shown = "; ".join(f"row {row}: {reason}" for row, reason in self.skipped[:_NAMED])
        more = "" if len(self.skipped) <= _NAMED else f"; and {len(self.skipped) - _NAMED} more"
        return f"{len(self.skipped)} of {len(self._source)} rows skipped" + (f" ({shown}{more})" if shown else "")

    def _pair(self, index: int, row: int, cell: dict[str, Any]) -> Pair:
        caption = self._caption(index, row, cell)
        return {
            "image": self._image(cell[self.image_column], f"row {row}"),
            "caption": caption,
            "ids": (self._image_id(row, cell), stable_hash(caption)),
        }

    def _caption(self, index: int, row: int, cell: dict[str, Any]) -> str:
        texts = self._texts(cell[self.caption_column], f"row {row}")
        if not texts:
            raise CaptionError(f"row {row}, column {self.caption_column!r} has no caption")
        return texts[self._drawn(len(texts), row) if self._numbers is None else self._numbers[index]]

    def _image_id(self, row: int, cell: dict[str, Any]) -> int:
        known = self._known_image_id(cell, f"row {row}")
        return row if known is None else known

    def _caption_counts(self) -> np.ndarray:
        """How many captions each row of the table has; the rows without one are refused or noted as skipped."""
        if not self._is_cheap and self._captions != "expand" and not self._drops_empty:
            return np.ones(len(self._source), np.int64)  # looked at when read: now, every picture would be decoded
        counts = np.zeros(len(self._source), np.int64)
        numerals = True
        for row, value in self._column(self.caption_column):
            texts = self._texts(value, f"row {row}")
            counts[row] = len(texts)
            numerals = numerals and all(text.strip().isdecimal() for text in texts)
        if numerals and counts.any():
            logger.warning("column %r holds nothing but numbers: are these the captions?", self.caption_column)
        empty = np.flatnonzero(counts == 0)
        if empty.size and not self._drops_empty:
            raise CaptionError(
                f"column {self.caption_column!r} has no caption in {empty.size} of {counts.size} rows "
                f"({named_rows(empty.tolist())}); "
                'set empty_captions="drop" to leave them out'
            )
        self.skipped += [(row, "no caption") for row in empty.tolist()]
        return counts

    def _unreadable_rows(self, rows: np.ndarray) -> list[int]:
        def reason(item: tuple[int, Any]) -> tuple[int, str] | None:
            try:
                read_image(item[1], root=self._image_root)
            except UnreadableImageError as error:
                return item[0], str(error)
            return None

        wanted = set(rows.tolist())
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside the interpreter's lock
            found: list[tuple[int, str]] = []
            blocks = range(0, len(self._source), 64)
            for start in tqdm(
                blocks, "reading every picture once", disable=len(blocks) < 20, unit_scale=64, unit="row"
            ):
                block = [
                    item
                    for item in self._column(self.image_column, start, min(start + 64, len(self._source)))
                    if item[0] in wanted
                ]
                found += [bad for bad in pool.map(reason, block) if bad is not None]
        self.skipped = sorted(self.skipped + found)
        return [row for row, _ in found]

    def _column(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Any]]:
        narrow = self._is_cheap and hasattr(self._source, "select_columns")
        table = self._source.select_columns([name]) if narrow else self._source
        stop = len(table) if stop is None else stop
        for first in range(start, stop, _ROWS_AT_ONCE):
            rows = range(first, min(first + _ROWS_AT_ONCE, stop))
            yield from zip(rows, (cell[name] for cell in _rows_of(table, rows)), strict=True)


def _rows_of(table: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    if hasattr(table, "__getitems__"):
        return table.__getitems__(list(rows))
    return [table[row] for row in rows]
