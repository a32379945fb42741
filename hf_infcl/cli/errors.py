"""Whose an error is: the user's is one line and exit status 2, all others keep their traceback and ask for a report."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

_REPORT = "If this is not of your own making, please report it together with what `hf-infcl env` prints."


def run_command(prog: str, prepare: Callable[[], tuple[Any, ...]], work: Callable[..., Any]) -> int:
    """Runs a command in two parts.

    Args:
        prog: the command, for its messages.
        prepare: reads the command line and finds everything it names: what is wrong here is mostly the user's.
        work: gets what `prepare` returned. An error here is the user's only where its kind says so: a picture or a
            caption that cannot be used, negatives that are asked for and not there, a package that is not installed,
            memory that does not suffice, a Hub that does not answer.

    Returns:
        The exit status: 0; 2 for an error of the user's, which has been printed as one line; or 130, as a shell says it
        of an interrupted program, where the user stopped it: that, and what it says of going on, has been printed.
    """
    is_users = _is_users_at_start
    try:
        prepared = prepare()
        is_users = _is_users_at_work
        work(*prepared)
    except Exception as error:
        if not is_users(error):
            error.add_note(_REPORT)
            raise
        logger.debug("stopped by", exc_info=error)
        tqdm.write(f"{prog}: error: {_one_line(error)}", file=sys.stderr)  # not behind a bar that was cut short
        return 2
    except KeyboardInterrupt as interrupt:
        logger.debug("interrupted", exc_info=interrupt)
        for line in (f"{prog}: interrupted", *getattr(interrupt, "__notes__", ())):
            tqdm.write(line, file=sys.stderr)
        return 130  # 128 + SIGINT; a launcher of several processes takes it for the failure that it is
    return 0


def _is_users_at_start(error: Exception) -> bool:
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from yaml import YAMLError

    kinds = (ValueError, OSError, DatasetsError, StrictDataclassError, SafetensorError, YAMLError)
    return isinstance(error, kinds) or _is_users_at_work(error)


def _is_users_at_work(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from torch import OutOfMemoryError

    from hf_infcl.data.captions import CaptionError
    from hf_infcl.data.images import UnreadableImageError
    from hf_infcl.evaluation.mining import NothingMinedError

    of_data = (UnreadableImageError, CaptionError, NothingMinedError)
    kinds = (*of_data, ImportError, OutOfMemoryError, HfHubHTTPError, OfflineModeIsEnabled)
    # What transformers says of a tracker in report_to is a RuntimeError.
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "to be installed" in str(error))


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    if "Original Traceback" in text:  # a loader's worker hands over its traceback as the message
        text = text.splitlines()[-1].partition(": ")[2]
    return " ".join(text.split()) or type(error).__name__
