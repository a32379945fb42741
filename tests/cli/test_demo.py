"""The demo, made small: everything is written, and a fresh process that knows no hf_infcl loads it."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from hf_infcl import load_dual_encoder
from hf_infcl.cli import demo, main
from hf_infcl.cli.demo import (
    MICRO_BATCH,
    PICTURE,
    Sizes,
    activation_line,
    dense_loss_bytes,
    report,
    run_demo,
    tiny_clip,
)
from hf_infcl.data import load_image_text_dataset, sample_processor
from hf_infcl.hub.card import RunFacts, write_model_card


def test_a_small_demo_runs_from_end_to_end(tmp_path, capfd):
    sizes = Sizes(train_rows=128, eval_rows=16, base_batch=16, base_steps=2, accumulation=2, adapter_steps=1)
    result = run_demo(tmp_path / "out", sizes=sizes)
    report(result)
    shown = capfd.readouterr().out
    assert "<- its own" in shown  # said by the fresh process
    assert "image to text, recall@10" in shown
    assert re.search(r"Adapter file \d+ KiB; \d+ seconds in all; peak memory [\d,]+ MiB", shown)
    assert re.search(r"activations, 128 pairs +│ +[\d,]+ MiB \(64 at a time\) │ +[\d,]+ MiB", shown)
    assert re.search(r"similarities, 65,536 pairs │ +a few MiB │ +64 GiB", shown)
    assert "16 photo-like test pairs" in shown
    assert "hf-infcl train --model_name_or_path openai/clip-vit-base-patch32" in shown
    assert result["contrastive_batch_size"] == 128
    assert set(result["before"]) == set(result["after"])
    assert 2**20 < result["kept_bytes"] < 2**30

    adapter = tmp_path / "out" / "adapter"
    card = ModelCard.load(adapter / "README.md")
    assert card.data.library_name == "peft"
    assert "128 pairs = 64 a micro-batch x 2 accumulated x 1 process" in card.text
    assert str(tmp_path) not in card.content
    assert Image.open(adapter / "curves.png").size[0] > 1000
    assert Image.open(tmp_path / "out" / "base" / "curves.png").size[0] < 1000  # the loss alone
    assert Image.open(adapter / PICTURE).size == (256, 256)
    # Its base is a folder, which no file names: README.md says to name both.
    load_dual_encoder(tmp_path / "out" / "base", adapter=adapter)
    with pytest.raises(ValueError, match="does not say which model it belongs to"):
        load_dual_encoder(adapter)
    for folder in (adapter, tmp_path / "out" / "base"):
        assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_a_model_of_the_users_is_left_alone(tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("the user's own")
    assert main(["demo", "--output_dir", str(tmp_path)]) == 2
    assert f"{tmp_path / name} is not empty and was not written by the demo" in capsys.readouterr().err
    assert (tmp_path / name / "config.json").read_text() == "the user's own"


def test_a_second_demo_says_that_it_replaces_the_models_of_the_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "run_demo", lambda folder, _seed: write_model_card(RunFacts(), Path(folder, "base")))
    monkeypatch.setattr(demo, "report", lambda _: None)
    command = ["demo", "--output_dir", str(tmp_path)]
    assert main(command) == 0
    assert capsys.readouterr().out == ""
    assert main(command) == 0
    assert capsys.readouterr().out == f"This run replaces the models that an earlier demo wrote to {tmp_path}.\n"


@pytest.mark.parametrize("where", ["project/.venv", "other environment"])
def test_the_reader_is_told_to_activate_an_environment_that_is_not(where, tmp_path, monkeypatch):
    project, commands = tmp_path / "project", tmp_path / where / "bin"
    project.mkdir()
    commands.mkdir(parents=True)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    assert activation_line() == f"export PATH={shlex.quote(str(commands))}:$PATH"
    (commands / "activate").touch()
    shown = ".venv/bin/activate" if where == "project/.venv" else shlex.quote(str(commands / "activate"))
    assert activation_line() == f"source {shown}"
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{commands}")
    assert activation_line() is None


def test_the_demo_measures_as_many_pairs_as_its_recipe():
    recipe = Path(__file__).parents[2] / "recipes" / "sample.yaml"
    name = yaml.safe_load(recipe.read_text(encoding="utf-8"))["dataset_name"]
    assert Sizes().eval_rows == load_image_text_dataset(name, split="test").num_rows
    assert Sizes().train_rows == load_image_text_dataset(name, split="train").num_rows


def test_the_contrastive_batch_is_at_least_1024_in_micro_batches_of_at_most_64():
    assert MICRO_BATCH <= 64
    assert Sizes().accumulation * MICRO_BATCH >= 1024
    assert Sizes().train_rows >= 1024


def test_the_base_is_tiny():
    model = tiny_clip(sample_processor())
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000


def test_the_dense_loss_is_counted_with_all_its_matrices():
    assert dense_loss_bytes(8192) == 2**30
