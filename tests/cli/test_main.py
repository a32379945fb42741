"""The command's own words and exit statuses; what it must not import."""

import subprocess
import sys

import pytest

from hf_infcl import __version__
from hf_infcl.cli import main
from hf_infcl.cli.env import environment
from hf_infcl.cli.tables import print_metrics


@pytest.mark.parametrize(("args", "status"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_usage_lists_the_commands(args, status, capsys):
    assert main(args) == status
    shown = capsys.readouterr().out
    for command in ("train", "evaluate", "env", "demo"):
        assert f"  {command} " in shown


def test_an_unknown_command_is_named(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


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


def test_metrics_are_shown_side_by_side(capsys):
    print_metrics(
        {"base": {"image_to_text/recall@1": 0.25, "mean_recall@1": 0.2}, "new": {"image_to_text/recall@1": 0.5}}
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if "recall@1" in line)
    assert "image to text, recall@1" in line
    assert line.index("0.250") < line.index("0.500")
