"""`hf-infcl mine`: a data set, a report and a page from the built-in scenes."""

import json
import re

import datasets
import pytest

from hf_infcl.cli import main
from hf_infcl.data import load_image_text_dataset
from tests.tiny import save_tiny


def test_writes_a_dataset_a_report_and_a_page(tmp_path, capsys):
    model = save_tiny("clip", tmp_path / "model")
    folder = tmp_path / "mined"
    data = ["--dataset_name", "sample:drawing:24", "--dataset_train_split", "train", "--output_dir", str(folder)]
    options = ["--num_negatives", "2", "--range_min", "1", "--range_max", "8", "--page_examples", "3"]
    assert main(["mine", "--model_name_or_path", model, *data, *options]) == 0
    said = capsys.readouterr().out
    assert "pairs" in said
    listed = re.findall(r"^  (\S+) +\w", said.partition(f"Written to {folder}:\n")[2], re.MULTILINE)
    assert sorted(name.rstrip("/") for name in listed) == sorted(path.name for path in folder.iterdir())
    assert listed[0] == "index.html"
    assert "index.html       open this" in said
    report = json.loads((folder / "report.json").read_text())
    assert report["settings"]["range_min"] == 1
    for direction, kind in (("image_to_text", str), ("text_to_image", None)):
        rows = datasets.load_dataset(str(folder), direction, split="train", cache_dir=str(tmp_path / "cache"))
        assert len(rows) == report[direction]["pairs_with_negatives"] == 24
        row = rows[0]
        assert {"anchor", "positive", "negative_1", "negative_2", "scores", "row", "negative_rows"} == set(row)
        assert len(row["scores"]) == 3
        assert row["scores"][1] >= row["scores"][2]
        assert row["row"] not in row["negative_rows"]
        if kind is str:
            assert isinstance(row["positive"], str)
            assert row["anchor"].size == (32, 32)
        else:
            assert isinstance(row["anchor"], str)
            assert row["negative_1"].size == (32, 32)
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 3 + 3 * 3
    assert "<h2>image to text</h2>" in page


def test_without_a_page_none_is_named(tmp_path, capsys):
    model, folder = save_tiny("clip", tmp_path / "model"), tmp_path / "mined"
    command = ["mine", "--model_name_or_path", model, "--dataset_name", "sample:photo:6", "--output_dir", str(folder)]
    assert main([*command, "--direction", "text_to_image", "--page_examples", "0"]) == 0
    said = capsys.readouterr().out
    assert "index.html" not in said
    assert "  text_to_image/ " in said
    assert "  image_to_text/ " not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_negatives", "0"], "num_negatives must be an integer >= 1"),
        (["--num_negatives", "4"], "num_negatives is 4, but 4 candidates leave a pair 3 negatives at most"),
        (["--min_score", "5"], "none of the 4 pairs has 3 negatives among 4 distinct candidates; lower num_negatives"),
        (["--direction", "image2text"], "'image2text'; expected one of image_to_text, text_to_image, both"),
        (["--page_examples", "-1"], "page_examples is -1; expected at least 0"),
        (["--dtype", "float8"], "dtype is 'float8'; expected one of auto, float32"),
        (["--colour", "red"], "colour"),
    ],
)
def test_bad_settings_end_with_status_2(tmp_path, capsys, options, message):
    model, folder = save_tiny("clip", tmp_path / "model"), tmp_path / "mined"
    command = ["mine", "--model_name_or_path", model, "--dataset_name", "sample:photo:4", "--output_dir", str(folder)]
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_pairs_without_enough_negatives_are_said_and_left_out(tmp_path, capsys):
    model, folder = save_tiny("clip", tmp_path / "model"), tmp_path / "mined"
    rows = load_image_text_dataset("sample:photo:8")
    # The first picture has all captions but the last, which is one negative; the last picture has seven.
    lines = ["image,caption"] + [f'{row // 7}.png,"{caption}"' for row, caption in enumerate(rows["caption"])]
    for number in range(2):
        rows[number]["image"].save(tmp_path / f"{number}.png")
    table = tmp_path / "pairs.csv"
    table.write_text("\n".join(lines))
    command = ["mine", "--model_name_or_path", model, "--dataset_name", str(table), "--output_dir", str(folder)]
    assert main([*command, "--direction", "image_to_text", "--num_negatives", "2"]) == 0
    assert "7 pairs are not written: fewer than num_negatives 2 are left for them" in capsys.readouterr().out


def test_a_folder_of_the_users_is_left_alone_before_a_model_is_looked_for(tmp_path, capsys):
    (tmp_path / "README.md").write_text("the user's own")
    command = ["mine", "--model_name_or_path", "no/such-model", "--dataset_name", "sample:photo:4"]
    assert main([*command, "--output_dir", str(tmp_path)]) == 2
    assert f"output_dir '{tmp_path}' is not empty and was not written by mine" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "the user's own"


def test_the_output_folder_of_a_recipe_of_train_is_not_mines(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: a/b\ndataset_name: sample:photo:4\noutput_dir: trained\nlearning_rate: 1e-3\n"
    )
    assert main(["mine", "--config", str(recipe)]) == 2
    assert "output_dir is missing: give --output_dir (a recipe of train means its own by it)" in capsys.readouterr().err


def test_a_second_run_replaces_all_of_the_first(tmp_path):
    model, folder = save_tiny("clip", tmp_path / "model"), tmp_path / "mined"
    command = ["mine", "--model_name_or_path", model, "--dataset_name", "sample:photo:6", "--output_dir", str(folder)]
    assert main(command) == 0
    (folder / "notes.txt").write_text("the user's own")
    assert main([*command, "--direction", "text_to_image", "--page_examples", "0"]) == 0
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    assert files == ["README.md", "notes.txt", "report.json", "text_to_image/train-00000.parquet"]


def test_what_a_second_run_wrote_is_what_datasets_reads(tmp_path):
    """`datasets` caches by the folder's last name, so another folder of that name is read as the first one too."""
    model, cache = save_tiny("clip", tmp_path / "model"), str(tmp_path / "cache")
    for folder, count in (("mined", 1), ("mined", 2), ("elsewhere/mined", 3)):
        command = ["mine", "--model_name_or_path", model, "--dataset_name", "sample:photo:6", "--page_examples", "0"]
        given = ["--output_dir", str(tmp_path / folder), "--num_negatives", str(count)]
        assert main([*command, *given, "--direction", "text_to_image"]) == 0
        rows = datasets.load_dataset(str(tmp_path / folder), "text_to_image", split="train", cache_dir=cache)
        assert [name for name in rows.column_names if name.startswith("negative_") and name != "negative_rows"] == [
            f"negative_{number + 1}" for number in range(count)
        ]
