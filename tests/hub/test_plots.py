"""The picture of a run's curves."""

import matplotlib
import numpy as np
import pytest
from PIL import Image

from hf_infcl.hub import plot_history
from hf_infcl.hub.plots import draw_history

HISTORY = [
    {"step": 0, "eval_loss": 4.0, "eval_image_to_text/recall@1": 0.1, "eval_text_to_image/recall@1": 0.1},
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": 2.0, "grad_norm": 1.0},
    {"step": 2, "eval_loss": 2.5, "eval_image_to_text/recall@1": 0.4, "eval_text_to_image/recall@1": 0.3},
    {"step": 2, "train_runtime": 1.0, "train_loss": 2.5},
]


def colours(path):
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return {tuple(colour) for colour in np.unique(pixels, axis=0).tolist()}


def test_loss_and_recall_are_drawn(tmp_path):
    path = plot_history(HISTORY, tmp_path / "run", title="A run")
    assert path == tmp_path / "run" / "curves.png"
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0xD5, 0x5E, 0x00)} <= colours(path)


def test_of_several_evaluation_sets_the_first_is_drawn(tmp_path):
    history = [{name.replace("eval_", "eval_one_"): value for name, value in entry.items()} for entry in HISTORY]
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0xD5, 0x5E, 0x00)} <= colours(plot_history(history, tmp_path))


@pytest.mark.parametrize("history", [[], [{"step": 1, "loss": 2.0}], [{"step": 3, "eval_loss": 2.0}]])
def test_short_histories_are_drawn_too(tmp_path, history):
    assert plot_history(history, tmp_path / "few.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("history", "titles"),
    [(HISTORY, ["Loss", "Recall"]), (HISTORY[1:3], ["Loss"]), ([{"step": 1, "grad_norm": 1.0}], [])],
)
def test_only_panels_with_data_are_drawn(history, titles):
    figure = draw_history(history, None, "eval_")
    assert [axes.get_title() for axes in figure.axes] == titles
    assert all(axes.lines for axes in figure.axes)
    assert [text.get_text() for text in figure.texts] == ([] if titles else ["nothing logged"])


def test_the_callers_figures_and_backend_are_left_alone(tmp_path):
    backend = matplotlib.rcParams["backend"]
    plot_history(HISTORY, tmp_path)
    assert matplotlib.rcParams["backend"] == backend


def test_the_legends_cover_no_curve():
    many = [
        {"step": step, "loss": 4.0 / step}
        | {f"eval_{way}/recall@{k}": 0.1 * k for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
        for step in range(1, 9)
    ]
    figure = draw_history(many, "A run", "eval_")
    figure.canvas.draw()
    shown = figure.bbox
    for axes in figure.axes:
        legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert not legend.overlaps(inside)
        assert not legend.overlaps(axes.xaxis.label.get_window_extent())
        assert shown.x0 <= legend.x0 < legend.x1 <= shown.x1
        assert shown.y0 <= legend.y0 < legend.y1 <= shown.y1
    left, right = (axes.get_legend().get_window_extent() for axes in figure.axes)
    assert not left.overlaps(right)
