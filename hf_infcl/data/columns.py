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

# Arrow's names; null is a column without any value, which is refused where rows are read.
_TEXT_TYPES = ("string", "binary", "string_view", "binary_view", "null")
_NAMED = 3  # how many rows a message names


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
        ValueError: a column that is missing; the message lists those there are and the option that names one. A caption
            column whose type is no text, such as class numbers.
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
    _check_texts(dataset, caption, features.get(caption))
    return image, caption


def _check_texts(dataset: Any, column: str, feature: Any) -> None:
    """Refuses a caption column whose type says that it holds no text; one without a type is looked at when read.

    A class number or a token id would be trained on as its digits, and nothing would tell.
    """
    from datasets import List, Value

    # A user's own transform makes the captions of a row, whatever is stored.
    if feature is None or getattr(dataset, "format", {}).get("type") == "custom":
        return
    inner = feature.feature if isinstance(feature, List) else feature
    if isinstance(inner, Value) and inner.dtype.removeprefix("large_") in _TEXT_TYPES:
        return
    first = next((row[column] for row in dataset.select_columns([column])), None)
    raise ValueError(
        f"caption_column {column!r} holds {getattr(inner, 'dtype', type(inner).__name__)}, the first is {first!r}; "
        "expected text: name another column, or make texts of these"
    )


def named_rows(rows: Sequence[int]) -> str:
    """Rows in the words of a message, the first few of them.

    Example:
        >>> named_rows([3]), named_rows([3, 5, 8, 9])
        ('row 3', 'rows 3, 5, 8, ...')
    """
    shown = ", ".join(map(str, rows[:_NAMED])) + (", ..." if len(rows) > _NAMED else "")
    return f"row{'s' * (len(rows) != 1)} {shown}"


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
