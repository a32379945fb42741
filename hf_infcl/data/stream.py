"""Streamed rows as image-text pairs: for data that is larger than the disk, or read from the Hub as it is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from hf_infcl.data.captions import CaptionError, stable_hash
from hf_infcl.data.counts import WorkerCounts
from hf_infcl.data.images import UnreadableImageError
from hf_infcl.data.pairs import Pair, PairSource

logger = logging.getLogger(__name__)

_REPORTED = 3  # rows left out that are named in the log; the others are only counted


class ImageTextStream(PairSource, IterableDataset):
    """Image-text pairs from a `datasets.IterableDataset`; what `ImageTextDataset` is for tables.

    Rows have no numbers that workers could agree on, so captions are drawn, and pictures without bytes or a path are
    identified, by the picture's content. Workers divide the stream's shards among themselves.

    Args: those of `ImageTextDataset`. Rows left out are counted as they are met, the first few named in the log.

    Example:
        >>> pairs = ImageTextStream(load_image_text_dataset("sample:photo:100", streaming=True))
        >>> next(iter(pairs))["image"].size
        (32, 32)
    """

    def _open(self) -> None:
        self._counts = WorkerCounts("met", "skipped")

    def set_epoch(self, epoch: int) -> None:
        """Which epoch `captions="draw"` draws for, and a shuffled stream shuffles for; reaches running workers."""
        super().set_epoch(epoch)
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Pair]:
        worker = get_worker_info()
        whose = "" if worker is None else f" of worker {worker.id}"
        for number, cell in enumerate(self._source):
            self._counts.add(met=1)
            yield from self._pairs(cell, f"row {number}{whose}")

    @property
    def skipped(self) -> tuple[int, int]:
        """(rows left out, rows met) so far, over all worker processes and epochs."""
        return self._counts["skipped"], self._counts["met"]

    def skip_report(self) -> str:
        """How many rows were left out so far."""
        skipped, met = self.skipped
        return f"{skipped} of {met} rows skipped"

    def _pairs(self, cell: dict[str, Any], where: str) -> Iterator[Pair]:
        texts = self._texts(cell[self.caption_column], where)
        if not texts:
            message = f"{where}, column {self.caption_column!r} has no caption"
            if not self._drops_empty:
                raise CaptionError(f'{message}; set empty_captions="drop" to leave such rows out')
            return self._skip(message)
        try:
            image = self._image(cell[self.image_column], where)
        except UnreadableImageError as error:
            if not self._skips_bad:
                raise
            return self._skip(str(error))
        known = self._known_image_id(cell, where)
        image_id = stable_hash(np.asarray(image).tobytes()) if known is None else known
        if self._captions != "expand":
            texts = [texts[self._drawn(len(texts), image_id)]]
        for text in texts:
            yield {"image": image, "caption": text, "ids": (image_id, stable_hash(text))}

    def _skip(self, reason: str) -> None:
        if self._counts["skipped"] < _REPORTED:
            logger.warning("left out: %s", reason)
        self._counts.add(skipped=1)
