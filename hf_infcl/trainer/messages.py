"""Messages of a run: on lines of their own where a bar is shown."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def above_the_bars() -> Iterator[None]:
    """What is logged to the console inside stands above the bars, not behind one; afterwards all is as before.

    tqdm's own `logging_redirect_tqdm` puts handlers in place that pass on every level, and asks to be told the loggers.

    Example:
        >>> with above_the_bars():
        ...     for _ in tqdm(range(2)):
        ...         logging.getLogger().warning("a line of its own")
    """
    with ExitStack() as stack:
        for handler in _console_handlers():
            stack.enter_context(_moving_bars_away(handler))
        yield


def _console_handlers() -> list[Any]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    # What Python itself falls back on where there is no handler.
    found = {id(handler): handler for handler in [*handlers, logging.lastResort]}
    return [one for one in found.values() if getattr(one, "stream", None) in (sys.stdout, sys.stderr)]


@contextmanager
def _moving_bars_away(handler: Any) -> Iterator[None]:
    emit = handler.emit

    def emit_above(record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=handler.stream):
            emit(record)

    handler.emit = emit_above
    try:
        yield
    finally:
        handler.emit = emit
