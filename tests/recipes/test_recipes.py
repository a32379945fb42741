"""Every recipe parses, names only what exists, and the script they belong to runs under accelerate."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from huggingface_hub import ModelCard
from torch.nn.parallel import DistributedDataParallel

import hf_infcl
from hf_infcl.cli import main as command_line
from hf_infcl.cli.evaluate import EvaluateArguments
from hf_infcl.cli.parser import RecipeParser
from hf_infcl.cli.summary import evaluate_command
from hf_infcl.cli.train import main, make_parser, run
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# What a recipe leaves to the command line.
GIVEN = {"model_name_or_path": "some/model", "dataset_name": "some/dataset", "output_dir": "outputs/some"}
# These say bf16, which needs a device that has it; on the machine that parses them here it is switched off.
HERE = ["--bf16", "false", "--use_cpu"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_its_dataclasses_hold(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = yaml.safe_load(path.read_text())
    missing = [word for name, value in GIVEN.items() if name not in said for word in (f"--{name}", value)]
    script_args, training_args, model_args = make_parser().parse(["--config", str(path), *missing, *HERE])
    assert training_args.contrastive_batch_size >= 256
    if said.get("load_best_model_at_end"):
        assert training_args.metric_for_best_model == "mean_recall@1"
    assert training_args.learning_rate == float(said["learning_rate"])
    assert model_args.use_peft == said.get("use_peft", False)
    assert script_args.dataset_train_split == "train"
    assert f"accelerate launch recipes/finetune_clip.py --config recipes/{path.name}" in path.read_text()


def small_run(tmp_path, **changes):
    """Arguments of a run of seconds on the built-in scenes."""
    options = {
        "model_name_or_path": save_tiny("clip", tmp_path / "base"),
        "dataset_name": "sample:photo:16",
        "output_dir": tmp_path / "out",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": "1e-3",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "use_peft": True,
        "lora_r": 2,
        "lora_dropout": 0.0,
        **changes,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def test_a_recipe_run_writes_adapter_processor_card_and_curves(tmp_path):
    metrics = main(*make_parser().parse(small_run(tmp_path)))
    assert 0 <= metrics["eval_mean_recall@1"] <= 1
    out = tmp_path / "out"
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "curves.png", "README.md"):
        assert (out / name).exists(), name
    card = ModelCard.load(out / "README.md")
    assert str(tmp_path) not in card.content
    assert "| | base model | this model |" in card.text
    assert "8 pairs = 4 a micro-batch x 2 accumulated x 1 process" in card.text
    assert "sample:photo:16" in card.text
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_the_next_command_reads_the_data_as_the_run_did():
    parser = make_parser()
    data = ["--delimiter", ";", "--encoding", "latin-1", "--on_bad_image", "skip", "--empty_captions", "drop"]
    given = [word for name, value in GIVEN.items() for word in (f"--{name}", value)]
    command = evaluate_command(*parser.parse([*given, *data, *HERE[2:]]), is_adapter=False)
    (read,) = RecipeParser([EvaluateArguments]).parse(shlex.split(command)[2:])
    assert (read.delimiter, read.encoding, read.on_bad_image, read.empty_captions) == (";", "latin-1", "skip", "drop")


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "whole model"])
def test_the_end_says_what_to_type_next_and_that_works(tmp_path, capsys, adapter):
    options = small_run(tmp_path, use_peft=adapter, max_steps=1, evaluate_base=False)
    metrics = main(*make_parser().parse(options))
    said = capsys.readouterr().out
    assert "image to text, recall@1" in said
    assert f"Written to {tmp_path / 'out'}: {'adapter' if adapter else 'model'}, processor" in said
    command = re.search(r"measure it:  hf-infcl (.*)", said)[1]
    assert command_line([*shlex.split(command), "--output_file", str(tmp_path / "metrics.json")]) == 0
    again = json.loads((tmp_path / "metrics.json").read_text())
    assert again["text_to_image/mrr"] == pytest.approx(metrics["eval_text_to_image/mrr"])
    names = {"hf_infcl": hf_infcl}
    exec(re.search(r"load it: +(.*)", said)[1], names)
    assert names["processor"] is not None


def test_a_run_without_an_evaluation_split(tmp_path, capsys):
    options = small_run(tmp_path, dataset_test_split="none", max_train_samples=8, max_steps=1)
    assert main(*make_parser().parse(options)) == {}
    said = capsys.readouterr().out
    assert "load it:" in said
    assert "measure it:" not in said
    assert "## Results" not in (tmp_path / "out" / "README.md").read_text()


def test_evaluations_without_a_split_are_refused(tmp_path):
    options = small_run(tmp_path, dataset_test_split="none", eval_strategy="steps")
    with pytest.raises(ValueError, match="eval_strategy is 'steps' but dataset_test_split is none"):
        main(*make_parser().parse(options))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("loss_type", "contrastiv", "loss_type"),
        ("gradient_accumulation_steps", 0, "gradient_accumulation_steps must be an integer >= 1, got 0"),
        ("learning_rate", "fast", "learning_rate.*invalid float value: 'fast'"),
    ],
)
def test_a_value_that_cannot_be_is_said_in_one_line(tmp_path, option, value, said, capsys):
    options = small_run(tmp_path, **{option: value})
    capsys.readouterr()
    assert run(options) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert error.count("\n") == 1


def test_an_adapter_is_not_written_beside_a_whole_model(tmp_path, capsys):
    options = small_run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    capsys.readouterr()
    assert run([*options, "--use_peft", "true"]) == 2
    error = capsys.readouterr().err
    assert "holds a whole model (model.safetensors)" in error
    assert error.count("\n") == 1


def test_the_command_leaves_no_process_group_behind(tmp_path, monkeypatch):
    """Nor its threads, which could abort the process at its end, though a DDP model lives on that held the group."""
    alive = []

    def threads():
        return [task.read_text() for task in Path("/proc/self/task").glob("*/comm") if "gloo" in task.read_text()]

    def in_a_group(trainer, *_):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
        trainer.model_wrapped = DistributedDataParallel(trainer.model)
        alive.append(trainer.model_wrapped)
        assert threads() or sys.platform != "linux"

    monkeypatch.setattr("hf_infcl.cli.train.fine_tune", in_a_group)
    assert run(small_run(tmp_path)) == 0
    assert not dist.is_initialized()
    assert not threads()


def test_the_script_runs_under_accelerate_launch(tmp_path):
    config = ROOT / "recipes" / "accelerate" / "single.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--cpu"]
    script = [str(ROOT / "recipes" / "finetune_clip.py"), *small_run(tmp_path, max_steps=1, evaluate_base=False)]
    # Started from elsewhere: nothing may depend on the working directory.
    done = subprocess.run(
        [*command, *script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_launch_configuration_is_one_of_accelerates(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert config.mixed_precision == "no"
