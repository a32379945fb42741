"""Metrics as a table on the terminal."""

from collections.abc import Mapping
from typing import Any

_WORDS = {"image_to_text": "image to text", "text_to_image": "text to image"}


def metrics_table(columns: Mapping[str, Mapping[str, float]], title: str | None = None) -> Any:
    """A rich table of retrieval metrics.

    Args:
        columns: a heading for every column, and its metrics under the names of `retrieval_metrics`.
        title: a line above it.

    Returns:
        A `rich.table.Table`.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("retrieval")
    for heading in columns:
        table.add_column(heading, justify="right", overflow="fold")
    names = dict.fromkeys(name for metrics in columns.values() for name in metrics if "/" in name)
    last = None
    for name in names:
        direction, _, metric = name.rpartition("/")
        if last not in (None, direction):
            table.add_section()
        last = direction
        values = [f"{metrics[name]:.3f}" if name in metrics else "" for metrics in columns.values()]
        table.add_row(f"{_WORDS.get(direction, direction)}, {metric.replace('_', ' ')}", *values)
    return table


def print_metrics(columns: Mapping[str, Mapping[str, float]], title: str | None = None) -> None:
    """Prints `metrics_table`; see there."""
    from rich.console import Console

    Console().print(metrics_table(columns, title))
