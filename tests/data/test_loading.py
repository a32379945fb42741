"""Names, paths, tables and folders: what loads, and what is said of what does not."""

import csv
import io
import json
import logging
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from hf_infcl.data import ImageTextDataset, ImageTextStream, load_image_text_dataset, sample_dataset
from hf_infcl.data.captions import CaptionError


def png(value):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def pictures(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    for value in range(count):
        (folder / f"{value}.png").write_bytes(png(value))


def write_csv(path, rows, delimiter=",", encoding="utf-8", header=("image", "caption")):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


def values(dataset, **options):
    """(the grey value of each picture, its caption)."""
    return [(pair["image"].getpixel((0, 0))[0], pair["caption"]) for pair in ImageTextDataset(dataset, **options)]


def test_csv_paths_start_from_the_tables_folder_whatever_the_working_directory(tmp_path, monkeypatch):
    pictures(tmp_path / "d" / "images", 2)
    table = write_csv(tmp_path / "d" / "t.csv", [("images/0.png", "a dog, running"), ("images\\1.png", "cat")])
    wanted = [(0, "a dog, running"), (1, "cat")]
    for folder, name in ((tmp_path, "d/t.csv"), ("/", str(table)), (tmp_path / "d", "t.csv")):
        monkeypatch.chdir(folder)
        dataset = load_image_text_dataset(name)
        monkeypatch.chdir("/")
        assert values(dataset) == wanted


def test_image_root_replaces_the_tables_folder(tmp_path):
    pictures(tmp_path / "elsewhere", 1)
    table = write_csv(tmp_path / "t.csv", [("0.png", "a")])
    assert values(load_image_text_dataset(table, image_root=tmp_path / "elsewhere")) == [(0, "a")]


@pytest.mark.parametrize("delimiter", ["\t", ";", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_separators_and_marked_encodings_are_recognised(tmp_path, delimiter, encoding):
    pictures(tmp_path, 1)
    table = write_csv(tmp_path / "t.csv", [("0.png", "café, à la crème")], delimiter, encoding)
    assert values(load_image_text_dataset(table)) == [(0, "café, à la crème")]


def test_another_encoding_is_named_and_can_be_set(tmp_path):
    pictures(tmp_path, 1)
    table = write_csv(tmp_path / "t.csv", [("0.png", "café à la crème")], encoding="latin-1")
    with pytest.raises(ValueError, match=r"t\.csv, line 2: byte 0xe9 is not utf-8; set encoding"):
        load_image_text_dataset(table)
    assert values(load_image_text_dataset(table, encoding="latin-1")) == [(0, "café à la crème")]


def test_unmarked_utf_16_is_named(tmp_path):
    table = write_csv(tmp_path / "t.csv", [("0.png", "a")], encoding="utf-16-le")
    with pytest.raises(ValueError, match="zero bytes.*set encoding"):
        load_image_text_dataset(table)


def test_unquoted_commas_are_refused_with_line_and_count(tmp_path):
    pictures(tmp_path / "images", 2)
    (tmp_path / "t.csv").write_text("image,caption\nimages/0.png,a dog, running\nimages/1.png,cat\n")
    with pytest.raises(ValueError, match=r"line 2: 3 fields where the header has 2 \(image, caption\)"):
        load_image_text_dataset(tmp_path / "t.csv")


@pytest.mark.parametrize("cell", ['"a "big" dog"', '"a dog'])
def test_stray_quotes_are_refused_with_their_line(tmp_path, cell):
    (tmp_path / "t.csv").write_text(f"image,caption\n0.png,a\n1.png,{cell}\n2.png,b\n")
    with pytest.raises(ValueError, match=r"t\.csv, line [34]"):
        load_image_text_dataset(tmp_path / "t.csv")


def test_words_in_a_csv_stay_words_and_an_empty_cell_is_an_empty_caption(tmp_path):
    pictures(tmp_path, 7)
    words = ["None", "null", "NA", "nan", "7", "", "a dog"]
    table = write_csv(tmp_path / "t.csv", [(f"{row}.png", word) for row, word in enumerate(words)])
    dataset = load_image_text_dataset(table)
    with pytest.raises(CaptionError, match=r"1 of 7 rows \(row 5\)"):
        ImageTextDataset(dataset)
    wanted = [(row, word) for row, word in enumerate(words) if word]
    assert values(dataset, empty_captions="drop") == wanted


def test_missing_pictures_are_counted_before_anything_starts(tmp_path, caplog):
    pictures(tmp_path, 4)
    table = write_csv(tmp_path / "t.csv", [(f"{row}.png", f"c{row}") for row in (0, 8, 1, 2, 9, 3)])
    with pytest.raises(ValueError, match=r"2 of 6 pictures .*8\.png \(row 1\).*9\.png \(row 4\).*image_root"):
        load_image_text_dataset(table)
    dataset = load_image_text_dataset(table, on_bad_image="skip")
    assert "2 of 6" in caplog.text
    assert values(dataset, on_bad_image="skip") == [(0, "c0"), (1, "c1"), (2, "c2"), (3, "c3")]


@pytest.mark.parametrize("text", ["image,caption\n", ""])
def test_a_table_without_rows_is_named(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=r"no rows in .*t\.csv"):
        load_image_text_dataset(tmp_path / "t.csv")


def test_missing_columns_list_those_there_are(tmp_path):
    table = write_csv(tmp_path / "t.csv", [("0.png", "a")], header=("image", "words"))
    pictures(tmp_path, 1)
    with pytest.raises(ValueError, match=r"no caption column found; columns: image, words\. Set caption_column"):
        load_image_text_dataset(table)
    assert values(load_image_text_dataset(table, caption_column="words"), caption_column="words") == [(0, "a")]


@pytest.mark.parametrize(
    ("kind", "cells", "said"),
    [
        ("int64", [0, 1], "'text' holds int64, the first is 0; expected text"),
        ("float32", [0.5, 1.0], "'text' holds float32, the first is 0.5"),
        ("bool", [True, False], "'text' holds bool, the first is True"),
        (ClassLabel(names=["cat", "dog"]), [1, 0], "'text' holds int64, the first is 1"),
        (List(Value("int32")), [[7, 8], [9]], r"'text' holds int32, the first is \[7, 8\]"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_caption_column_without_text_is_refused(kind, cells, said, streamed):
    kind = Value(kind) if isinstance(kind, str) else kind
    rows = {"image": [{"bytes": png(0)}, {"bytes": png(1)}], "text": cells}
    table = Dataset.from_dict(rows, features=Features({"image": ImageFeature(), "text": kind}))
    table = table.to_iterable_dataset() if streamed else table
    with pytest.raises(ValueError, match=f"caption_column {said}"):
        (ImageTextStream if streamed else ImageTextDataset)(table)


def test_numbers_in_a_table_are_refused_and_a_transform_may_make_texts_of_them(tmp_path):
    pictures(tmp_path, 2)
    (tmp_path / "t.jsonl").write_text('{"image": "0.png", "text": 3}\n{"image": "1.png", "text": 4}\n')
    with pytest.raises(ValueError, match="caption_column 'text' holds int64, the first is 3"):
        load_image_text_dataset(tmp_path / "t.jsonl")
    table = Dataset.from_dict({"image": [png(0), png(1)], "text": [3, 4]})
    made = table.with_transform(lambda rows: rows | {"text": [f"scene {number}" for number in rows["text"]]})
    assert values(made) == [(0, "scene 3"), (1, "scene 4")]


def test_jsonl_with_lists_of_captions_and_numbers(tmp_path):
    pictures(tmp_path, 2)
    rows = [{"file_name": "0.png", "captions": ["a", "b\u2028c"]}, {"file_name": "1.png", "captions": ["d"]}]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    dataset = load_image_text_dataset(tmp_path / "t.jsonl")
    assert values(dataset, captions="expand") == [(0, "a"), (0, "b\u2028c"), (1, "d")]
    (tmp_path / "t.json").write_text(json.dumps([{"image": "0.png", "text": 7}, {"image": "1.png", "text": "x"}]))
    assert values(load_image_text_dataset(tmp_path / "t.json")) == [(0, "7"), (1, "x")]
    (tmp_path / "bad.jsonl").write_text('{"image": "0.png", "text": "a"}\n{"image": \n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: no JSON"):
        load_image_text_dataset(tmp_path / "bad.jsonl")


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([png(0), png(1)], pa.binary()),
        (["0.png", "1.png"], pa.string()),
        ([{"bytes": png(0), "path": "gone/0.png"}, {"bytes": png(1), "path": None}], STRUCT),
        ([{"bytes": png(0), "path": None}, {"bytes": None, "path": "1.png"}], STRUCT),
    ],
)
def test_parquet_with_bytes_structs_or_paths(tmp_path, column, kind):
    pictures(tmp_path, 2)
    pq.write_table(pa.table({"image": pa.array(column, kind), "text": ["a", "b"]}), tmp_path / "t.parquet")
    dataset = load_image_text_dataset(tmp_path / "t.parquet")
    assert values(dataset) == [(0, "a"), (1, "b")]
    assert dataset[0]["image"].size == (4, 4)


@pytest.mark.parametrize(
    "card", [None, "# Pairs\n", "---\nconfigs:\n- config_name: default\n  data_files: '*.parquet'\n---\n"]
)
def test_a_folder_whose_files_changed_is_read_as_it_is_now(tmp_path, monkeypatch, card):
    """`datasets` caches what a README's configurations name by the folder's name alone."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "pairs"
    folder.mkdir()
    if card is not None:
        (folder / "README.md").write_text(card)
    for captions in (["a", "b"], ["c", "d"], ["e", "f", "g"]):
        pictures = pa.array([png(0)] * len(captions), pa.binary())
        pq.write_table(pa.table({"image": pictures, "caption": captions}), folder / "t.parquet")
        dataset = load_image_text_dataset(folder)
        assert [dataset[row]["caption"] for row in range(len(dataset))] == captions


@pytest.mark.parametrize("moved", [True, False])
def test_parquet_with_a_moved_path_or_no_picture_names_the_row(tmp_path, moved):
    cell = {"bytes": None, "path": "renamed.png"} if moved else None
    rows = {"image": [{"bytes": png(0), "path": None}, cell], "text": ["a", "b"]}
    features = Features({"image": ImageFeature(), "text": Value("string")})
    pq.write_table(pa.table(rows, schema=features.arrow_schema), tmp_path / "t.parquet")
    message = r"renamed\.png \(row 1\)" if moved else r"1 of 2 rows has no picture in column 'image' \(row 1\)"
    with pytest.raises(ValueError, match=message):
        load_image_text_dataset(tmp_path / "t.parquet")
    dataset = load_image_text_dataset(tmp_path / "t.parquet", on_bad_image="skip")
    assert values(dataset, on_bad_image="skip") == [(0, "a")]


def test_a_folder_of_tables_is_split_by_names(tmp_path):
    pictures(tmp_path / "images", 3)
    for number, name in enumerate(("train-00001", "train-00002", "val")):
        write_csv(tmp_path / f"{name}.csv", [(f"images/{number}.png", name)])
    assert values(load_image_text_dataset(tmp_path)) == [(0, "train-00001"), (1, "train-00002")]
    assert values(load_image_text_dataset(tmp_path, split="validation")) == [(2, "val")]
    assert values(load_image_text_dataset(tmp_path, split="train[1:]")) == [(1, "train-00002")]
    with pytest.raises(ValueError, match=r"split='test' is not in .*; it has train, validation"):
        load_image_text_dataset(tmp_path, split="test")


def test_a_folder_of_parquet_files(tmp_path):
    for split, value in (("train", 1), ("test", 2)):
        pq.write_table(
            pa.table({"image": pa.array([png(value)], pa.binary()), "text": [split]}), tmp_path / f"{split}.parquet"
        )
    assert values(load_image_text_dataset(tmp_path, split="test")) == [(2, "test")]
    streamed = load_image_text_dataset(tmp_path, split="test", streaming=True)
    assert [row["text"] for row in streamed] == ["test"]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_image_folders_with_metadata(tmp_path, nested, kind):
    pictures(tmp_path / "train", 2)
    (tmp_path / "train" / "1.png").rename(tmp_path / "train" / "1.PNG")
    pictures(tmp_path / "test", 1)
    for split, names in (("train", ("0.png", "1.PNG")), ("test", ("0.png",))):
        folder = tmp_path / split if nested else tmp_path
        rows = [(name if nested else f"{split}/{name}", f"{split} {name}") for name in names]
        if kind == "csv":
            if nested or split == "train":
                rows = rows if nested else [*rows, ("test/0.png", "test 0.png")]
                write_csv(folder / "metadata.csv", rows, header=("file_name", "text"))
        else:
            with open(folder / "metadata.jsonl", "a") as file:
                file.writelines(json.dumps({"file_name": name, "text": text}) + "\n" for name, text in rows)
    assert values(load_image_text_dataset(tmp_path)) == [(0, "train 0.png"), (1, "train 1.PNG")]
    assert values(load_image_text_dataset(tmp_path, split="test")) == [(0, "test 0.png")]


def test_a_picture_without_a_caption_is_reported(tmp_path, caplog):
    pictures(tmp_path / "train", 3)
    write_csv(tmp_path / "train" / "metadata.csv", [("0.png", "a"), ("1.png", "b")], header=("file_name", "caption"))
    with caplog.at_level(logging.WARNING):
        dataset = load_image_text_dataset(tmp_path)
    assert "1 picture has no caption" in caplog.text
    assert os.path.join("train", "2.png") in caplog.text
    assert values(dataset) == [(0, "a"), (1, "b")]


def test_a_caption_without_a_picture_is_refused_before_training(tmp_path):
    pictures(tmp_path / "train", 2)
    rows = [("0.png", "a"), ("1.png", "b"), ("9.png", "ghost")]
    write_csv(tmp_path / "train" / "metadata.csv", rows, header=("file_name", "caption"))
    with pytest.raises(ValueError, match=r"1 of 3 pictures named in column 'file_name' is missing: .*9\.png \(row 2\)"):
        load_image_text_dataset(tmp_path)


def test_a_folder_without_metadata_says_what_it_wants(tmp_path):
    pictures(tmp_path / "train", 2)
    write_csv(tmp_path / "train" / "meta1000.csv", [("0.png", "a")], header=("file_name", "caption"))
    with pytest.raises(ValueError, match=r"no caption column found; columns: image\..*meta1000\.csv"):
        load_image_text_dataset(tmp_path)
    assert values(load_image_text_dataset(tmp_path / "train" / "meta1000.csv")) == [(0, "a")]


def test_saved_datasets(tmp_path):
    data = sample_dataset("drawing", size=3)
    data.save_to_disk(tmp_path / "one")
    DatasetDict(train=data, test=data.select([2])).save_to_disk(tmp_path / "two")
    assert load_image_text_dataset(tmp_path / "one")["caption"][:] == data["caption"][:]
    assert load_image_text_dataset(tmp_path / "two", split="test")["caption"][:] == data["caption"][2:]
    with pytest.raises(ValueError, match="it has train, test"):
        load_image_text_dataset(tmp_path / "two", split="dev")


def test_the_built_in_scenes_by_name():
    loaded = load_image_text_dataset("sample:photo:6", split="test[2:]")
    wanted = sample_dataset("photo", "test", size=6)
    assert loaded["caption"][:] == wanted["caption"][2:]
    assert np.array_equal(loaded[0]["image"], wanted[2]["image"])
    with pytest.raises(ValueError, match=r"domain='oil'.*drawing, photo"):
        load_image_text_dataset("sample:oil")
    with pytest.raises(ValueError, match="split='dev'"):
        load_image_text_dataset("sample:photo", split="dev")


def test_paths_that_do_not_exist_are_no_hub_names(tmp_path):
    for name in (tmp_path / "gone", "./gone", "gone.csv", "a\\b", "a/b/c", "~/gone"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            load_image_text_dataset(name)
    wanted = r"no file or folder here \(/.*/owner/gone\) and cannot be had from the Hub: .*HF_HUB_OFFLINE=1"
    with pytest.raises(FileNotFoundError, match=wanted):
        load_image_text_dataset("owner/gone")
    (tmp_path / "t.xlsx").write_text("x")
    with pytest.raises(ValueError, match=r"\.xlsx is no kind of table"):
        load_image_text_dataset(tmp_path / "t.xlsx")
    with pytest.raises(ValueError, match="neither pictures nor tables"):
        load_image_text_dataset(tmp_path)


def test_web_addresses_are_refused(tmp_path):
    table = write_csv(tmp_path / "t.csv", [("https://example.org/0.png", "a")])
    with pytest.raises(ValueError, match="web addresses"):
        load_image_text_dataset(table)


def test_one_picture_has_one_id_by_path_and_by_list(tmp_path):
    """A table with a row per caption and one with a list per picture have to be evaluated alike."""
    pictures(tmp_path, 2)
    write_csv(tmp_path / "rows.csv", [("0.png", "a"), ("0.png", "b"), ("1.png", "c")])
    lists = [{"image": "0.png", "captions": ["a", "b"]}, {"image": "1.png", "captions": ["c"]}]
    (tmp_path / "lists.jsonl").write_text("\n".join(map(json.dumps, lists)))
    ids = [
        [pair["ids"] for pair in ImageTextDataset(load_image_text_dataset(tmp_path / name), captions="expand")]
        for name in ("rows.csv", "lists.jsonl")
    ]
    assert ids[0] == ids[1]
