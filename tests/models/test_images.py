"""uint8 images normalised by the model against the processor's own floats."""

import numpy as np
import pytest
import torch
from transformers import EfficientNetImageProcessorPil

from hf_infcl.models import prepare_dual_encoder, set_image_normalization
from hf_infcl.models.images import normalize_images
from tests.tiny import MODELS, tiny_clip, tiny_processor

RAW = {"do_rescale": False, "do_normalize": False}


def _pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (40, 33, 3), dtype=np.uint8) for _ in range(3)]


@pytest.mark.parametrize("family", sorted(MODELS))
def test_bytes_are_normalised_as_the_processor_does(family: str) -> None:
    model, images = MODELS[family](), tiny_processor(family).image_processor
    assert set_image_normalization(model, images)
    raw = images(_pictures(), return_tensors="pt", **RAW)
    expected = images(_pictures(), return_tensors="pt")
    assert raw.pixel_values.dtype == torch.uint8
    pixels = normalize_images(model, raw.pixel_values)
    if "pixel_attention_mask" in raw:  # NaFlex: what lies in padding patches is never attended to
        real = raw.pixel_attention_mask.bool()
        pixels, expected.pixel_values = pixels[real], expected.pixel_values[real]
    torch.testing.assert_close(pixels, expected.pixel_values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", sorted(MODELS))
def test_bytes_and_floats_embed_alike(family: str) -> None:
    processor = tiny_processor(family)
    model = prepare_dual_encoder(MODELS[family](), processor)
    from_bytes = model(**processor.image_processor(_pictures(), return_tensors="pt", **RAW)).image_embeds
    from_floats = model(**processor.image_processor(_pictures(), return_tensors="pt")).image_embeds
    torch.testing.assert_close(from_bytes, from_floats, atol=1e-5, rtol=0)


def test_a_tokenizer_alone_teaches_nothing() -> None:
    assert not set_image_normalization(tiny_clip(), tiny_processor("clip").tokenizer)


def test_floats_pass_unchanged() -> None:
    model = tiny_clip()
    set_image_normalization(model, tiny_processor("clip"))
    pixels = torch.rand(1, 3, 32, 32)
    assert normalize_images(model, pixels) is pixels


def test_bytes_without_a_processor_are_refused() -> None:
    model = prepare_dual_encoder(tiny_clip())
    with pytest.raises(ValueError, match="prepare_dual_encoder"):
        model(pixel_values=torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_half_the_model_keeps_the_normalisation_exact() -> None:
    model = prepare_dual_encoder(tiny_clip(), tiny_processor("clip")).bfloat16()
    raw = torch.full((1, 3, 32, 32), 200, dtype=torch.uint8)
    expected = (200 / 255 - torch.tensor([0.48145466, 0.4578275, 0.40821073])) / torch.tensor(
        [0.26862954, 0.26130258, 0.27577711]
    )
    assert torch.equal(normalize_images(model, raw)[0, :, 0, 0], expected.bfloat16())


def test_a_processor_that_divides_twice_is_followed_or_refused() -> None:
    size = {"height": 32, "width": 32}
    model = tiny_clip()
    once = EfficientNetImageProcessorPil(size=size, include_top=False)
    assert set_image_normalization(model, once)
    expected = once(_pictures(), return_tensors="pt").pixel_values
    raw = once(_pictures(), return_tensors="pt", **RAW).pixel_values
    torch.testing.assert_close(normalize_images(model, raw), expected, atol=1e-6, rtol=0)
    assert not set_image_normalization(model, EfficientNetImageProcessorPil(size=size, include_top=True))
