"""Which field or argument a wrong name was meant for."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

# What other tools call a field whose name is not near.
_SYNONYMS = {
    "use_lora": "use_peft",
    "lora": "use_peft",
    "temperature": "train_logit_scale",
    "loss": "loss_type",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "tokenizer": "processing_class",
    "processor": "processing_class",
}


def nearest_field(name: str, known: Iterable[str]) -> str | None:
    """The field that a wrong name was probably meant for, or None.

    Args:
        name: as it was written, with dashes or underscores.
        known: the fields there are.

    Example:
        >>> nearest_field("learning-rat", ["learning_rate", "seed"])
        'learning_rate'
    """
    known, bare = list(known), name.replace("-", "_").lower()
    if (meant := _SYNONYMS.get(bare)) in known:
        return meant
    return next(iter(difflib.get_close_matches(bare, known, n=1)), None)


def suggesting_names(noun: str) -> Callable[[Class], Class]:
    """A class whose constructor, given a keyword that it does not take, names the one that was probably meant.

    Args:
        noun: what the class calls its keywords.
    """

    def suggesting(kind: Class) -> Class:
        make: Any = kind.__init__  # type: ignore[misc]
        names = list(inspect.signature(make).parameters)[1:]

        @functools.wraps(make)
        def make_or_suggest(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in names:
                    near = nearest_field(name, names)
                    hint = f"; did you mean {near}?" if near else ""
                    raise TypeError(f"{kind.__name__} has no {noun} {name!r}{hint}")
            make(self, *args, **kwargs)

        kind.__init__ = make_or_suggest  # type: ignore[misc]
        return kind

    return suggesting
