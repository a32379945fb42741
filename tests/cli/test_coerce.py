"""What a value of a recipe means to the type that a field wants."""

import math
from typing import Any, Literal

import pytest
from transformers.trainer_utils import IntervalStrategy

from hf_infcl.cli.coerce import Mismatch, coerce, type_name
from hf_infcl.cli.recipe import read_recipe


@pytest.mark.parametrize(
    ("text", "kind", "want"),
    [
        ("1e-4", float, 1e-4),  # YAML 1.1: a string
        ("010", int, 10),  # YAML 1.1: 8
        ("1_000", str, "1_000"),
        ("007", float, 7.0),
        ("010", str, "010"),
        ("1:30", str, "1:30"),  # YAML 1.1: 90
        ("yes", str, "yes"),  # YAML 1.1: True
        ("true", str, "true"),
        ("0123e4", str | None, "0123e4"),
        ("2024-01-02", str, "2024-01-02"),
        ("3", float, 3.0),
        (".inf", float, math.inf),
        ("1e3", int, 1000),
        ("2.0", int, 2),
        ("12345678901234567890", int, 12345678901234567890),
        ("yes", bool, True),
        ("'false'", bool, False),
        ("0", bool, False),
        ("7", str, "7"),
        ("no", IntervalStrategy, IntervalStrategy.NO),  # YAML 1.1: False
        ("steps", IntervalStrategy | str, IntervalStrategy.STEPS),
        ("no", IntervalStrategy | str, IntervalStrategy.NO),
        ("off", Literal["off", "on"], "off"),
        ("null", float | None, None),
        ("1e-4", float | None, 1e-4),
        ("5", int | float, 5),
        ("0.5", int | float, 0.5),
        ("none", str | list[str] | None, "none"),
        ("[a, b]", str | list[str] | None, ["a", "b"]),
        ("[1e-3, 2]", list[float], [1e-3, 2.0]),
        ("all-linear", list[str], ["all-linear"]),
        ("{a: 1}", dict | str | None, {"a": 1}),
        ("ds.json", dict | str | None, "ds.json"),
        ("'{\"a\": 1}'", dict[str, Any], {"a": 1}),
        ("[1, x]", Any, [1, "x"]),
        ("[1_000, 1_0.5, ٣]", Any, ["1_000", "1_0.5", "٣"]),
        (
            "{a: 010, b: '010', c: no, d: 1e-3, e: 1:30, f: x1, g: null, h: {i: [true]}, j: .inf}",
            dict | str | None,
            {
                "a": 10,
                "b": "010",
                "c": False,
                "d": 1e-3,
                "e": "1:30",
                "f": "x1",
                "g": None,
                "h": {"i": [True]},
                "j": math.inf,
            },
        ),
    ],
)
def test_a_value_means_what_it_says(text, kind, want):
    got = coerce(read_recipe(text)[0], kind)
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("fast", float),
        ("true", float),
        ("[1]", float),
        ("2.5", int),
        (".inf", int),
        ("true", int),
        ("maybe", bool),
        ("2", bool),
        ("0x10", int),
        ("1:30", int),
        ("0b1", int),
        ("1_000", int),
        ("1_0.5", float),
        ("٣", int),
        ("٣.5", float | None),
        ("[a]", str),
        ("null", str),
        ("sometimes", IntervalStrategy | str),
        ("null", float),
        ("{a: 1}", list[str]),
        ("[1, x]", list[int]),
        ("text", dict[str, Any]),
        ("'[1]'", dict[str, Any]),
        (f"'{'[' * 100_000}'", dict[str, Any]),
    ],
)
def test_a_value_of_another_kind_is_refused(text, kind):
    with pytest.raises(Mismatch):
        coerce(read_recipe(text)[0], kind)


def test_types_are_named_in_words():
    assert type_name(float | None) == "a number or none"
    assert type_name(list[str]) == "list[str]"
    assert type_name(IntervalStrategy | str) == "one of no, steps, epoch"
