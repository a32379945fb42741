"""The built-in sample data: drawn scenes with captions, in two visual domains, made from a seed whenever wanted."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from hf_infcl.data.sample_render import DOMAINS, render_scenes
from hf_infcl.data.sample_scenes import SPLITS, describe, draw_scene

if TYPE_CHECKING:
    from datasets import Dataset

SAMPLE_IMAGE_SIZE = 32
# Large enough that NumPy's own work outweighs the calls, small enough to stay in the cache.
_SCENES_AT_ONCE = 64


def sample_arrays(
    domain: str,
    split: str = "train",
    size: int = 4096,
    seed: int = 0,
    *,
    image_size: int = SAMPLE_IMAGE_SIZE,
    captions_per_image: int = 1,
) -> tuple[np.ndarray, list[list[str]]]:
    """The sample scenes as plain arrays, without encoding them: the fast way for a training loop of one's own.

    Row i is the same whatever `size` is. No scene of the test split occurs in the training split, in either domain.

    Args:
        domain: `"drawing"` or `"photo"`.
        split: `"train"` or `"test"`.
        size: number of scenes.
        seed: another seed gives other scenes.
        image_size: width and height in pixels.
        captions_per_image: wordings of each scene.

    Returns:
        The pictures, uint8 (size, image_size, image_size, 3), and for each one a list of its captions.

    Raises:
        ValueError: an unknown domain or split, or a size below 1.

    Example:
        >>> images, captions = sample_arrays("drawing", size=2)
        >>> images.shape
        (2, 32, 32, 3)
    """
    images = np.empty((size, image_size, image_size, 3), np.uint8)
    captions: list[list[str]] = []
    for block, texts in _blocks(domain, split, size, seed, image_size, captions_per_image):
        images[len(captions) : len(captions) + len(texts)] = block
        captions.extend(texts)
    return images, captions


def sample_dataset(
    domain: str,
    split: str = "train",
    size: int = 4096,
    seed: int = 0,
    *,
    image_size: int = SAMPLE_IMAGE_SIZE,
    captions_per_image: int = 1,
) -> Dataset:
    """The sample scenes as a `datasets.Dataset`, made in memory; nothing is downloaded or stored.

    Args: see [`sample_arrays`].

    Returns:
        Columns `image` (PIL), `caption` (a string; with several captions an image, `captions`, a list of strings)
        and `image_id` (int64).

    Example:
        >>> sample_dataset("photo", "test", size=3)[0]["caption"]
        'two small red plain stars on white'
    """
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    pictures: list[dict[str, bytes]] = []
    captions: list[list[str]] = []
    for block, texts in _blocks(domain, split, size, seed, image_size, captions_per_image):
        pictures.extend({"bytes": _png(image)} for image in block)
        captions.extend(texts)
    ids = [_identity(domain, split, seed, index) >> 1 for index in range(size)]
    if captions_per_image == 1:
        text_column, texts_feature = "caption", Value("string")
        text_rows: list = [texts[0] for texts in captions]
    else:
        text_column, texts_feature, text_rows = "captions", List(Value("string")), captions
    return Dataset.from_dict(
        {"image": pictures, text_column: text_rows, "image_id": ids},
        features=Features({"image": ImageFeature(), text_column: texts_feature, "image_id": Value("int64")}),
    )


def sample_captions(split: str = "train", size: int = 4096, seed: int = 0) -> list[str]:
    """Captions alone, without drawing: for a tokenizer or a vocabulary. Arguments: see [`sample_arrays`]."""
    _check(split=split, size=size)
    rngs = (_generator("text", split, seed, index) for index in range(size))
    return [describe(draw_scene(rng, split), rng) for rng in rngs]


def _blocks(
    domain: str, split: str, size: int, seed: int, image_size: int, captions_per_image: int
) -> Iterator[tuple[np.ndarray, list[list[str]]]]:
    _check(domain=domain, split=split, size=size, image_size=image_size, captions_per_image=captions_per_image)
    for start in range(0, size, _SCENES_AT_ONCE):
        indices = range(start, min(start + _SCENES_AT_ONCE, size))
        rngs = [_generator(domain, split, seed, index) for index in indices]
        scenes = [draw_scene(rng, split) for rng in rngs]
        captions = [
            [describe(scene, rng) for _ in range(captions_per_image)] for scene, rng in zip(scenes, rngs, strict=True)
        ]
        yield render_scenes(scenes, domain, rngs, image_size), captions


def _check(**arguments: str | int) -> None:
    for name, value in arguments.items():
        known = {"domain": DOMAINS, "split": SPLITS}.get(name)
        if known and value not in known:
            raise ValueError(f"{name}={value!r} is not part of the sample data; expected one of {', '.join(known)}")
        if not known and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _generator(domain: str, split: str, seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_identity(domain, split, seed, index)))


def _identity(domain: str, split: str, seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{domain}/{split}/{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
