"""From a table's cells to a pair: shared by tables with numbered rows and by streams."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from PIL import Image

from hf_infcl.data.captions import SEVERAL, CaptionError, caption_list, is_list, stable_hash
from hf_infcl.data.columns import find_columns
from hf_infcl.data.images import UnreadableImageError, read_image, resolve_path

CaptionChoice = Literal["single", "draw", "expand"]


class Pair(TypedDict):
    """One row as it goes to the collator."""

    image: Image.Image
    caption: str
    ids: tuple[int, int]


class PairSource:
    """What tables and streams share: their options, and reading a row's cells, saying where a fault lies.

    Args:
        dataset: the table or stream.
        image_column: the pictures; found by name or type where not given.
        caption_column: the captions; found by name where not given.
        captions, empty_captions, on_bad_image, image_id_column, image_root, seed: see `ImageTextDataset`.

    Attributes:
        image_column, caption_column: the rows' keys.

    Raises:
        ValueError: missing columns, or a choice that there is not.
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
        _check_choices(captions, empty_captions, on_bad_image)
        self._check_dataset(dataset)
        self.image_column, self.caption_column = find_columns(
            dataset, image_column, caption_column, extra=(image_id_column,)
        )
        self._captions, self._seed = captions, seed
        self._drops_empty, self._skips_bad = empty_captions == "drop", on_bad_image == "skip"
        self._image_id_column, self._image_root = image_id_column, image_root
        # Shared memory: persistent workers see the epoch too, which a plain attribute copied at their start would not.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._source, self._is_cheap = _undecoded(dataset, self.image_column)
        self._open()

    def _check_dataset(self, dataset: Any) -> None:
        """Refuses what cannot be read in this way."""

    def _open(self) -> None:
        """Looks at the rows once the options are set."""

    def set_epoch(self, epoch: int) -> None:
        """Which epoch `captions="draw"` draws for; reaches running worker processes."""
        self._epoch.fill_(epoch)

    def _texts(self, value: Any, where: str) -> list[str]:
        """The captions in a cell, none if it is empty."""
        try:
            if self._captions == "single" and is_list(value):
                raise CaptionError(SEVERAL)
            return caption_list(value)
        except CaptionError as error:
            raise CaptionError(f"{where}, column {self.caption_column!r} {error}") from error

    def _drawn(self, count: int, key: int) -> int:
        """Which of `count` captions a row shows now: a hash, so that workers, ranks and resumed runs agree."""
        return 0 if count == 1 else stable_hash(f"{self._seed}/{int(self._epoch)}/{key}") % count

    def _image(self, value: Any, where: str) -> Image.Image:
        try:
            return read_image(value, root=self._image_root)
        except UnreadableImageError as error:
            raise UnreadableImageError(
                f'{where} has an unreadable image: {error}. Set on_bad_image="skip" to leave such rows out'
            ) from error

    def _known_image_id(self, cell: Mapping[str, Any], where: str) -> int | None:
        """The picture's identity by its id column, bytes or path; None where it has none of them."""
        if self._image_id_column is not None:
            value = cell[self._image_id_column]
            if isinstance(value, str | bytes):
                return stable_hash(value)
            try:
                return int(value)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{where}, column {self._image_id_column!r}: {value!r} is no integer or string"
                ) from error
        value = cell[self.image_column]
        if isinstance(value, dict):
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, bytes):
            return stable_hash(value)
        if isinstance(value, str | os.PathLike):
            return stable_hash(os.path.abspath(resolve_path(value, self._image_root)))
        return None


def _check_choices(captions: str, empty_captions: str, on_bad_image: str) -> None:
    """Refuses unknown values of the options that tables and streams share."""
    for name, value, known in (
        ("captions", captions, ("single", "draw", "expand")),
        ("empty_captions", empty_captions, ("raise", "drop")),
        ("on_bad_image", on_bad_image, ("raise", "skip")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}; expected one of {', '.join(map(repr, known))}")


def _undecoded(dataset: Any, image_column: str) -> tuple[Any, bool]:
    """The same rows with stored bytes and paths in place of decoded pictures, so that this package decodes them.

    Also returns whether a row can be looked at without decoding its picture.
    """
    features = getattr(dataset, "features", None)
    if features is None:
        return dataset, isinstance(dataset, list | tuple)
    if getattr(dataset, "format", {}).get("type") == "custom":  # a user's own transform makes the pictures
        return dataset, False
    from datasets import Image as ImageFeature

    dataset = dataset.with_format(None)
    if isinstance(features[image_column], ImageFeature) and features[image_column].decode:
        dataset = dataset.cast_column(image_column, ImageFeature(decode=False))
    return dataset, True
