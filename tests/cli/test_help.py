"""What `--help` says of a field: whether it must be given, and its default."""

import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from hf_infcl.cli import main
from hf_infcl.cli.evaluate import EvaluateArguments
from hf_infcl.cli.mine import MineArguments
from hf_infcl.cli.parser import RecipeParser
from hf_infcl.cli.train import make_parser

ROOT = Path(__file__).parents[2]


def help_of(command, capsys, monkeypatch, word="--help"):
    """(the text as it is, by option what is said of it)"""
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main([command, word])
    text = capsys.readouterr().out
    return text, dict(re.findall(r"^  --(\w+)[^\n]*?(?:  |\n +)(\S[^\n]*)$", text, re.MULTILINE))


@pytest.mark.parametrize(("command", "kind"), [("evaluate", EvaluateArguments), ("mine", MineArguments)])
def test_what_must_be_given_is_marked_and_nothing_else(command, kind, capsys, monkeypatch):
    _, said = help_of(command, capsys, monkeypatch)
    required = {e.name for e in fields(kind) if e.default is MISSING and e.default_factory is MISSING}
    assert {name for name, text in said.items() if text.endswith("(required)")} == required
    assert required >= {"dataset_name", "model_name_or_path"}


@pytest.mark.parametrize("command", ["train", "evaluate", "mine"])
def test_a_default_is_said_once_and_none_is_no_default(command, capsys, monkeypatch):
    text, said = help_of(command, capsys, monkeypatch, "--help-all" if command == "train" else "--help")
    assert "(default: None)" not in text
    assert not [name for name, line in said.items() if line.count("(default") > 1]
    assert said["dataset_name"].endswith("(required)")
    assert "(default: the one its header has)" in said["delimiter"]
    assert "(default: raise)" in said["on_bad_image"]


def test_what_switches_off_says_so(capsys, monkeypatch):
    _, said = help_of("train", capsys, monkeypatch)
    assert said["no_evaluate_base"] == "Switch --evaluate_base off."
    assert said["evaluate_base"].startswith("Evaluate before training too")


@pytest.mark.parametrize("command", ["train", "evaluate", "mine"])
def test_the_example_at_the_end_can_be_typed(command, capsys, monkeypatch):
    text, _ = help_of(command, capsys, monkeypatch)
    *_, title, example = text.rstrip("\n").split("\n")
    assert title == "example:"
    words = shlex.split(example)
    assert words[:2] == ["hf-infcl", command]
    monkeypatch.chdir(ROOT)
    kinds = {"evaluate": EvaluateArguments, "mine": MineArguments}
    parser = RecipeParser([kinds[command]]) if command in kinds else make_parser()
    assert parser.parse(words[2:])
