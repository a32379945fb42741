"""Streams give the pairs that tables give, in any number of workers."""

import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from hf_infcl.data import ImageTextCollator, ImageTextDataset, ImageTextStream, sample_dataset, sample_processor
from hf_infcl.data.captions import CaptionError
from hf_infcl.data.images import UnreadableImageError
from tests.data.test_dataset import bad_table, keep, picture


def contents(pairs):
    return [(pair["image"].tobytes(), pair["caption"], pair["ids"]) for pair in pairs]


@pytest.mark.parametrize("captions", ["single", "expand"])
def test_a_stream_gives_the_tables_pairs(captions):
    data = sample_dataset("photo", size=6, captions_per_image=1 if captions == "single" else 3)
    wanted = contents(ImageTextDataset(data, captions=captions))
    assert contents(ImageTextStream(data.to_iterable_dataset(), captions=captions)) == wanted


def test_workers_share_a_stream_and_draw_alike():
    data = sample_dataset("drawing", size=12, captions_per_image=4)
    stream = ImageTextStream(data.to_iterable_dataset(num_shards=4), captions="draw")
    seen = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        alone = contents(stream)
        shared = [pair for pairs in DataLoader(stream, 2, num_workers=2, collate_fn=keep) for pair in pairs]
        assert sorted(contents(shared)) == sorted(alone)
        seen.append(alone)
    assert seen[0] == seen[2] != seen[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_pictures_are_skipped_and_counted_or_named(workers):
    rows = bad_table()
    skipping = ImageTextStream(rows.to_iterable_dataset(num_shards=2), on_bad_image="skip")
    pairs = [pair for pairs in DataLoader(skipping, 2, num_workers=workers, collate_fn=keep) for pair in pairs]
    assert sorted((pair["image"].getpixel((0, 0))[0], pair["caption"]) for pair in pairs) == [
        (value, f"caption {value}") for value in (0, 2, 4, 6, 7)
    ]
    assert skipping.skipped == (3, 8)
    assert skipping.skip_report() == "3 of 8 rows skipped"
    with pytest.raises(UnreadableImageError, match="row 1 has an unreadable image"):
        list(ImageTextStream(rows.to_iterable_dataset()))


def test_empty_captions_are_refused_or_dropped():
    rows = Dataset.from_list([{"image": picture(), "caption": text} for text in ("a", "", "b")]).to_iterable_dataset()
    with pytest.raises(CaptionError, match="row 1"):
        list(ImageTextStream(rows))
    stream = ImageTextStream(rows, empty_captions="drop")
    assert [pair["caption"] for pair in stream] == ["a", "b"]
    assert stream.skipped == (1, 3)


def test_streams_are_collated():
    stream = ImageTextStream(sample_dataset("photo", size=5).to_iterable_dataset())
    batches = list(DataLoader(stream, 2, collate_fn=ImageTextCollator(sample_processor())))
    assert [len(batch["ids"]) for batch in batches] == [2, 2, 1]


def test_a_table_class_refuses_a_stream_by_name():
    with pytest.raises(ValueError, match="ImageTextStream reads streams"):
        ImageTextDataset(sample_dataset("photo", size=2).to_iterable_dataset())
