"""Values as a recipe file gives them, turned into what a dataclass field's type asks for."""

import enum
import json
import types
from typing import Any, Literal, Union, get_args, get_origin

# The words YAML 1.1 and the command line use for truth.
_TRUE, _FALSE = ("true", "yes", "y", "on", "1", "t"), ("false", "no", "n", "off", "0", "f")
# An unquoted `eval_strategy: no` reaches us as False; these are the words it may have been.
_WORDS_READ_AS_BOOL = {False: ("no", "off", "false"), True: ("yes", "on", "true")}


class Mismatch(Exception):
    """A value that the type cannot take."""


def type_name(kind: Any) -> str:
    """A type in the words of an error message: `list[str]`, `float or none`, `"no", "steps" or "epoch"`."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        names = [type_name(part) for part in get_args(kind) if not _is_enum_beside(part, kind)]
        return " or ".join(dict.fromkeys(names))
    if kind is type(None):
        return "none"
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
    """Turns a YAML value into what a field of type `kind` takes.

    YAML 1.1 reads `1e-4` and `1e3` as strings and an unquoted `no` as False; numbers for text fields (`run_name: 7`)
    come as numbers. All of these mean what they say.

    Args:
        value: what `yaml.safe_load` returned.
        kind: the resolved type hint of the field.

    Returns:
        The value as an instance of the type.

    Raises:
        Mismatch: it cannot be one.
    """
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, kind)
    if origin is Literal:
        return _choice(value, get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_choice(value.value if isinstance(value, kind) else value, [member.value for member in kind]))
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if kind is list or origin is list:
        (item,) = get_args(kind) or (Any,)
        if isinstance(value, dict):
            raise Mismatch
        return [coerce(part, item) for part in (value if isinstance(value, (list, tuple)) else [value])]
    if kind is dict or origin is dict:
        return _dict(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise Mismatch


def _coerce_union(value: Any, union: Any) -> Any:
    parts = [part for part in get_args(union) if not _is_enum_beside(part, union)]
    if value is None and type(None) in parts:
        return None
    # What already has the right type stays as it is; only then is something converted, text last since it takes any
    # number.
    exact = [part for part in parts if isinstance(part, type) and type(value) is part]
    for part in exact + sorted((part for part in parts if part is not type(None)), key=lambda part: part is str):
        try:
            return coerce(value, part)
        except Mismatch:
            continue
    raise Mismatch


def _choice(value: Any, choices: Any) -> Any:
    if isinstance(value, bool) and value not in choices:
        value = next((word for word in _WORDS_READ_AS_BOOL[value] if word in choices), value)
    for choice in choices:
        if value == choice or str(value) == str(choice):
            return choice
    raise Mismatch


def _bool(value: Any) -> bool:
    word = str(value).lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise Mismatch


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Mismatch
    try:
        return float(value)
    except ValueError:
        raise Mismatch from None


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdigit():
        return int(value)
    number = _float(value)
    if not number.is_integer():  # also for inf and nan
        raise Mismatch
    return int(number)


def _str(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Mismatch
    return str(value)


def _dict(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise Mismatch from None
    if not isinstance(value, dict):
        raise Mismatch
    return value


_SCALARS: dict[Any, Any] = {bool: _bool, int: _int, float: _float, str: _str}
