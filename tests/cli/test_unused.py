"""Options of the data and of the adapter that have no effect beside the others."""

import pytest

from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
from hf_infcl.cli.train import build, make_parser
from hf_infcl.cli.unused import unused_options
from hf_infcl.data import sample_dataset
from tests.tiny import save_tiny


@pytest.fixture
def place(tmp_path):
    """The path of an empty file by its suffix, of a folder that holds only such a file, or the name as it is."""

    def make(name):
        if not name.startswith((".", "folder.")):
            return name
        folder = tmp_path / "folder" if name.startswith("folder") else tmp_path
        folder.mkdir(exist_ok=True)
        (folder / f"pairs{name.removeprefix('folder')}").touch()
        return str(folder if folder != tmp_path else folder / f"pairs{name}")

    return make


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sample:photo", {"delimiter": ";"}, "delimiter has no effect without a text table"),
        (
            "some/dataset",
            {"delimiter": ";", "encoding": "latin-1"},
            "delimiter, encoding have no effect without a text",
        ),
        (".parquet", {"encoding": "latin-1"}, "encoding has no effect without a text table"),
        ("folder.parquet", {"encoding": "latin-1"}, "encoding has no effect without a text table"),
        (".jsonl", {"delimiter": ";"}, "delimiter has no effect without a CSV"),
        (".csv", {"dataset_revision": "main"}, "dataset_revision has no effect with data that is not on the Hub"),
        (".csv", {"dataset_config": "a"}, "dataset_config has no effect with data that has no configurations"),
        ("sample", {"image_root": "pictures"}, "image_root has no effect with the built-in scenes"),
    ],
)
def test_an_option_of_data_of_another_kind_is_said_in_one_line(place, name, options, said):
    (line,) = unused_options(ScriptArguments(place(name), **options), ModelArguments("a"), evaluates=True)
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (".csv", {"delimiter": ";", "encoding": "latin-1", "image_root": "pictures"}),
        ("folder.tsv", {"delimiter": ";", "encoding": "latin-1"}),
        (".JSON", {"encoding": "latin-1"}),
        ("some/dataset", {"dataset_revision": "main", "dataset_config": "a"}),
        ("sample:photo:8", {"max_eval_samples": 4, "evaluate_base": False}),
    ],
)
def test_an_option_of_data_of_its_kind_is_said_nothing_of(place, name, options):
    arguments = ScriptArguments(place(name), **options)
    assert unused_options(arguments, ModelArguments("a", use_peft=True, lora_r=4), evaluates=True) == []


def test_adapter_options_without_an_adapter_are_one_line():
    (line,) = unused_options(ScriptArguments("a"), ModelArguments("a", lora_r=4, use_dora=True), evaluates=True)
    assert line == "lora_r, use_dora have no effect without use_peft: the whole model is trained"


def test_options_of_an_evaluation_that_there_is_not_are_said_once_at_the_start(tmp_path, caplog):
    sample_dataset("photo", size=4).to_parquet(tmp_path / "rows.parquet")
    options = {
        "model_name_or_path": save_tiny("clip", tmp_path / "base"),
        "dataset_name": tmp_path / "rows.parquet",
        "output_dir": tmp_path / "out",
        "per_device_train_batch_size": 4,
        "max_eval_samples": 4,
        "evaluate_base": False,
        "report_to": "none",
        "use_cpu": True,
    }
    build(*make_parser().parse([word for name, value in options.items() for word in (f"--{name}", str(value))]))
    (line,) = [record.message for record in caplog.records if "no effect" in record.message]
    assert line == "max_eval_samples, evaluate_base have no effect without a split to evaluate on"
