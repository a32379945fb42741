"""Values as a recipe file gives them, turned into what a dataclass field's type asks for."""

import enum
import json
import types
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin

from hf_infcl.cli.recipe import Word

# The words that YAML and the command line use for truth.
_TRUE, _FALSE = ("true", "yes", "y", "on", "1", "t"), ("false", "no", "n", "off", "0", "f")
# Of these, the ones that mean it where no type says that truth is asked for: YAML's.
_UNTYPED_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_YAML_NUMBERS = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


class Mismatch(ValueError):
    """A value that the type cannot take."""


def type_name(kind: Any) -> str:
    """A type in the words of an error message: `list[str]`, `a number or none`, `one of no, steps, epoch`."""
    if kind in _NAMES:
        return _NAMES[kind]
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        names = [type_name(part) for part in get_args(kind) if not _is_enum_beside(part, kind)]
        return " or ".join(dict.fromkeys(names))
    if origin is Literal:
        return _one_of(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _one_of([member.value for member in kind])
    if origin is not None:
        return str(kind).replace("typing.", "")
    return getattr(kind, "__name__", str(kind))


def _one_of(values: Any) -> str:
    return "one of " + ", ".join(str(value) for value in values)


def _is_enum_beside(part: Any, union: Any) -> bool:
    """`str` beside an enum in a union (transformers' way of typing a choice) adds nothing to the choice."""
    others = get_args(union)
    return part is str and any(isinstance(other, type) and issubclass(other, enum.Enum) for other in others)


def coerce(value: Any, kind: Any) -> Any:
    """Turns a value of a recipe into what a field of type `kind` takes.

    An unquoted word means what it would mean on the command line: `no` is False for a switch and text for a name,
    `010` is ten for a number and three letters for a name. Numbers are decimal. Without a type (the values of a
    dictionary), words of truth and decimal numbers are such, and everything else, as all that is quoted, is text.

    Args:
        value: a value in what `hf_infcl.cli.recipe.read_recipe` returned.
        kind: the resolved type hint of the field.

    Returns:
        The value as an instance of the type.

    Raises:
        Mismatch: it cannot be one.
    """
    origin = get_origin(kind)
    if kind is Any:
        return _untyped(value)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, kind)
    if origin is Literal:
        return _choice(value, get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_choice(value, [member.value for member in kind]))
    if kind in _SCALARS:
        if not isinstance(value, str):
            raise Mismatch
        return _SCALARS[kind](value)
    if kind is list or origin is list:
        (item,) = get_args(kind) or (Any,)
        if isinstance(value, dict):
            raise Mismatch
        return [coerce(part, item) for part in (value if isinstance(value, list) else [value])]
    if kind is dict or origin is dict:
        return _dict(value)
    raise Mismatch


def _coerce_union(value: Any, union: Any) -> Any:
    parts = [part for part in get_args(union) if not _is_enum_beside(part, union)]
    if value is None and type(None) in parts:
        return None
    # What is quoted is text where text is taken. A word is whatever it can be; then text, which anything can be, before
    # a list of one.
    order = [part for part in parts if isinstance(part, type) and type(value) is part]
    order += [part for part in parts if part is not str and (get_origin(part) or part) not in (list, dict)]
    order += [part for part in parts if part is str] + parts
    for part in order:
        try:
            return coerce(value, part)
        except Mismatch:
            continue
    raise Mismatch


def _choice(value: Any, choices: Any) -> Any:
    for choice in choices:
        if value == choice or str(value) == str(choice):
            return choice
    raise Mismatch


def _untyped(value: Any) -> Any:
    if isinstance(value, list):
        return [_untyped(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _untyped(part) for name, part in value.items()}
    if not isinstance(value, Word):
        return value
    if value.lower() in _UNTYPED_TRUTH:
        return _UNTYPED_TRUTH[value.lower()]
    if value.lower() in _YAML_NUMBERS or value.lstrip("+-.")[:1].isdigit():
        for kind in (int, float):
            with suppress(Mismatch):
                return _decimal(value, kind)
    return str(value)


def _bool(value: str) -> bool:
    word = value.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise Mismatch


def _decimal(value: str, kind: type[int] | type[float]) -> Any:
    # Python's numbers may have underscores and the digits of any script; those of YAML 1.2 may not.
    if "_" in value or not value.isascii():
        raise Mismatch
    try:
        return kind(_YAML_NUMBERS.get(value.lower(), value))
    except ValueError:
        raise Mismatch from None


def _float(value: str) -> float:
    return _decimal(value, float)


def _int(value: str) -> int:
    with suppress(Mismatch):
        return _decimal(value, int)
    number = _float(value)
    if not number.is_integer():  # also for inf and nan
        raise Mismatch
    return int(number)


def _dict(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            raise Mismatch from None
    if not isinstance(value, dict):
        raise Mismatch
    return _untyped(value)


_NAMES: dict[Any, str] = {
    type(None): "none",
    bool: _one_of((*_TRUE, *_FALSE)),
    int: "a whole number",
    float: "a number",
    str: "text",
}
_SCALARS: dict[Any, Any] = {bool: _bool, int: _int, float: _float, str: str}
