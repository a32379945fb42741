"""One policy for pictures, whatever route they come by: path, bytes, `datasets` struct, PIL image or array -> RGB.

* the type is decided by content, never by the file's name;
* the first frame of an animation;
* EXIF orientation is applied; a broken tag costs the orientation only, with a warning;
* transparency is composited on white, colours hidden under it do not show;
* CMYK, palette and grey pictures become RGB; 16-bit greys keep their upper byte;
* arrays are height x width x channels (channels first only where nothing else is possible), bytes, or floats in 0..1.

Whatever cannot be read raises [`UnreadableImageError`]; nothing is guessed and no global switch of Pillow is touched.
"""

from __future__ import annotations

import io
import logging
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

logger = logging.getLogger(__name__)

# What Pillow's decoders raise for damaged files (UnidentifiedImageError is an OSError).
_DECODER_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    ZeroDivisionError,
    MemoryError,
    Image.DecompressionBombError,
)


class UnreadableImageError(ValueError):
    """A picture that cannot be used; the message says which one and why."""


def read_image(source: Any, *, root: str | os.PathLike[str] | None = None) -> Image.Image:
    """Read one picture as RGB under the policy of this module.

    Args:
        source: a path, encoded bytes, a dict with `bytes` and/or `path` (what `datasets` stores), a PIL image, or an
            array or tensor (height, width, channels).
        root: the folder that relative paths start from; by default the working directory.

    Returns:
        An RGB image with all pixels loaded, never the object passed in unless that is plain RGB already.

    Raises:
        UnreadableImageError: a missing, damaged or unsupported picture.

    Example:
        >>> read_image(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0))
        (255, 255, 255)
    """
    if isinstance(source, Image.Image):
        return _to_rgb(source, "the image")
    if isinstance(source, dict) and ("bytes" in source or "path" in source):
        if source.get("bytes") is not None:
            return _decode(io.BytesIO(source["bytes"]), source.get("path") or "the image's bytes")
        source = source.get("path")
    if isinstance(source, bytes | bytearray | memoryview):
        return _decode(io.BytesIO(source), "the image's bytes")
    if isinstance(source, str | os.PathLike):
        path = resolve_path(source, root)
        if not os.path.isfile(path):
            raise UnreadableImageError(f"{path}: {'is a folder' if os.path.isdir(path) else 'no such file'}")
        return _decode(path, path)
    if source is None:
        raise UnreadableImageError("the image is missing (None)")
    return _from_array(source)


def resolve_path(path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> str:
    """The file a table's cell names: relative to `root`, with Windows' separators understood everywhere."""
    text = os.fspath(path).strip()
    joined = os.path.join(root, text) if root is not None else text
    if os.sep == "/" and "\\" in text and not os.path.exists(joined):
        text = text.replace("\\", "/")
        joined = os.path.join(root, text) if root is not None else text
    return joined


def _decode(file: str | io.BytesIO, name: str) -> Image.Image:
    if isinstance(file, io.BytesIO) and not file.getbuffer().nbytes:
        raise UnreadableImageError(f"{name}: empty, 0 bytes")
    try:
        with Image.open(file) as image:
            return _to_rgb(image, name)
    except UnreadableImageError:
        raise
    except _DECODER_ERRORS as error:
        if isinstance(file, str) and os.path.isfile(file) and Path(file).stat().st_size == 0:
            reason = "empty, 0 bytes"
        elif isinstance(error, Image.UnidentifiedImageError):
            reason = "not an image that Pillow knows"
        else:
            reason = str(error) or type(error).__name__
        raise UnreadableImageError(f"{name}: {reason}") from error


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if type(image) is Image.Image and image.mode == "RGB" and not image.info:
        return image  # pixels in memory, nothing to interpret
    try:
        if getattr(image, "n_frames", 1) > 1:
            image.seek(0)
        image.load()  # decode here, where a damaged file can still be named
        image = _upright(image, name)
        if image.mode == "F":
            raise UnreadableImageError(f"{name}: 32-bit float pixels have no known range; store 8-bit pixels")
        if image.mode.startswith("I"):
            return _grey_of_integers(image)
        if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, image).convert("RGB")
        return image.convert("RGB")
    except UnreadableImageError:
        raise
    except _DECODER_ERRORS as error:
        raise UnreadableImageError(f"{name}: {str(error) or type(error).__name__}") from error


def _upright(image: Image.Image, name: str) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except _DECODER_ERRORS as error:
        logger.warning("%s: its EXIF orientation is broken and was left out (%s)", name, error)
        return image


def _grey_of_integers(image: Image.Image) -> Image.Image:
    """16-bit greys: Pillow's own conversion would turn everything above 255 white."""
    values = np.asarray(image).astype(np.int64)
    # Mode I, 32 bits, is what Pillow makes of several depths: only there do the values tell which it was.
    if image.mode != "I" or (values.size and values.max() > 255):
        values = values >> 8
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")


def _from_array(source: Any) -> Image.Image:
    try:
        array = np.asarray(source.detach().cpu() if hasattr(source, "detach") else source)
    except ValueError as error:
        raise UnreadableImageError(f"an image of type {type(source).__name__}: {error}") from error
    wanted = "expected (height, width), or (height, width, channels) with 1, 3 or 4 channels"
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        raise UnreadableImageError(f"an image of type {type(source).__name__} and shape {array.shape}; {wanted}")
    if array.dtype.kind == "b":
        array = array.astype(np.uint8) * 255
    elif array.dtype.kind in "iuf":
        low, high = float(array.min()), float(array.max())
        top = 1.0 if array.dtype.kind == "f" else 255.0
        if not (low >= 0 and high <= top):
            raise UnreadableImageError(
                f"a {array.dtype} array with values from {low:g} to {high:g}; expected 0 to {top:g} "
                "(integers 0..255, floats 0..1)"
            )
        array = np.rint(array * 255.0) if array.dtype.kind == "f" else array
    else:
        raise UnreadableImageError(f"an image of type {type(source).__name__} and dtype {array.dtype}; {wanted}")
    return _to_rgb(Image.fromarray(np.ascontiguousarray(array.astype(np.uint8))), "the array")
