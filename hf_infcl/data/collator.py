"""From pairs to the tensors a dual encoder takes: the processor runs here, in the loader's workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_infcl.data.captions import SEVERAL, CaptionError, caption_list, is_list
from hf_infcl.data.counts import WorkerCounts
from hf_infcl.data.images import UnreadableImageError, read_image

logger = logging.getLogger(__name__)

_RAW = {"do_rescale": False, "do_normalize": False}
_UNLIMITED = 1_000_000  # tokenizers without a limit of their own say about 1e30


class ImageTextCollator:
    """Turns a list of pairs into a batch of tensors: image inputs, text inputs and `ids`.

    Pictures stay bytes where the processor allows: a quarter of the memory and of the traffic to the device, where the
    model rescales and normalises them. Whether a processor allows it is tried out here once, on a picture.

    Args:
        processor: the model's processor, with an `image_processor` and a `tokenizer`.
        text_kwargs: how the tokenizer pads and cuts; what the model's family needs (SigLIP: padding to its full
            length). By default padding to the longest, cut at the tokenizer's own limit.
        image_kwargs: further arguments for the image processor.
        keep_bytes: whether uint8 pixels may be passed on; False always rescales and normalises here.
        image_column, caption_column: the keys of the pictures and captions in a pair.

    Returns (when called):
        dict of tensors: `pixel_values` (n, 3, height, width) uint8 or float32, or what else the image processor makes;
        `input_ids` (n, length) and its masks, int64; `ids` (n, m) int64 where the pairs have them.

    Raises:
        ValueError: an unreadable picture or a caption that is missing, empty or a list; the message names the place.

    Example:
        >>> collate = ImageTextCollator(sample_processor())
        >>> {name: tuple(value.shape) for name, value in collate([pairs[0], pairs[1]]).items()}
        {'pixel_values': (2, 3, 32, 32), 'input_ids': (2, 16), 'attention_mask': (2, 16), 'ids': (2, 2)}
    """

    def __init__(
        self,
        processor: Any,
        text_kwargs: Mapping[str, Any] | None = None,
        *,
        image_kwargs: Mapping[str, Any] | None = None,
        keep_bytes: bool = True,
        image_column: str = "image",
        caption_column: str = "caption",
    ) -> None:
        self.image_processor: Any = getattr(processor, "image_processor", None)
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        if self.image_processor is None or self.tokenizer is None:
            raise ValueError(
                f"processor: expected one with an image_processor and a tokenizer, got {type(processor).__name__}"
            )
        limit = getattr(self.tokenizer, "model_max_length", _UNLIMITED)
        default = {"padding": True, **({"truncation": True, "max_length": limit} if limit < _UNLIMITED else {})}
        self.text_kwargs = dict(default if text_kwargs is None else text_kwargs)
        self.image_kwargs = dict(image_kwargs or {})
        self.image_column, self.caption_column = image_column, caption_column
        self.keeps_bytes = keep_bytes and self._gives_bytes()
        self._counts = WorkerCounts("seen", "cut")

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not pairs:
            raise ValueError("pairs: expected at least one, got none")
        images = [self._image(place, pair) for place, pair in enumerate(pairs)]
        captions = [self._caption(place, pair) for place, pair in enumerate(pairs)]
        batch = {**self.images(images), **self.texts(captions)}
        if "ids" in pairs[0]:
            rows = [np.atleast_1d(np.asarray(pair["ids"], dtype=np.int64)) for pair in pairs]
            batch["ids"] = torch.from_numpy(np.stack(rows))
        return batch

    def images(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """The image side alone, for pictures of any kind that `read_image` takes."""
        raw = _RAW if self.keeps_bytes else {}
        pictures = [read_image(image) for image in images]
        return dict(self.image_processor(images=pictures, return_tensors="pt", **{**self.image_kwargs, **raw}))

    def texts(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """The text side alone."""
        encoded = self.tokenizer(list(texts), return_tensors="pt", **self.text_kwargs)
        self._count_cut(texts, encoded)
        return dict(encoded)

    @property
    def truncated(self) -> tuple[int, int]:
        """(captions cut at the length limit, captions seen), over all worker processes."""
        return self._counts["cut"], self._counts["seen"]

    def _image(self, place: int, pair: Mapping[str, Any]) -> Any:
        try:
            return read_image(pair[self.image_column])
        except KeyError:
            raise ValueError(_missing("image", self.image_column, pair)) from None
        except UnreadableImageError as error:
            raise UnreadableImageError(f"pair {place} of the batch: {error}") from error

    def _caption(self, place: int, pair: Mapping[str, Any]) -> str:
        if self.caption_column not in pair:
            raise ValueError(_missing("caption", self.caption_column, pair))
        value = pair[self.caption_column]
        try:
            if is_list(value):
                raise CaptionError(SEVERAL)
            texts = caption_list(value)
        except CaptionError as error:
            raise CaptionError(f"pair {place} of the batch, column {self.caption_column!r} {error}") from error
        if not texts:
            raise CaptionError(
                f"pair {place} of the batch has no caption ({self.caption_column!r} is {value!r}); "
                'make the dataset with empty_captions="drop" to leave such rows out'
            )
        return texts[0]

    def _gives_bytes(self) -> bool:
        """Whether the processor without rescaling gives bytes, of which its normal output is a line a channel."""
        ramp = np.random.default_rng(0).integers(0, 256, (48, 48, 3)).astype(np.uint8)
        pictures = [read_image(ramp)]
        # Tensors: some processors make no arrays.
        normal = self.image_processor(images=pictures, return_tensors="pt", **self.image_kwargs)["pixel_values"]
        try:
            raw = self.image_processor(images=pictures, return_tensors="pt", **{**self.image_kwargs, **_RAW})
        except (TypeError, ValueError):  # a processor that does not know these arguments
            return False
        pixels, normal = raw["pixel_values"].numpy(), normal.numpy()
        if pixels.dtype != np.uint8 or pixels.shape != normal.shape:
            return False
        # (n, channels, height, width), or NaFlex patches (n, patches, height * width * channels)
        values, floats = (
            (array.transpose(1, 0, 2, 3).reshape(array.shape[1], -1) if array.ndim == 4 else array.reshape(-1, 3).T)
            for array in (pixels.astype(np.float64), normal.astype(np.float64))
        )
        if pixels.ndim != 4:  # padding patches are zero before and after
            used = (values != 0).any(axis=0)
            values, floats = values[:, used], floats[:, used]
        return all(
            np.allclose(np.polyval(np.polyfit(x, y, 1), x), y, atol=1e-4) for x, y in zip(values, floats, strict=True)
        )

    def _count_cut(self, texts: Sequence[str], encoded: Any) -> None:
        if not self.text_kwargs.get("truncation"):
            return
        if encodings := getattr(encoded, "encodings", None):
            cut = sum(bool(encoding.overflowing) for encoding in encodings)
        else:  # a tokenizer written in Python keeps nothing of what it cut
            limit = self.text_kwargs.get("max_length") or self.tokenizer.model_max_length
            lengths = map(len, self.tokenizer(list(texts), truncation=False)["input_ids"])
            cut = sum(length > limit for length in lengths)
        if cut and not self._counts["cut"]:
            logger.warning(
                "captions longer than %s tokens are cut: %d of %d in the first batch that has any",
                self.text_kwargs.get("max_length"),
                cut,
                len(texts),
            )
        self._counts.add(seen=len(texts), cut=cut)


def _missing(what: str, column: str, pair: Mapping[str, Any]) -> str:
    return f"no {what} column {column!r} in the pair; columns: {', '.join(map(str, pair))}. Set {what}_column"
