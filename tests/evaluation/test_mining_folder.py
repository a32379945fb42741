"""A folder to write to: new ones and mining's own are taken, and no file of somebody else is ever replaced."""

import json

import pytest

from hf_infcl.evaluation.mining_folder import check_folder, clear_folder, own_files


def mined(folder, *more):
    files = ["README.md", "report.json", "image_to_text/train-00000.parquet", *more]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mined")
    (folder / "report.json").write_text(json.dumps({"settings": {}, "files": files}))
    return folder


def test_new_and_empty_folders_and_minings_own_are_taken(tmp_path):
    check_folder(tmp_path / "new")
    check_folder(tmp_path)
    check_folder(mined(tmp_path))
    (tmp_path / "notes.txt").write_text("mine has no file of this name")
    check_folder(tmp_path)


@pytest.mark.parametrize("report", [None, "no JSON", "[]", '{"files": 3}', '{"loss": 0.1}'])
def test_a_folder_of_something_else_is_refused(tmp_path, report):
    (tmp_path / "README.md").write_text("the user's own")
    if report is not None:
        (tmp_path / "report.json").write_text(report)
    with pytest.raises(ValueError, match=r"is not empty and was not written by mine \(README\.md is there\)"):
        check_folder(tmp_path)


def test_a_file_of_the_users_with_a_name_that_mining_gives_is_refused(tmp_path):
    (mined(tmp_path) / "index.html").write_text("the user's own")
    with pytest.raises(ValueError, match=r"index\.html was not written by mine, which would replace it"):
        check_folder(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        check_folder(tmp_path / "file")


def test_only_what_mining_wrote_is_removed(tmp_path):
    folder = mined(tmp_path / "mined", "image_to_text/train-00001.parquet", "../README.md", "notes.txt")
    (tmp_path / "README.md").write_text("outside")
    (folder / "README.txt").write_text("the user's own")
    shards = ["image_to_text/train-00000.parquet", "image_to_text/train-00001.parquet"]
    assert own_files(folder) == ["README.md", *shards, "report.json"]
    clear_folder(folder)
    assert sorted(file.name for file in folder.rglob("*")) == ["README.txt", "notes.txt"]
    assert (tmp_path / "README.md").read_text() == "outside"
