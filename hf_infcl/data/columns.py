"""Which column holds the pictures and which the captions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# Best first. Compared in lower case, so that WebDataset's upper-case extensions count too.
IMAGE_NAMES = (
    *("image", "img", "images", "picture", "photo", "image_path", "image_file", "file_name", "filename", "filepath"),
    *("file", "path", "image_bytes", "pixel_values", "jpg", "jpeg", "png", "webp"),
)
CAPTION_NAMES = (
    *("caption", "captions", "text", "texts", "sentence", "sentences", "title", "description", "alt_text", "prompt"),
    *("name", "names", "label_text", "txt"),
)


def find_columns(
    dataset: Any, image_column: str | None, caption_column: str | None, *, extra: Iterable[str | None] = ()
) -> tuple[str, str]:
    """The names of the image and the caption column.

    Args:
        dataset: a `datasets` table or stream, or a sequence of dicts.
        image_column: the name wished for, or None to look for the usual ones and then for an image type.
        caption_column: likewise for captions.
        extra: further columns that must exist.

    Raises:
        ValueError: a column that is missing; the message lists those there are and the option that names one.
    """
    names = list(getattr(dataset, "column_names", None) or _keys(dataset))
    features = getattr(dataset, "features", None) or {}
    image = image_column or _by_name(names, IMAGE_NAMES)
    if image_column is None and (image is None or not _is_image(features.get(image))):
        typed = [name for name in names if _is_image(features.get(name))]
        image = typed[0] if typed else image
    caption = caption_column or _by_name([name for name in names if name != image], CAPTION_NAMES)
    for option, name in (("image_column", image), ("caption_column", caption)):
        if name is None or name not in names:
            what = option.removesuffix("_column")
            wanted = "" if name is None else f" {name!r}"
            raise ValueError(
                f"no {what} column{wanted} found; columns: {', '.join(names)}. Set {option} to the one that holds the "
                f"{'pictures' if what == 'image' else 'captions'}{_hint(names)}"
            )
    for name in extra:
        if name is not None and name not in names:
            raise ValueError(f"no column {name!r} found; columns: {', '.join(names)}")
    assert image is not None
    assert caption is not None
    return image, caption


def _hint(names: Sequence[str]) -> str:
    """A table whose only column has separators in its name was read with the wrong one."""
    for separator, said in (("\t", "a tab"), (";", "';'"), ("|", "'|'"), (",", "','")):
        if len(names) == 1 and separator in names[0]:
            return f"; the only column has {said} in its name: set delimiter to that"
    return ""


def _keys(dataset: Any) -> list[str]:
    first = dataset[0] if hasattr(dataset, "__getitem__") else next(iter(dataset))
    if not isinstance(first, dict):
        raise ValueError(f"the dataset's rows are of type {type(first).__name__}; expected dicts of columns")
    return list(first)


def _by_name(names: Sequence[str], usual: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in usual if name in lower), None)


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image"
