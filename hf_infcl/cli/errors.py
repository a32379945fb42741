"""What a command says when it cannot do what it was told."""

import logging
import sys

logger = logging.getLogger(__name__)


def report_error(prog: str, error: Exception) -> int:
    """Prints an error as one line; its traceback goes to the log at level DEBUG.

    Args:
        prog: the command.
        error: what stopped it.

    Returns:
        The exit status, 2.
    """
    logger.debug("stopped by", exc_info=error)
    print(f"{prog}: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return 2
