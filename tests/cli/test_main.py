"""The command's own words and exit statuses; what it must not import."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from hf_infcl import InfCLConfig, __version__
from hf_infcl.cli import main
from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
from hf_infcl.cli.env import environment
from hf_infcl.cli.tables import print_metrics
from hf_infcl.cli.train import USUAL_TRAINING_FIELDS


@pytest.mark.parametrize(("args", "status"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_usage_lists_the_commands(args, status, capsys):
    assert main(args) == status
    shown = capsys.readouterr().out
    for command in ("train", "evaluate", "env", "demo"):
        assert f"  {command} " in shown


def test_an_unknown_command_is_named(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean train?\n" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert "unknown command 'zzz'\n" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_the_entry_point_imports_nothing_heavy():
    code = "import sys, hf_infcl.cli; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'yaml')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_env_tells_versions_devices_and_backend(capsys):
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"- hf_infcl: {__version__}" in shown
    assert "- transformers: " in shown
    assert environment()["Loss backend (auto)"] in shown


def test_env_takes_no_options(capsys):
    assert main(["env", "--all"]) == 2
    assert "usage: hf-infcl env" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_misspelt_option_ends_with_a_hint(command, capsys):
    assert main([command, "--dataset_nam", "x"]) == 2
    assert (
        f"hf-infcl {command}: error: unknown option --dataset_nam; did you mean --dataset_name"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["train", "evaluate", "demo"])
def test_help_lists_the_options(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "--" in capsys.readouterr().out


def help_of(word, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", word])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_begins_with_what_is_this_projects_and_leaves_the_rest_to_help_all(capsys):
    short, whole = help_of("--help", capsys), help_of("--help-all", capsys)
    sections = ("\ndata:", "\nmodel and adapter:", "\ncontrastive training:", "\ntraining, as in transformers")
    assert [shown.index(section) for shown in (short, whole) for section in sections] == sorted(
        short.index(section) for section in sections
    ) + sorted(whole.index(section) for section in sections)
    said = {
        name: set(re.findall(r"^  --(\w+)", shown, re.MULTILINE)) for name, shown in (("-h", short), ("all", whole))
    }
    own = {entry.name for kind in (ScriptArguments, ModelArguments) for entry in fields(kind)}
    inherited = {entry.name for entry in fields(TrainingArguments) if entry.init}
    own |= {entry.name for entry in fields(InfCLConfig) if entry.init} - inherited
    assert own | set(USUAL_TRAINING_FIELDS) <= said["-h"]
    assert "adam_beta2" not in said["-h"]
    assert own | inherited <= said["all"]
    assert len(short.splitlines()) < 300 < len(whole.splitlines())


def test_the_usual_fields_are_transformers_fields():
    assert set(USUAL_TRAINING_FIELDS) <= {entry.name for entry in fields(TrainingArguments) if entry.init}


def test_metrics_are_shown_side_by_side(capsys):
    print_metrics(
        {"base": {"image_to_text/recall@1": 0.25, "mean_recall@1": 0.2}, "new": {"image_to_text/recall@1": 0.5}}
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if "recall@1" in line)
    assert "image to text, recall@1" in line
    assert line.index("0.250") < line.index("0.500")
