"""Recipe files and command lines, from text to dataclasses."""

from dataclasses import dataclass, field

import pytest
from transformers import TrainingArguments

from hf_infcl import InfCLConfig
from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
from hf_infcl.cli.parser import OtherCommand, RecipeError, RecipeParser
from hf_infcl.cli.recipe import read_recipe


@dataclass
class Plain:
    name: str = field(metadata={"help": "A required one."})
    rate: float = field(default=0.1, metadata={"help": "A float."})
    steps: int = 10
    fast: bool = False
    safe: bool = True
    parts: list[str] | None = None


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def parse(*args, kinds=(Plain,)):
    return RecipeParser(kinds).parse(args)


def test_recipe_values_are_coerced_and_the_command_line_wins(recipe):
    path = recipe("name: a\nrate: 1e-4\nsteps: 1e2\nfast: yes\nparts: q_proj\n")
    (got,) = parse("--config", path)
    assert got == Plain("a", 1e-4, 100, True, True, ["q_proj"])
    (got,) = parse("--rate", "5e-3", "--config", path, "--no_safe", "--parts", "x", "y")
    assert got == Plain("a", 5e-3, 100, True, False, ["x", "y"])


def test_a_number_means_what_it_means_on_the_command_line(recipe):
    assert parse("--config", recipe("name: 010\nsteps: 010\n")) == parse("--name", "010", "--steps", "010")
    assert parse("--name", "010", "--steps", "010") == (Plain("010", steps=10),)
    assert parse("--name", "a", "--steps", "1e3", "--rate", ".5") == (Plain("a", 0.5, 1000),)


def test_keys_may_be_merged_in(recipe):
    (got,) = parse("--config", recipe("<<: &more {steps: 3, fast: yes}\nname: a\n"))
    assert got == Plain("a", steps=3, fast=True)


def test_the_command_line_can_return_to_the_default(recipe):
    (got,) = parse("--config", recipe("name: a\nrate: 7\nfast: true\n"), "--rate", "0.1", "--fast", "false")
    assert (got.rate, got.fast) == (0.1, False)


def test_dashes_and_equal_signs_work():
    (got,) = parse("--name=a", "--steps=3")
    assert got == Plain("a", steps=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nsteqs: 3", "unknown field 'steqs'; did you mean steps"),
        ("name: a\nsteps: 3\n# more\nname: b", r"recipe\.yaml: 'name' is given twice, in lines 1 and 4"),
        ("name: a\nzzzzzz: 3", "unknown field 'zzzzzz'$"),
        ("name: a\nrate: fast", r"line 2: field 'rate' is 'fast'; expected a number$"),
        ("name: a\n# more\nsteps: 2.5", r"line 3: field 'steps' is '2.5'; expected a whole number$"),
        ("steps: 0x10\nname: a", r"line 1: field 'steps' is '0x10'; expected a whole number$"),
        ("name: [a]", r"field 'name' is \['a'\]; expected text$"),
        ("name: a\nrate:", r"line 2: field 'rate' is empty; expected a number$"),
        ("fast: sure", r"field 'fast' is 'sure'; expected one of true, yes, y, on, 1, t, false, no, n, off, 0, f$"),
        ("name: a\nid_column: b", "unknown field 'id_column'; there is none: pairs get their ids from the content"),
        ("rate: 1", "name is missing: give --name or put it into the recipe"),
        ("- a\n- b", "holds a list; expected a mapping"),
        ("a: [", "not valid YAML"),
        ("just words", r"recipe\.yaml holds text; expected a mapping"),
        ("'a: b'", r"recipe\.yaml holds text; expected a mapping"),
        ("# nothing yet\n", r"recipe\.yaml is empty; expected a mapping"),
        ("", r"recipe\.yaml is empty; expected a mapping"),
        ("name: a\nparts: &a {b: *a}", r"recipe\.yaml: line 2: the alias \*a stands inside what it names$"),
        ("name: a\nparts: &a [&b [x], *b, *a]", r"recipe\.yaml: line 2: the alias \*a stands inside"),
        (f"name: a\nparts: {'[' * 3000}{']' * 3000}", r"recipe\.yaml: line 2: more than 100 lists and mappings"),
        ("name: a\nrate: !!float 1e-3", r"recipe\.yaml: line 2: tags such as !!float are not read"),
        ("steps: !!int '3'", r"recipe\.yaml: line 1: tags such as !!int are not read"),
        ("name: !own {a: 1}", r"recipe\.yaml: line 1: tags such as !own are not read"),
        ("name: a\nsteps: 1_000", r"line 2: field 'steps' is '1_000'; expected a whole number$"),
        ("name: a\nsteps: ٣", r"line 2: field 'steps' is '٣'; expected a whole number$"),
    ],
)
def test_a_bad_recipe_is_explained(recipe, text, said):
    with pytest.raises(RecipeError, match=said):
        parse("--config", recipe(text))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--name", "a", "--stps", "3"], "unknown option --stps; did you mean --steps"),
        (["--name", "a", "--step", "3"], "unknown option --step; did you mean --steps"),  # no abbreviations
        (["--name", "a", "stray"], "'stray' belongs to no option"),
        (["--name", "a", "--rate", "fast"], "--rate: invalid float value: 'fast'"),
        (["--name", "a", "--rate", "1_0.5"], "--rate: invalid float value: '1_0.5'"),
        (["--name", "a", "--steps", "1_000"], "--steps: invalid int value: '1_000'"),
        (["--name", "a", "--steps", "٣"], "--steps: invalid int value: '٣'"),
        ([], "name is missing"),
        (["--config", "nowhere.yaml"], "cannot read the recipe nowhere.yaml: No such file"),
    ],
)
def test_a_bad_command_line_is_explained(args, said):
    with pytest.raises(RecipeError, match=said):
        parse(*args)


def test_what_a_dataclass_refuses_is_found_in_the_recipe(recipe):
    path = recipe("dataset_name: a\n# more\nmax_train_samples: 0\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml, line 3: max_train_samples is 0; expected at least 1"):
        parse("--config", path, kinds=(ScriptArguments,))
    with pytest.raises(RecipeError, match="^max_train_samples is -1"):
        parse("--config", path, "--max_train_samples", "-1", kinds=(ScriptArguments,))


def test_a_choice_of_the_training_is_found_in_the_recipe(recipe, tmp_path):
    path = recipe(f"output_dir: {tmp_path}\nuse_cpu: true\nloss_type: hardnegative\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml, line 3: .*loss_type.*hardnegative"):
        parse("--config", path, kinds=(InfCLConfig,))


def test_fields_of_another_commands_recipe_are_left_aside_in_one_line(recipe, caplog):
    parser = RecipeParser([Plain], recipes_of=OtherCommand("train", lambda: {"seed", "size", "steps"}, ["steps"], "so"))
    (got,) = parser.parse(["--config", recipe("name: a\nsteps: 3\nsize: large\nseed: 1\n")])
    assert got == Plain("a")
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "recipe.yaml is a recipe of train, whose own fields are left aside here: size, seed, steps; so"
    )
    with pytest.raises(RecipeError, match="unknown field 'color'"):
        parser.parse(["--config", recipe("name: a\ncolor: red\nsize: large\n")])
    with pytest.raises(RecipeError, match="unknown option --size"):
        parser.parse(["--name", "a", "--size", "large"])
    assert parser.parse(["--config", recipe("name: a\nsteps: 3\n")]) == (Plain("a", steps=3),)


def test_a_recipe_in_another_encoding_is_told_so(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: a", encoding="utf-16")
    with pytest.raises(RecipeError, match=r"recipe\.yaml is not UTF-8 text, which a recipe must be"):
        parse("--config", str(tmp_path / "recipe.yaml"))


def test_aliases_and_a_hundred_levels_are_read(recipe):
    (got,) = parse("--config", recipe("name: &n a\nparts: [*n, *n]\n"))
    assert got == Plain("a", parts=["a", "a"])
    assert read_recipe("[" * 100 + "]" * 100)[0] is not None


def test_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "A required one." in shown
    assert "(default: 0.1)" in shown
    assert "--config RECIPE" in shown


def test_training_arguments_with_their_unions_and_enums(recipe, tmp_path):
    path = recipe(
        f"output_dir: {tmp_path}\nlearning_rate: 2e-4\neval_strategy: no\nsave_strategy: steps\nreport_to: none\n"
        "lr_scheduler_kwargs: {num_cycles: 2}\nuse_cpu: true\nlogging_steps: 5\n"
    )
    (got,) = parse("--config", path, "--save_steps", "7", kinds=(TrainingArguments,))
    assert got.learning_rate == 2e-4
    assert (got.eval_strategy, got.save_strategy) == ("no", "steps")
    assert (got.save_steps, got.logging_steps) == (7, 5)
    assert got.lr_scheduler_kwargs == {"num_cycles": 2}
    assert got.report_to == []


def test_data_and_model_are_described_beside_them(recipe):
    path = recipe("dataset_name: sample:photo\nmodel_name_or_path: a/b\nuse_peft: true\nlora_target_modules: [q, v]\n")
    script, model = parse("--config", path, "--dataset_test_split", "none", kinds=(ScriptArguments, ModelArguments))
    assert (script.dataset_name, script.dataset_test_split) == ("sample:photo", None)
    assert (model.use_peft, model.lora_target_modules, model.lora_r) == (True, ["q", "v"], 16)


@pytest.mark.parametrize("word", ["--use_lora", "--use-lora"])
def test_use_lora_is_called_use_peft(recipe, word):
    kinds = (ScriptArguments, ModelArguments)
    with pytest.raises(RecipeError, match="did you mean --use_peft"):
        parse(word, "true", kinds=kinds)
    with pytest.raises(RecipeError, match=r"did you mean use_peft\?"):
        parse("--config", recipe("use_lora: true\n"), kinds=kinds)


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        (ScriptArguments, {"dataset_name": "a", "max_train_samples": 0}, "max_train_samples is 0"),
        (ModelArguments, {"model_name_or_path": "a", "dtype": "float8"}, "dtype is 'float8'; expected one of auto"),
    ],
)
def test_impossible_values_are_named(kind, arguments, said):
    with pytest.raises(ValueError, match=said):
        kind(**arguments)
