"""What a user got wrong is one line and exit status 2; what breaks in the training keeps its traceback."""

import pytest

from hf_infcl import InfCLTrainer
from hf_infcl.cli import main
from tests.tiny import save_tiny


def options(tmp_path, **changes):
    said = {"model_name_or_path": save_tiny("clip", tmp_path / "base"), "dataset_name": "sample:photo:8", **changes}
    return [word for name, value in said.items() for word in (f"--{name}", str(value))]


def train_options(tmp_path, **changes):
    run = {"output_dir": tmp_path / "out", "per_device_train_batch_size": 4, "max_steps": 1, "use_cpu": True}
    return options(tmp_path, **run, report_to="none", evaluate_base=False, **changes)


@pytest.mark.parametrize(
    ("command", "changes", "said"),
    [
        ("train", {"dataset_name": "./nowhere"}, "no such file or folder"),
        ("train", {"model_name_or_path": "./nowhere"}, "nowhere"),
        ("train", {"gradient_accumulation_steps": 9}, "fewer than one contrastive batch of 36"),
        ("train", {"image_column": "picture"}, "picture"),
        ("train", {"resume_from_checkpoint": "last"}, "there is no checkpoint"),
        ("evaluate", {"dataset_name": "./nowhere"}, "no such file or folder"),
        ("evaluate", {"model_name_or_path": "./nowhere"}, "nowhere"),
        ("mine", {"caption_column": "words"}, "words"),
    ],
)
def test_what_cannot_be_built_is_one_line(tmp_path, capsys, command, changes, said):
    if command == "train":
        given = train_options(tmp_path, **changes)
    else:
        given = options(tmp_path, **changes) + (["--output_dir", str(tmp_path / "out")] if command == "mine" else [])
    capsys.readouterr()
    assert main([command, *given]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"hf-infcl {command}: error: ")
    assert said in line


def test_an_error_of_the_training_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(*_args, **_kwargs):
        raise ValueError("in a step")

    monkeypatch.setattr(InfCLTrainer, "training_step", broken)
    with pytest.raises(ValueError, match="in a step"):
        main(["train", *train_options(tmp_path, dataset_test_split="none")])
