"""What a user got wrong is one line and exit status 2; what is wrong here keeps its traceback and asks for a report."""

import json
import signal

import pytest

from hf_infcl import InfCLTrainer
from hf_infcl.cli import main
from hf_infcl.data import sample_dataset
from tests.tiny import save_tiny


def options(tmp_path, **changes):
    said = {"model_name_or_path": save_tiny("clip", tmp_path / "base"), "dataset_name": "sample:photo:8", **changes}
    return [word for name, value in said.items() for word in (f"--{name}", str(value))]


def train_options(tmp_path, **changes):
    run = {"output_dir": tmp_path / "out", "per_device_train_batch_size": 4, "max_steps": 1, "use_cpu": True}
    return options(tmp_path, **{**run, "report_to": "none", "evaluate_base": False, **changes})


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
        ("train", {"optim": "adamw_bnb_8bit"}, "You need to install `bitsandbytes`"),
        ("train", {"report_to": "wandb"}, "wandb to be installed"),
        ("train", {"model_init_kwargs": '{"layers": 1}'}, "model_init_kwargs={'layers': 1}"),
        ("train", {"accelerator_config": '{"colour": 1}'}, "'colour'"),
        ("train", {"use_peft": True, "lora_target_modules": "(q_proj"}, "'(q_proj' is no regular expression"),
    ],
)
def test_what_cannot_be_built_is_one_line(tmp_path, capsys, command, changes, said):
    if command == "train":
        given = train_options(tmp_path, **changes)
    else:
        given = options(tmp_path, **changes) + (["--output_dir", str(tmp_path / "out")] if command == "mine" else [])
    line = error_line(command, given, capsys)
    assert line.startswith(f"hf-infcl {command}: error: ")
    assert said in line


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda base: cut(base / "model.safetensors"), "are damaged or incomplete"),
        (lambda base: cut(base / "config.json"), "config.json' is not a valid JSON file"),
        (lambda base: cut(base / "tokenizer.json"), "processor"),
        (lambda base: change(base / "config.json", projection_dim=7), "do not fit its config.json"),
        (lambda base: change(base / "config.json", projection_dim="wide"), "expected int, got str (value: 'wide')"),
    ],
    ids=["weights", "config", "tokenizer", "shapes", "type"],
)
def test_a_damaged_model_is_one_line_that_names_it(tmp_path, capsys, command, damage, said):
    given = train_options(tmp_path, dataset_test_split="none") if command == "train" else options(tmp_path)
    damage(tmp_path / "base")
    line = error_line(command, given, capsys)
    assert str(tmp_path / "base") in line
    assert said in line


def test_a_damaged_adapter_is_one_line_that_names_it(tmp_path, capsys):
    given = train_options(tmp_path, dataset_test_split="none", use_peft=True, lora_r=2)
    assert main(["train", *given]) == 0
    cut(tmp_path / "out" / "adapter_config.json")
    line = error_line("evaluate", options(tmp_path, adapter=tmp_path / "out"), capsys)
    assert f"adapter_config.json of the adapter '{tmp_path / 'out'}' is damaged or incomplete" in line


@pytest.mark.parametrize("name", ["pairs.parquet", "pairs.arrow", "pairs.tar"])
def test_a_damaged_table_is_one_line_that_names_it(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"PAR1, but nothing more of it" * 100)
    line = error_line("train", train_options(tmp_path, dataset_name=tmp_path / name), capsys)
    assert str(tmp_path / name) in line
    assert "is damaged or of another kind than its name says" in line


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_breaks_in_the_middle_of_training_is_one_line(tmp_path, capsys, workers):
    lines = ["file_name,caption"]
    for number, row in enumerate(sample_dataset("photo", size=4)):
        row["image"].save(tmp_path / f"{number}.png")
        lines.append(f'{number}.png,"{row["caption"]}"')
    cut(tmp_path / "2.png")
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    given = train_options(tmp_path, dataset_name=tmp_path / "pairs.csv", dataloader_num_workers=workers)
    line = error_line("train", given, capsys)
    assert line.startswith("hf-infcl train: error: row 2 has an unreadable image")
    assert "2.png" in line


def error_line(command, given, capsys):
    capsys.readouterr()
    assert main([command, *given]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line


def test_an_error_of_the_training_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(*_args, **_kwargs):
        raise ValueError("in a step")

    monkeypatch.setattr(InfCLTrainer, "training_step", broken)
    with pytest.raises(ValueError, match="in a step") as stop:
        main(["train", *train_options(tmp_path, dataset_test_split="none")])
    assert "what `hf-infcl env` prints" in stop.value.__notes__[0]
    monkeypatch.setattr("hf_infcl.cli.train.build", lambda *_: {}["a bug"])
    with pytest.raises(KeyError) as stop:
        main(["train", *train_options(tmp_path)])
    assert "what `hf-infcl env` prints" in stop.value.__notes__[0]


@pytest.fixture
def interruptible():
    """A suite started in the background of a shell ignores Ctrl-C, and so do its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_training_says_how_to_go_on_and_no_more(tmp_path, monkeypatch, capsys):
    step = InfCLTrainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 1:
            signal.raise_signal(signal.SIGINT)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(InfCLTrainer, "training_step", interrupted)
    given = train_options(tmp_path, dataset_test_split="none", max_steps=2, save_steps=1, disable_tqdm=True)
    capsys.readouterr()
    assert main(["train", *given]) == 130
    said = capsys.readouterr().err
    assert said.splitlines()[-2] == "hf-infcl train: interrupted"
    assert said.splitlines()[-1].startswith(f"To go on from {tmp_path / 'out' / 'checkpoint-1'}: ")
    assert "Traceback" not in said
    given = train_options(tmp_path, dataset_test_split="none", save_strategy="no", output_dir=str(tmp_path / "other"))
    monkeypatch.setattr("hf_infcl.cli.train.build", lambda *_: signal.raise_signal(signal.SIGINT))
    assert main(["train", *given]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "hf-infcl train: interrupted"
