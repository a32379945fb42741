"""Batches of tensors: bytes kept, text padded as the family needs, captions cut and counted."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hf_infcl.data import ImageTextCollator, ImageTextDataset, sample_dataset, sample_processor
from hf_infcl.data.captions import CaptionError
from hf_infcl.data.images import UnreadableImageError
from tests.tiny import MODELS, tiny_processor


def pairs(*captions, size=(40, 32)):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (len(captions), size[1], size[0], 3)).astype(np.uint8)
    return [
        {"image": Image.fromarray(image), "caption": caption, "ids": (row, 10 + row)}
        for row, (image, caption) in enumerate(zip(images, captions, strict=True))
    ]


@pytest.mark.parametrize("family", MODELS)
def test_bytes_are_what_the_processor_normalises(family):
    processor = tiny_processor(family)
    batch = pairs("a dog", "a red square")
    kept, plain = ImageTextCollator(processor)(batch), ImageTextCollator(processor, keep_bytes=False)(batch)
    wanted = processor.image_processor([pair["image"] for pair in batch], return_tensors="pt")["pixel_values"]
    assert torch.equal(plain["pixel_values"], wanted)
    assert kept["pixel_values"].dtype == torch.uint8
    images = processor.image_processor
    mean, std = (torch.tensor(values)[:, None, None] for values in (images.image_mean, images.image_std))
    pixels = kept["pixel_values"]
    if pixels.ndim == 3:  # patches, the channel fastest; those that pad are zero and masked
        used = kept["pixel_attention_mask"].bool()
        pixels, wanted = (values[used].unflatten(-1, (-1, 3)).movedim(-1, 0) for values in (pixels, wanted))
    assert torch.allclose((pixels / 255 - mean) / std, wanted, atol=1e-5)
    assert all(isinstance(value, torch.Tensor) for value in kept.values())
    assert kept["ids"].tolist() == [[0, 10], [1, 11]]


class Squared:
    """An image processor whose output is no line of the bytes."""

    def __call__(self, images, return_tensors, do_rescale=True, do_normalize=True):
        pixels = np.stack([np.asarray(image).transpose(2, 0, 1) for image in images])
        pixels = (pixels / 255.0).astype(np.float32) ** 2 if do_rescale else pixels
        return {"pixel_values": torch.from_numpy(pixels) if return_tensors == "pt" else pixels}


def test_bytes_are_not_kept_where_the_processor_does_more_than_a_line():
    processor = tiny_processor("clip")
    processor.image_processor = Squared()
    collate = ImageTextCollator(processor)
    assert not collate.keeps_bytes
    assert collate(pairs("a"))["pixel_values"].dtype == torch.float32


def test_a_caption_is_cut_with_its_end_kept_and_counted_once(caplog):
    processor = tiny_processor("clip")
    kwargs = {"padding": True, "truncation": True, "max_length": 77}
    collate = ImageTextCollator(processor, kwargs)
    with caplog.at_level(logging.WARNING):
        batch = collate(pairs("dog " * 300, "a dog 🐶"))
        collate(pairs("dog " * 300))
    end = processor.tokenizer.eos_token_id
    assert batch["input_ids"].shape == (2, 77)
    assert batch["input_ids"][0, -1] == end
    assert collate.truncated == (2, 3)
    assert caplog.text.count("are cut") == 1


def test_cut_captions_are_counted_across_workers():
    data = ImageTextDataset(sample_dataset("drawing", size=24))
    collate = ImageTextCollator(sample_processor(), {"padding": True, "truncation": True, "max_length": 8})
    list(DataLoader(data, 4, num_workers=2, collate_fn=collate))
    cut, seen = collate.truncated
    assert seen == 24
    assert 0 < cut <= 24


def test_fixed_padding_does_not_depend_on_the_batch():
    collate = ImageTextCollator(
        tiny_processor("siglip"), {"padding": "max_length", "truncation": True, "max_length": 64}
    )
    alone, together = collate.texts(["a dog"]), collate.texts(["a dog", "a small red star left of a dog"])
    assert alone["input_ids"].shape == (1, 64)
    assert torch.equal(alone["input_ids"][0], together["input_ids"][0])


def test_pairs_without_ids_give_a_batch_without():
    batch = pairs("a")
    del batch[0]["ids"]
    assert "ids" not in ImageTextCollator(tiny_processor("clip"))(batch)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"caption": ["a", "b"]}, CaptionError, 'pair 1.*captions="draw"'),
        ({"caption": None}, CaptionError, "pair 1.*no caption"),
        ({"caption": {"en": "a"}}, CaptionError, "pair 1.*dict"),
        ({"caption": "a dog \ud83d"}, CaptionError, "pair 1.*column 'caption' has a caption that is no Unicode text"),
        ({"image": None}, UnreadableImageError, "pair 1.*missing"),
    ],
)
def test_bad_pairs_are_named(change, error, message):
    batch = pairs("a", "b")
    batch[1].update(change)
    with pytest.raises(error, match=message):
        ImageTextCollator(tiny_processor("clip"))(batch)


def test_numbers_are_text():
    collate = ImageTextCollator(tiny_processor("clip"))
    seven = collate([{**pair, "caption": 7} for pair in pairs("x")])
    assert torch.equal(seven["input_ids"], collate(pairs("7"))["input_ids"])


def test_missing_keys_and_processors_are_named():
    with pytest.raises(ValueError, match=r"no caption column 'text' in the pair; columns: image, caption, ids"):
        ImageTextCollator(tiny_processor("clip"), caption_column="text")(pairs("a"))
    with pytest.raises(ValueError, match="image_processor and a tokenizer"):
        ImageTextCollator(tiny_processor("clip").tokenizer)
