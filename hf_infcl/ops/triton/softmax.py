"""InfoNCE's chunk functions on Triton; the same meaning as `hf_infcl.ops.torch_tiles`."""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.statistics import COUNT, TOTAL, Statistics
from hf_infcl.ops.triton import hopper
from hf_infcl.ops.triton.kernels_softmax import merge_kernel, statistics_kernel, weights_kernel
from hf_infcl.ops.triton.launch import Tiles, cdiv, on
from hf_infcl.ops.triton.products import empty_weights, gain

_MERGE_ROWS, _MERGE_STEP = 64, 16


def _exact(precision: str, dtype: torch.dtype) -> bool:
    """Full float32 keeps each row's own maximum: sharing one costs up to six bits of a log-sum-exp."""
    return dtype == torch.float32 and precision != "tf32"


def statistics(
    rows: Side,
    cols: Side,
    scale: Tensor,
    rule: Rule,
    row_stats: Statistics | None,
    col_stats: Statistics | None,
    precision: str,
) -> None:
    """Merges a chunk's candidates into the running statistics of its rows and of its columns (None: not wanted).

    `max` may exceed a row's largest u, where the row shared its tile's maximum; `log_sum` is less by as much.
    """
    on_hopper = hopper.suits(rows, cols, rule)
    tiles = Tiles.of("statistics", rows, cols, rule, precision, hopper.REPAIR if on_hopper else None)
    n_rows, n_cols, device = len(rows), len(cols), rows.embeds.device
    exact, mask = _exact(precision, rows.embeds.dtype), tiles.arguments["MASK"]
    many, smooth = rule.duplicates == "positive" and tiles.arguments["ID_COLUMNS"] > 0, rule.label_smoothing > 0
    # Sum and count of a row's candidates: exactly in the tiles; else all columns', by algebra, less the tiles' masked.
    planes_of_candidates = smooth and (exact or mask)
    planes = 2 + 2 * many + 2 * planes_of_candidates
    # One allocation for both sides' parts.
    row_size = planes * tiles.tiles_n * n_rows if row_stats is not None else 0
    col_size = planes * tiles.tiles_m * n_cols if col_stats is not None else 0
    make = torch.zeros if planes_of_candidates else torch.empty
    parts = make(row_size + col_size, device=device, dtype=torch.float32)
    sides = {
        "row_stats": None if row_stats is None else row_stats.data,
        "col_stats": None if col_stats is None else col_stats.data,
        "row_stats_stride": 0 if row_stats is None else row_stats.data.stride(0),
        "col_stats_stride": 0 if col_stats is None else col_stats.data.stride(0),
        "row_parts": parts[:row_size],
        "col_parts": parts[row_size:],
        "scale": scale,
    }
    wanted = {"ROWS": row_stats is not None, "COLS": col_stats is not None}
    if exact:
        tiles.launch(
            statistics_kernel, **sides, **wanted, doubts=None,
            MANY_POSITIVES=many, SMOOTH=smooth, EXACT=True, REPAIR=False, FRESH=False,
        )  # fmt: skip
    else:
        doubts = torch.empty(tiles.tiles_m * tiles.tiles_n, device=device, dtype=torch.int32)
        if on_hopper:
            hopper.launch_statistics(tiles, **sides, **wanted, doubts=doubts)
        else:
            tiles.launch(
                statistics_kernel, **sides, **wanted, doubts=doubts,
                MANY_POSITIVES=many, SMOOTH=False, EXACT=False, REPAIR=False, FRESH=False,
            )  # fmt: skip
        tiles.repair().launch(
            statistics_kernel, **sides, **wanted, doubts=doubts,
            MANY_POSITIVES=many, SMOOTH=planes_of_candidates, EXACT=True, REPAIR=True, FRESH=False,
        )  # fmt: skip
        if smooth:
            for stats, mine, theirs in ((row_stats, rows, cols), (col_stats, cols, rows)):
                if stats is not None:
                    stats.data[TOTAL] += mine.embeds.float() @ theirs.embeds.sum(0, dtype=torch.float32)
                    stats.data[COUNT] += len(theirs)
    row_blocks = cdiv(n_rows, _MERGE_ROWS) if row_stats is not None else 0
    col_blocks = cdiv(n_cols, _MERGE_ROWS) if col_stats is not None else 0
    with on(device):
        merge_kernel[(row_blocks + col_blocks,)](
            **sides,
            **wanted,
            n_rows=n_rows,
            n_cols=n_cols,
            row_tiles=tiles.tiles_m,
            col_tiles=tiles.tiles_n,
            row_blocks=row_blocks,
            loss_parts=None,
            share=0.0,
            smoothing=0.0,
            FRESH=False,
            LOSS=False,
            MANY_POSITIVES=many,
            SMOOTH=planes_of_candidates,
            BLOCK=_MERGE_ROWS,
            STEP=_MERGE_STEP,
            num_warps=4,
        )


def softmax_weights(
    rows: Side,
    cols: Side,
    scale: Tensor,
    rule: Rule,
    row_stats: Statistics | None,
    col_stats: Statistics | None,
    precision: str,
    want_sum: bool,
) -> tuple[Tensor, Tensor | None]:
    """The chunk of G, dL/dl_ij without its factor 1/n, times `gain`: softmax less target, over rows plus over columns.

    Returns:
        G (n_rows, n_cols) in the embeddings' dtype, and sum_ij G_ij u_ij (the scale's gradient) if wanted.
    """
    dtype = rows.embeds.dtype
    on_hopper = hopper.suits(rows, cols, rule)
    tiles = Tiles.of("weights", rows, cols, rule, precision, hopper.REPAIR if on_hopper else None)
    g = empty_weights(rows, cols)
    sums = torch.empty(tiles.tiles_m * tiles.tiles_n, device=g.device, dtype=torch.float32) if want_sum else None
    common: dict[str, Any] = {
        "scale": scale,
        "row_stats": None if row_stats is None else row_stats.data,
        "col_stats": None if col_stats is None else col_stats.data,
        "row_stats_stride": 0 if row_stats is None else row_stats.data.stride(0),
        "col_stats_stride": 0 if col_stats is None else col_stats.data.stride(0),
        "sum_parts": sums,
        "smoothing": float(rule.label_smoothing),
        "gain": gain(dtype),
        "ROWS": row_stats is not None,
        "COLS": col_stats is not None,
        "SMOOTH": rule.label_smoothing > 0,
        "WANT_SUM": want_sum,
    }
    many = rule.duplicates == "positive" and tiles.arguments["ID_COLUMNS"] > 0
    exact, mask = _exact(precision, dtype), tiles.arguments["MASK"]
    # What few tiles need is left to a second launch: masks where ids may agree and, on Hopper, two exponentials.
    defer = (mask and not exact) or on_hopper
    common["doubts"] = torch.empty(tiles.tiles_m * tiles.tiles_n, device=g.device, dtype=torch.int32) if defer else None
    plain = {"g": tiles.weights(g), "g_stride": g.stride(0), "MANY_POSITIVES": many, "EXACT": exact}
    if on_hopper:
        hopper.launch_weights(tiles, g, **common)
    else:
        tiles.launch(weights_kernel, **common, **plain, DEFER=defer, REPAIR=False)
    if defer:
        tiles.repair().launch(weights_kernel, **common, **plain, DEFER=False, REPAIR=True)
    return g, None if sums is None else sums.sum()
