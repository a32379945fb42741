"""The built-in scenes: what tests, demo and documentation rely on."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from hf_infcl.data import sample_arrays, sample_captions, sample_dataset, sample_processor
from hf_infcl.data.sample_scenes import draw_scene


def test_a_row_does_not_depend_on_how_many_are_drawn():
    for domain in ("drawing", "photo"):
        many, texts = sample_arrays(domain, size=70)
        few, few_texts = sample_arrays(domain, size=3)
        assert np.array_equal(many[:3], few)
        assert texts[:3] == few_texts


def test_another_process_draws_the_same():
    code = (
        "import hashlib; from hf_infcl.data import sample_arrays; images, captions = sample_arrays('photo', size=3); "
        "print(hashlib.sha256(images.tobytes() + repr(captions).encode()).hexdigest())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    images, captions = sample_arrays("photo", size=3)
    assert told.stdout.strip() == hashlib.sha256(images.tobytes() + repr(captions).encode()).hexdigest()


def test_seed_split_and_domain_each_give_other_pictures():
    pictures = [
        sample_arrays(domain, split, size=4, seed=seed)[0].tobytes()
        for domain in ("drawing", "photo")
        for split in ("train", "test")
        for seed in (0, 1)
    ]
    assert len(set(pictures)) == 8


def test_there_are_more_than_fifty_thousand_captions():
    """Of 4,000 draws from 50,000 equally likely captions about 155 would repeat an earlier one (the birthday rule)."""
    captions = sample_captions(size=4000)
    assert len(captions) - len(set(captions)) < 100


def test_no_scene_is_in_both_splits():
    rng = np.random.default_rng(0)
    test_scenes = {draw_scene(rng, "test") for _ in range(2000)}
    train_scenes = {draw_scene(rng, "train") for _ in range(2000)}
    assert not test_scenes & train_scenes


def test_the_domains_look_different():
    """A drawing has few colours; no two pixels of a photo need agree."""
    colours = {
        domain: np.unique(sample_arrays(domain, size=1)[0].reshape(-1, 3), axis=0) for domain in ("drawing", "photo")
    }
    assert len(colours["photo"]) > 4 * len(colours["drawing"])


def test_dataset_holds_the_same_pixels_and_captions_as_the_arrays():
    images, captions = sample_arrays("photo", "test", size=5, seed=3)
    rows = sample_dataset("photo", "test", size=5, seed=3)
    assert rows.column_names == ["image", "caption", "image_id"]
    assert rows["caption"][:] == [texts[0] for texts in captions]
    assert all(np.array_equal(np.asarray(row["image"]), image) for row, image in zip(rows, images, strict=True))
    assert len(set(rows["image_id"])) == 5
    assert min(rows["image_id"]) >= 0


def test_several_wordings_of_one_scene():
    row = sample_dataset("drawing", size=1, captions_per_image=4)[0]
    assert len(row["captions"]) == 4
    assert len(set(row["captions"])) > 1


@pytest.mark.parametrize("arguments", [{"domain": "oil"}, {"split": "dev"}, {"size": 0}, {"captions_per_image": 0}])
def test_bad_arguments_are_named(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=name):
        sample_arrays(**{"domain": "photo", **arguments})


def test_processor_gives_one_token_a_word_and_survives_saving(tmp_path):
    from transformers import AutoProcessor

    processor = sample_processor(32)
    processor.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    text = ["two big stripy red stars on grey", "", "café 🐶"]
    assert loaded.tokenizer(text).input_ids == processor.tokenizer(text).input_ids
    first, empty, foreign = processor.tokenizer(text).input_ids
    assert len(first) == 2 + 7
    assert len(empty) == 2
    assert len(foreign) > 3
    assert first[-1] == processor.tokenizer.eos_token_id == len(processor.tokenizer) - 1
    assert (
        max(map(len, processor.tokenizer(sample_captions(size=2000)).input_ids)) <= processor.tokenizer.model_max_length
    )
