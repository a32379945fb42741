"""The curves of a run as one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_NAME = "curves.png"
# Okabe and Ito's palette: told apart by colour-blind readers and in grey.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_FIRST_METRIC = "image_to_text/recall@1"
_DIRECTIONS = {"image_to_text": (_BLUE, "image to text"), "text_to_image": (_ORANGE, "text to image")}


def plot_history(
    log_history: Sequence[Mapping[str, Any]], path: str | Path, *, title: str | None = None, prefix: str | None = None
) -> Path:
    """Draws loss and recall over the optimizer steps, a panel each; a panel without data is left out.

    Args:
        log_history: `trainer.state.log_history`: dictionaries with `step` and what was logged at it. An evaluation
            before training stands at step 0.
        path: the folder, or the picture's own path (its ending decides the format).
        title: a line above the picture.
        prefix: what the names of evaluation metrics begin with; by default "eval_", or with several evaluation sets
            the first one's.

    Returns:
        The path of the picture.

    Example:
        >>> plot_history(trainer.state.log_history, "out")
        PosixPath('out/curves.png')
    """
    path = Path(path)
    if not path.suffix:
        path = path / PLOT_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = draw_history(log_history, title, _first_prefix(log_history) if prefix is None else prefix)
    figure.savefig(path, dpi=150)
    return path


def draw_history(log_history: Sequence[Mapping[str, Any]], title: str | None, prefix: str) -> "Figure":
    """The picture that `plot_history` saves; see there."""
    # Not pyplot: neither the backend that the caller chose nor its open figures are touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses = {
        "loss": {"color": _BLUE, "label": "training"},
        f"{prefix}loss": {"color": _RED, "label": "evaluation", "marker": "o"},
    }
    recalls = {
        f"{prefix}{direction}/recall@{k}": {
            "color": colour,
            "label": f"{words} @{k}",
            "marker": "o",
            "linestyle": line,
        }
        for direction, (colour, words) in _DIRECTIONS.items()
        for k, line in ((1, "-"), (5, "--"), (10, ":"))
    }
    logged = {name for entry in log_history if "step" in entry for name in entry}
    panels = [
        (name, curves, limits)
        for name, curves, limits in (("Loss", losses, None), ("Recall", recalls, (0, 1.02)))
        if logged & set(curves)
    ]
    figure = Figure(figsize=(4.5 * max(1, len(panels)), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    if not panels:
        figure.text(0.5, 0.5, "nothing logged", ha="center", va="center", color="grey")
    for place, (name, curves, limits) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), place)
        for metric, style in curves.items():
            _curve(axes, log_history, metric, **style)
        axes.set(title=name, xlabel="optimizer step", ylim=limits)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # Below: a curve may pass anywhere inside.
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _first_prefix(log_history: Sequence[Mapping[str, Any]]) -> str:
    for entry in log_history:
        for name in entry:
            if name.startswith("eval_") and name.endswith(_FIRST_METRIC):
                return name.removesuffix(_FIRST_METRIC)
    return "eval_"


def _curve(axes: Any, log_history: Sequence[Mapping[str, Any]], name: str, **style: Any) -> None:
    # A later value of the same step replaces an earlier one: the final evaluation repeats the last of the training.
    points = {entry["step"]: entry[name] for entry in log_history if name in entry and "step" in entry}
    if points:
        steps = sorted(points)
        alone = {"marker": "o"} if len(steps) == 1 else {}
        axes.plot(steps, [points[step] for step in steps], markersize=3, **{**style, **alone})
