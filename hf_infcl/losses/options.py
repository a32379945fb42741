"""The options of a loss as its `repr` shows them."""

from typing import Any


def shown(options: dict[str, Any]) -> str:
    """``name=value`` of every option that is set, in order."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
