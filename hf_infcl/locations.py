"""Whether a model or a data set that is no path here can be had at all, said at once instead of after many retries."""

import os
from functools import cache
from glob import glob
from pathlib import Path
from typing import Literal

OFFLINE = "without a network, HF_HUB_OFFLINE=1 takes what is cached"
_SECONDS = 5  # for the Hub to answer whether a repository is there; a download may take its own time


def looks_like_a_path(name: str) -> bool:
    """Whether a name can be no Hub id, which is `name` or `owner/name`: a root, dots at the start, or more parts.

    Example:
        >>> looks_like_a_path("openai/clip-vit-base-patch32"), looks_like_a_path("runs/clip/checkpoint-10")
        (False, True)
    """
    return name.startswith((".", "~", "/")) or "\\" in name or name.count("/") > 1


def check_location(name: str, kind: Literal["model", "dataset"]) -> None:
    """Refuses what is neither here nor to be had from the Hub, before its clients retry for half a minute.

    Args:
        name: a path, or a Hub id.
        kind: what is looked for.

    Raises:
        FileNotFoundError: a path that does not exist; or a possible Hub id that is neither a path nor cached, where the
            Hub does not answer. Names the absolute path.
    """
    path = Path(name).expanduser()
    if path.exists():
        return
    if looks_like_a_path(name):
        raise FileNotFoundError(f"no such file or folder: {path.absolute()}")
    if not _is_cached(name, kind):
        _reach(name, kind)


def absence(name: str, reason: object) -> str:
    """What is said of a possible Hub id that cannot be had: where a path of that name was looked for, and why."""
    return (
        f"{name!r} is no file or folder here ({os.path.abspath(name)}) and cannot be had from the Hub: {reason}; "
        f"{OFFLINE}"
    )


@cache
def _reach(name: str, kind: str) -> None:
    """Asks the Hub once. What it answers, a repository that is not there included, is left to whoever loads."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_SECONDS)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return
    # What the HTTP client raises where nobody answers: its name differs between the versions of huggingface_hub.
    except Exception as error:
        raise FileNotFoundError(absence(name, f"it cannot be reached ({error})")) from error


def _is_cached(name: str, kind: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    if os.path.isdir(os.path.join(HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")):
        return True
    if kind == "model":
        return False
    from datasets.config import HF_DATASETS_CACHE
    from datasets.naming import camelcase_to_snakecase

    owner, _, last = name.rpartition("/")
    folder = "___".join(part for part in (owner, camelcase_to_snakecase(last)) if part)
    return bool(glob(os.path.join(HF_DATASETS_CACHE, folder)))
