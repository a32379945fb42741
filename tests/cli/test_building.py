"""From a recipe's words to data sets: what becomes of a split that is not there."""

import re

import pytest
import yaml

from hf_infcl import InfCLConfig
from hf_infcl.cli.arguments import ScriptArguments
from hf_infcl.cli.building import load_datasets
from hf_infcl.data import sample_dataset


def places(folder):
    """The same pairs as a table, a folder of pictures, a saved data set and a Parquet file: all of them `train`."""
    rows = sample_dataset("photo", size=4)
    pictures = folder / "pictures"
    pictures.mkdir()
    lines = ["file_name,caption"]
    for number, row in enumerate(rows):
        row["image"].save(pictures / f"{number}.png")
        lines.append(f'{number}.png,"{row["caption"]}"')
    (pictures / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows.to_parquet(folder / "rows.parquet")
    return {"table": pictures / "metadata.csv", "folder": pictures, "parquet": folder / "rows.parquet"}


def load(tmp_path, name, eval_strategy="no", **options):
    args = InfCLConfig(str(tmp_path / "out"), use_cpu=True, report_to="none", eval_strategy=eval_strategy, eval_steps=1)
    return load_datasets(ScriptArguments(str(name), **options), args)


@pytest.mark.parametrize("kind", ["table", "folder", "parquet"])
def test_data_without_a_test_split_is_trained_on_without_evaluation(tmp_path, kind, caplog):
    place = places(tmp_path)[kind]
    train, test = load(tmp_path, place)
    assert (len(train), test) == (4, None)
    assert caplog.text.count("training without evaluation") == 1
    assert "no split 'test' (it has train)" in caplog.text
    # Asked for by the strategy, or by name.
    for options in ({"eval_strategy": "steps"}, {"dataset_test_split": "test"}):
        with pytest.raises(ValueError, match=r"has no split 'test' \(it has train\).*dataset_test_split: none"):
            load(tmp_path, place, **options)


def test_the_lines_that_an_error_offers_hold_a_part_back(tmp_path):
    rows = sample_dataset("photo", size=20)
    rows.to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="hold a tenth back by") as caught:
        load(tmp_path, tmp_path / "rows.parquet", "epoch")
    lines = yaml.safe_load("\n".join(re.findall(r"`(dataset_\w+_split: \"[^`]*)`", str(caught.value))))
    assert lines == {"dataset_train_split": "train[:90%]", "dataset_test_split": "train[90%:]"}
    train, test = load(tmp_path, tmp_path / "rows.parquet", "epoch", **lines)
    assert (len(train), len(test)) == (18, 2)


def test_a_training_split_that_is_not_there_lists_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"has no split 'training' \(it has train\)$"):
        load(tmp_path, places(tmp_path)["parquet"], dataset_train_split="training")


def test_a_slice_is_held_back(tmp_path):
    options = {"dataset_train_split": "train[:75%]", "dataset_test_split": "train[75%:]"}
    train, test = load(tmp_path, places(tmp_path)["table"], **options)
    assert (len(train), len(test)) == (3, 1)


def test_the_test_split_is_found_and_other_errors_are_left_alone(tmp_path):
    assert load(tmp_path, "sample:photo:8")[1] is not None
    table = tmp_path / "pairs.csv"
    table.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no image column"):
        load(tmp_path, table)


@pytest.mark.parametrize(("config", "said"), [(None, "several configurations"), ("zz", "no configuration 'zz'")])
def test_a_configuration_that_is_not_named_or_not_there(tmp_path, config, said):
    lines = ["---", "configs:"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        sample_dataset("photo", size=2).to_parquet(tmp_path / name / "train.parquet")
        lines += [f"- config_name: {name}", f"  data_files: {name}/*.parquet"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    with pytest.raises(ValueError, match=f"has {said}; name one of one, two: --dataset_config one"):
        load(tmp_path, tmp_path, dataset_config=config)
    train, _ = load(tmp_path, tmp_path, dataset_config="two", dataset_test_split=None)
    assert len(train) == 2
