"""Rescaling and normalising images on the device, so that a loader hands over a byte a value and not four."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_infcl.models.access import unwrap, vision_tower

_SIDE = 64  # of the pictures an image processor is asked about; any size would do


@dataclass(frozen=True)
class ImageNormalization:
    """An image processor's arithmetic as one line a channel: normalised = scale * byte + shift."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]


def set_image_normalization(model: nn.Module, processor: Any) -> bool:
    """Teaches the model's forward to rescale and normalise uint8 `pixel_values` as its processor does.

    The line is found by showing the processor plain black, white and grey pictures, for processors differ in what they
    do after resizing (EfficientNet's may divide by the deviation twice).

    Args:
        model: the dual encoder, changed in place; float `pixel_values` go on passing through as they are.
        processor: its processor, or the image processor alone.

    Returns:
        Whether uint8 images may be sent. False where the processor called with `do_rescale=False, do_normalize=False`
        gives no bytes, or does more than a line a channel.
    """
    image_processor = getattr(processor, "image_processor", processor)
    if not hasattr(image_processor, "preprocess"):  # a tokenizer alone
        return False
    normalization = _line_of(image_processor)
    unwrap(model)._infcl_image_normalization = normalization
    return normalization is not None


def _line_of(image_processor: Any) -> ImageNormalization | None:
    black, white, grey = (np.full((_SIDE, _SIDE, 3), value, dtype=np.uint8) for value in (0, 255, 100))
    for picture, value in ((black, 0), (white, 255)):
        raw = _first_pixel(image_processor, picture, do_rescale=False, do_normalize=False)
        if raw.dtype != np.uint8 or not (raw == value).all():
            return None
    low, high, middle = (_first_pixel(image_processor, picture).astype(np.float64) for picture in (black, white, grey))
    scale = (high - low) / 255
    if not np.allclose(low + 100 * scale, middle, atol=1e-5):
        return None
    return ImageNormalization(tuple(scale.tolist()), tuple(low.tolist()))


def _first_pixel(image_processor: Any, picture: np.ndarray, **kwargs: Any) -> np.ndarray:
    """Returns the three channels of a plain picture's middle, as the processor leaves them."""
    pixels = image_processor(picture, input_data_format="channels_last", return_tensors="np", **kwargs)["pixel_values"][
        0
    ]
    pixels = np.asarray(pixels)
    if pixels.ndim == 3:  # (channels, height, width)
        return pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2]
    return pixels[0, :3]  # NaFlex: (patches, height * width * channels), the channel fastest


def normalize_images(model: Any, pixel_values: Tensor) -> Tensor:
    """Returns float images from uint8 ones by the line that `set_image_normalization` found; float images as they are.

    Args:
        model: the transformers model itself.
        pixel_values: (B, C, H, W), or NaFlex patches (B, patches, height * width * C).
    """
    if pixel_values.dtype != torch.uint8:
        return pixel_values
    normalization: ImageNormalization | None = getattr(model, "_infcl_image_normalization", None)
    if normalization is None:
        raise ValueError(
            "uint8 pixel_values need the processor's mean and deviation: call prepare_dual_encoder(model, processor), "
            "or pass the float pixel_values that the processor makes"
        )
    # Numbers and not a tensor: model.half() would round a buffer, and copying a constant would wait for the device.
    channels = len(normalization.scale)
    images = pixel_values if pixel_values.ndim == 4 else pixel_values.unflatten(-1, (-1, channels))
    axis = 1 if pixel_values.ndim == 4 else -1
    lines = zip(images.unbind(axis), normalization.scale, normalization.shift, strict=True)
    floats = torch.stack([channel.float() * scale + shift for channel, scale, shift in lines], dim=axis)
    return floats.view(pixel_values.shape).to(next(vision_tower(model).parameters()).dtype)
