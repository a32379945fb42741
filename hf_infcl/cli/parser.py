"""One parser for the command line and for recipe files: `--config recipe.yaml --any_field value`."""

import argparse
import copy
import dataclasses
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import yaml
from transformers import HfArgumentParser

from hf_infcl.cli.coerce import Mismatch, coerce, type_name
from hf_infcl.cli.recipe import RecipeError, Word, read_recipe

logger = logging.getLogger(__name__)

# What pairs are recognised by elsewhere; the nearest field would be a column of something else.
_IDS = ("id_column", "image_id_column", "caption_id_column", "text_id_column")


@dataclasses.dataclass(frozen=True)
class OtherCommand:
    """A command whose recipes another one reads too.

    Args:
        name: of the command.
        fields: gives the names of all its fields; called only where a recipe has a field that is unknown otherwise.
        means_otherwise: fields that both have, and that say something else there.
        note: what else is said of such a recipe.
    """

    name: str
    fields: Callable[[], Collection[str]]
    means_otherwise: Collection[str] = ()
    note: str = ""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Says which fields are required, and the default where it is a value: None is none that a user could give."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.const is False:  # the --no_... of a field that is on by default
            return f"Switch --{action.dest} off."
        if action.required:
            return f"{action.help} (required)"
        says_it = action.default is None or "(default" in (action.help or "")
        return action.help if says_it else super()._get_help_string(action)


def _read_as(kind: Any) -> Callable[[str], Any]:
    """Reads a number of the command line as one of a recipe."""

    def read(word: str) -> Any:
        return coerce(Word(word), kind)

    read.__name__ = kind.__name__  # by which argparse names it in an error
    return read


class RecipeParser(HfArgumentParser):
    """Fills dataclasses from a YAML recipe and the command line; the command line wins.

    Args:
        dataclass_types: the dataclasses to fill, in the order in which `parse` returns them.
        sections: a heading of the help, and the fields below it; by default all of them stand below one.
        rare: fields that only `--help-all` shows.
        recipes_of: whose recipes are read too, where that is another command: their fields are left aside.
        kwargs: passed to `argparse.ArgumentParser`.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Arguments:
        ...     learning_rate: float = 1e-3
        >>> (arguments,) = RecipeParser([Arguments]).parse(["--learning_rate", "2e-4"])
        >>> arguments.learning_rate
        0.0002
    """

    def __init__(
        self,
        dataclass_types: Sequence[type],
        *,
        sections: Mapping[str, Iterable[str]] | None = None,
        rare: Iterable[str] = (),
        recipes_of: OtherCommand | None = None,
        **kwargs: Any,
    ) -> None:
        self._kinds, self._rare, self._other = list(dataclass_types), set(rare), recipes_of
        fields = {field.name: field for kind in self._kinds for field in dataclasses.fields(kind) if field.init}
        hints = {name: hint for kind in self._kinds for name, hint in get_type_hints(kind).items()}
        self._types = {name: hints[name] for name in fields}
        shown = [
            dataclasses.make_dataclass(
                "Section",
                [(name, self._types[name], copy.copy(fields[name])) for name in names],
                namespace={"_argument_group_name": heading},  # read by HfArgumentParser
                kw_only=True,
            )
            for heading, names in (sections or {}).items()
        ]
        # An abbreviation would hide a typing error: `--learning_rat 1` must not set the learning rate.
        usage = "%(prog)s [--config RECIPE] [--FIELD VALUE ...]"
        super().__init__(shown or self._kinds, allow_abbrev=False, usage=usage, formatter_class=_Help, **kwargs)
        for action in self._actions:
            if action.type in (int, float):
                action.type = _read_as(action.type)
        self.add_argument("--config", metavar="RECIPE", help="YAML recipe; any field given here overrides it")
        if self._rare:
            self.add_argument("--help-all", action="help", help=f"show {len(self._rare)} further fields too, and exit")

    def parse(self, args: Sequence[str] | None = None) -> tuple[Any, ...]:
        """Reads the recipe named by `--config`, lays the command line over it and builds the dataclasses.

        Args:
            args: the command line, by default the program's own.

        Returns:
            One instance of each dataclass.

        Raises:
            RecipeError: an unknown field (the nearest known one is named), a value of the wrong type (field, value
                and expected type are named), a required field that is missing, a recipe that cannot be read.
        """
        args = list(sys.argv[1:] if args is None else args)
        # Before `_command_line` takes the defaults away, which the help shows.
        if {"-h", "--help", "--help-all"} & set(args):
            hidden = set() if "--help-all" in args else self._rare
            for action in self._actions:
                action.help = argparse.SUPPRESS if action.dest in hidden else action.help
            self.print_help()
            raise SystemExit(0)
        given = self._command_line(args)
        recipe = given.pop("config", None)
        values, places = self._recipe(Path(recipe)) if recipe else ({}, {})
        places = {name: place for name, place in places.items() if name not in given}
        return tuple(self._build(kind, {**values, **given}, places) for kind in self._kinds)

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage: two hundred options would bury the message."""
        raise RecipeError(message)

    def _command_line(self, args: list[str]) -> dict[str, Any]:
        """Only what was typed: defaults are the dataclasses' business, and a default must not override the recipe."""
        shown = [(action, action.default, action.required) for action in self._actions]
        try:
            for action, _, _ in shown:
                action.default, action.required = argparse.SUPPRESS, False
            namespace, unknown = self.parse_known_args(args)
        finally:
            for action, default, required in shown:
                action.default, action.required = default, required
        for word in unknown:
            if word.startswith("--"):
                name = word[2:].split("=")[0]
                raise RecipeError(f"unknown option --{name}{self._nearest(name, '--')}")
        if unknown:
            raise RecipeError(f"{unknown[0]!r} belongs to no option; options are written --name value")
        return vars(namespace)

    def _recipe(self, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """The fields of a recipe, and where each of them stands."""
        try:
            content, lines = read_recipe(path.read_text(encoding="utf-8"))
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from error
        except OSError as error:
            raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path} is not UTF-8 text, which a recipe must be: {error}") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(content, dict):
            found = "is empty" if content is None else "holds a list" if isinstance(content, list) else "holds text"
            raise RecipeError(f"{path} {found}; expected a mapping of field names to values")
        if self._other is not None and not content.keys() <= self._types.keys():
            content = self._without_the_others(content, path)
        # A key that a merge brought in stands elsewhere.
        places = {name: f"{path}, line {lines[name]}" if name in lines else str(path) for name in content}
        return {name: self._checked(name, value, places[name]) for name, value in content.items()}, places

    def _without_the_others(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        assert self._other is not None
        theirs = self._other.fields()
        aside = [name for name in content if name in theirs and name not in self._types]
        if aside:
            aside += [name for name in content if name in self._other.means_otherwise]
            logger.warning(
                "%s is a recipe of %s, whose own fields are left aside here: %s%s",
                path,
                self._other.name,
                ", ".join(aside),
                self._other.note and f"; {self._other.note}",
            )
        return {name: value for name, value in content.items() if name not in aside}

    def _checked(self, name: Any, value: Any, where: str) -> Any:
        if name not in self._types:
            raise RecipeError(f"{where}: unknown field {name!r}{self._nearest(str(name))}")
        kind = self._types[name]
        try:
            return coerce(value, kind)
        except Mismatch:
            found = "empty" if value is None else repr(value)
            raise RecipeError(f"{where}: field {name!r} is {found}; expected {type_name(kind)}") from None

    def _nearest(self, name: str, prefix: str = "") -> str:
        if name.replace("-", "_") in _IDS:
            return "; there is none: pairs get their ids from the content of their pictures and captions"
        from hf_infcl.trainer.naming import nearest_field  # brings torch along: only where something is misspelt

        near = nearest_field(name, self._types)
        return f"; did you mean {prefix}{near}?" if near else ""

    def _build(self, kind: type, values: dict[str, Any], places: dict[str, str]) -> Any:
        fields = [field for field in dataclasses.fields(kind) if field.init]
        for field in fields:
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in values:
                rest = " or put it into the recipe"
                if self._other is not None and field.name in self._other.means_otherwise:
                    rest = f" (a recipe of {self._other.name} means its own by it)"
                raise RecipeError(f"{field.name} is missing: give --{field.name}{rest}")
        try:
            return kind(**{field.name: values[field.name] for field in fields if field.name in values})
        # What the dataclass itself refuses, and what the classes refuse that it makes of its dictionaries.
        except (ValueError, TypeError) as error:
            named = next((word for word in re.findall(r"\w+", str(error)) if word in places), None)
            raise RecipeError(f"{places[named]}: {error}" if named else str(error)) from error
