"""Rows as pairs: captions, identities, epochs in workers, and rows that cannot be used."""

import io

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from torch.utils.data import DataLoader

from hf_infcl.data import ImageTextDataset, sample_dataset
from hf_infcl.data.captions import CaptionError
from hf_infcl.data.images import UnreadableImageError


def picture(value=0):
    return Image.new("RGB", (4, 4), (value, value, value))


def table(captions, name="caption"):
    return [{"image": picture(row), name: caption} for row, caption in enumerate(captions)]


def png(value):
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


def keep(pairs):
    return pairs


def captions_of(loader):
    return [pair["caption"] for pairs in loader for pair in pairs]


@pytest.mark.parametrize(("captions", "asked"), [(["0", "17"], True), (["0", "a dog"], False), (["1.", "2"], False)])
def test_captions_that_are_all_numbers_are_asked_about(captions, asked, caplog):
    """A CSV's classes are text to the table that holds them."""
    ImageTextDataset([{"image": Image.new("RGB", (2, 2)), "text": caption} for caption in captions])
    assert ("column 'text' holds nothing but numbers: are these the captions?" in caplog.text) is asked


def test_words_that_look_like_nothing_are_text_and_numbers_are_digits():
    words = ["None", "null", "NA", "nan", 7, 42, 7.0, np.int64(3), b"bytes"]
    pairs = ImageTextDataset(table(words))
    assert [pair["caption"] for pair in pairs] == ["None", "null", "NA", "nan", "7", "42", "7", "3", "bytes"]


@pytest.mark.parametrize("empty", ["", "  \n", None, float("nan")])
def test_empty_captions_are_refused_with_their_rows_or_dropped_and_counted(empty):
    rows = table(["a", empty, "b", empty])
    with pytest.raises(CaptionError, match=r"2 of 4 rows \(rows 1, 3\).*empty_captions=\"drop\""):
        ImageTextDataset(rows)
    pairs = ImageTextDataset(rows, empty_captions="drop")
    assert [pair["caption"] for pair in pairs] == ["a", "b"]
    assert [pair["image"].getpixel((0, 0))[0] for pair in pairs] == [0, 2]
    assert pairs.skipped == [(1, "no caption"), (3, "no caption")]


def test_lists_of_captions_need_an_explicit_choice():
    rows = Dataset.from_dict({"image": [png(0), png(1)], "captions": [["a", "b"], ["c", "d"]]})
    with pytest.raises(CaptionError, match=r'captions="draw".*captions="expand"'):
        ImageTextDataset(rows)


@pytest.mark.parametrize(
    "value", [{"en": "a"}, [["a"], ["b"]], [49406, 320, 49407], b"\xff\xfe", "\ud83d", ["a", "\ud83d"], object()]
)
def test_other_values_are_refused_with_their_row(value):
    with pytest.raises(CaptionError, match="row 1, column 'caption'"):
        ImageTextDataset(
            [{"image": picture(), "caption": "a"}, {"image": picture(), "caption": value}], captions="draw"
        )


def test_expanding_makes_a_row_of_each_caption():
    rows = table([["a", "b"], ["c"], [None, "d", ""]])
    pairs = ImageTextDataset(rows, captions="expand")
    assert [(pair["image"].getpixel((0, 0))[0], pair["caption"]) for pair in pairs] == [
        (0, "a"),
        (0, "b"),
        (1, "c"),
        (2, "d"),
    ]
    assert pairs[0]["ids"][0] == pairs[1]["ids"][0] != pairs[2]["ids"][0]


def test_drawing_depends_on_seed_epoch_and_row_and_shows_every_caption():
    rows = table([[f"{row}-{number}" for number in range(5)] for row in range(20)])

    def epochs(seed, count=30):
        pairs = ImageTextDataset(rows, captions="draw", seed=seed)
        seen = []
        for epoch in range(count):
            pairs.set_epoch(epoch)
            seen.append([pair["caption"] for pair in pairs])
        return seen

    first = epochs(0)
    assert first == epochs(0)
    assert first[0] != first[1]
    assert first[0] != epochs(1, 1)[0]
    assert {caption for epoch in first for caption in epoch} == {caption for row in rows for caption in row["caption"]}


def test_the_epoch_reaches_persistent_workers():
    data = sample_dataset("drawing", size=12, captions_per_image=4)
    pairs = ImageTextDataset(data, captions="draw")
    loader = DataLoader(
        pairs, 4, num_workers=1, persistent_workers=True, collate_fn=keep, multiprocessing_context="spawn"
    )
    seen = []
    for epoch in (0, 1, 0):
        pairs.set_epoch(epoch)
        seen.append(captions_of(loader))
        assert seen[-1] == [pair["caption"] for pair in pairs]
    assert seen[0] == seen[2] != seen[1]


def test_ids_tell_same_pictures_and_same_captions():
    rows = Dataset.from_dict({"image": [png(0), png(0), png(1)], "caption": ["a", "b", "a"]})
    ids = np.array([pair["ids"] for pair in ImageTextDataset(rows)])
    assert ids[0, 0] == ids[1, 0] != ids[2, 0]
    assert ids[0, 1] == ids[2, 1] != ids[1, 1]
    assert (ids >= 0).all()
    pairs = ImageTextDataset(rows)
    assert [pairs.ids(row) for row in range(3)] == [tuple(row) for row in ids.tolist()]


def test_caption_ids_never_change():
    """Stored in checkpoints beside the embeddings of a memory bank, so a release must not alter them."""
    assert ImageTextDataset(table(["a dog"]))[0]["ids"] == (0, 7182415866560184703)


def test_image_ids_come_from_the_named_column():
    rows = [{"image": picture(), "caption": "a", "key": key} for key in (5, "x", "x")]
    ids = [pair["ids"][0] for pair in ImageTextDataset(rows, image_id_column="key")]
    assert ids[0] == 5
    assert ids[1] == ids[2]
    with pytest.raises(ValueError, match="no column 'nokey' found; columns: image, caption, key"):
        ImageTextDataset(rows, image_id_column="nokey")


def bad_table():
    half = png(7)[: len(png(7)) // 2]
    images = [png(0), half, png(2), b"", png(4), b"<html>", png(6), png(7)]
    return Dataset.from_dict({"image": images, "caption": [f"caption {row}" for row in range(8)]})


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_picture_stops_the_run_and_is_named(workers):
    loader = DataLoader(ImageTextDataset(bad_table()), 2, num_workers=workers, collate_fn=keep)
    with pytest.raises(UnreadableImageError, match=r"row 1 has an unreadable image.*on_bad_image"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_drops_whole_pairs_and_counts_them(workers, caplog):
    pairs = ImageTextDataset(bad_table(), on_bad_image="skip")
    assert "3 of 8 rows skipped" in caplog.text
    assert [row for row, _ in pairs.skipped] == [1, 3, 5]
    read = [pair for pairs in DataLoader(pairs, 2, num_workers=workers, collate_fn=keep) for pair in pairs]
    assert [(pair["image"].getpixel((0, 0))[0], pair["caption"]) for pair in read] == [
        (value, f"caption {value}") for value in (0, 2, 4, 6, 7)
    ]


def test_nothing_left_is_an_error():
    rows = Dataset.from_dict({"image": [b"", b"x"], "caption": ["a", "b"]})
    with pytest.raises(ValueError, match="2 of 2 rows skipped"):
        ImageTextDataset(rows, on_bad_image="skip")
    with pytest.raises(ValueError, match="no rows"):
        ImageTextDataset([])


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match=r"no caption column found; columns: image\. Set caption_column"):
        ImageTextDataset([{"image": picture()}])
    with pytest.raises(ValueError, match=r"no image column 'foto' found; columns: image, caption"):
        ImageTextDataset(table(["a"]), image_column="foto")
    with pytest.raises(ValueError, match="set delimiter"):
        ImageTextDataset([{"image;caption": "a.png;a"}])


def test_columns_are_found_by_name_and_type():
    data = sample_dataset("drawing", size=2).rename_columns({"image": "scan", "caption": "TEXT"})
    pairs = ImageTextDataset(data)
    assert (pairs.image_column, pairs.caption_column) == ("scan", "TEXT")


def test_a_users_own_transform_is_respected():
    def grey(rows):
        return {"image": [image.convert("L") for image in rows["image"]], "caption": ["x"] * len(rows["image"])}

    pair = ImageTextDataset(sample_dataset("drawing", size=2).with_transform(grey))[1]
    red, green, blue = pair["image"].split()
    assert pair["caption"] == "x"
    assert red.tobytes() == green.tobytes() == blue.tobytes()


def test_another_dataset_class_is_checked_row_by_row():
    class Rows(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 2

        def __getitem__(self, row):
            self.read += 1
            return {"image": picture(), "caption": ["a", ""][row]}

    rows = Rows()
    pairs = ImageTextDataset(rows)
    assert rows.read == 1  # for the names of its columns
    assert pairs[0]["caption"] == "a"
    with pytest.raises(CaptionError, match="row 1"):
        pairs[1]
