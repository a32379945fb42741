"""The folder that mining writes to, of which it replaces nothing but what it wrote itself."""

import json
import re
from pathlib import Path
from typing import Any

REPORT_NAME = "report.json"
_OWN = re.compile(r"README\.md|report\.json|index\.html|(image_to_text|text_to_image)/train-\d{5}\.parquet")


def check_folder(folder: str | Path) -> None:
    """Refuses a folder in which mining would meet files of somebody else.

    Args:
        folder: where the data set is to go; need not exist.

    Raises:
        ValueError: it is a file, or holds something and no report of mining, or a file of somebody else has the name
            of one that mining writes.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {str(folder.absolute())!r} is a file; expected a folder")
    there = _files_in(folder)
    own = _written_before(folder)
    if there and own is None:
        raise ValueError(
            f"output_dir {str(folder.absolute())!r} is not empty and was not written by mine ({there[0]} is there); "
            "name a new folder"
        )
    if foreign := [name for name in there if _OWN.fullmatch(name) and name not in (own or ())]:
        raise ValueError(
            f"output_dir {str(folder.absolute())!r}: {foreign[0]} was not written by mine, which would replace it; "
            "move it, or name a new folder"
        )


def clear_folder(folder: str | Path) -> None:
    """Removes what an earlier mining wrote, so that no shard of it is read with the new ones.

    Args:
        folder: one that `check_folder` let pass.
    """
    for name in _written_before(Path(folder)) or ():
        file = Path(folder, name)
        file.unlink(missing_ok=True)
        if file.parent != Path(folder) and file.parent.is_dir() and not any(file.parent.iterdir()):
            file.parent.rmdir()


def own_files(folder: str | Path) -> list[str]:
    """The files in a folder that have the names mining gives, relative to it."""
    return [name for name in _files_in(Path(folder)) if _OWN.fullmatch(name)]


def _files_in(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())


def _written_before(folder: Path) -> list[str] | None:
    """What the report in a folder says that mining wrote; None where there is no such report."""
    try:
        report: Any = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    files = report.get("files") if isinstance(report, dict) else None
    return [name for name in files if _OWN.fullmatch(str(name))] if isinstance(files, list) else None
