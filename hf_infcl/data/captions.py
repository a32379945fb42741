"""What a caption may be: one string, a number, bytes, or a list of them where several captions were asked for."""

from __future__ import annotations

import hashlib
import math
import numbers
from typing import Any


class CaptionError(ValueError):
    """A caption that cannot be used; the message says why, and what to set."""


SEVERAL = (
    'has a list of captions; set captions="draw" to take one of them per epoch (by seed), '
    'or captions="expand" to make a row of each'
)


def caption_list(value: Any) -> list[str]:
    """All usable captions in a cell; empty ones (None, NaN, blank) are left out.

    Words such as "None" or "NA" are text. Numbers become their digits; 7.0 is "7", as tables turn integers with gaps
    into floats.

    Raises:
        CaptionError: a value that is no caption, such as a dict or half of a surrogate pair.
    """
    if not is_list(value):
        text = _text(value)
        return [text] if text and not text.isspace() else []
    texts: list[str] = []
    for item in value if isinstance(value, list | tuple) else value.tolist():
        if isinstance(item, list | tuple):
            raise CaptionError("has lists inside its list of captions; expected strings")
        if isinstance(item, numbers.Real):
            raise CaptionError("has a list of numbers, such as token ids; expected strings")
        text = _text(item)
        if text and not text.isspace():
            texts.append(text)
    return texts


def is_list(value: Any) -> bool:
    """Whether a cell holds a list of captions rather than one."""
    return isinstance(value, list | tuple) or bool(getattr(value, "ndim", 0))


def stable_hash(content: str | bytes) -> int:
    """A non-negative 63-bit integer of a text or of bytes, the same in every process and on every machine."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _text(value: Any) -> str:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # half a character, such as JSON can hold; no tokenizer takes it
            raise CaptionError(f"has a caption that is no Unicode text ({error})") from error
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CaptionError(f"has bytes that are not UTF-8 ({error})") from error
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise CaptionError(f"is of type {type(value).__name__}; expected a string")
    if isinstance(value, numbers.Integral):
        return str(int(value))
    number = float(value)
    if math.isnan(number):
        return ""
    return str(int(number)) if number.is_integer() else str(number)
