"""InfoNCE's chunk functions on Triton; the same meaning as `hf_infcl.ops.torch_tiles`."""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.statistics import Statistics
from hf_infcl.ops.triton.kernels_statistics import merge_kernel, statistics_kernel
from hf_infcl.ops.triton.kernels_weights import weights_kernel
from hf_infcl.ops.triton.launch import Tiles, cdiv, launch
from hf_infcl.ops.triton.products import empty_weights, gain

_MERGE_ROWS, _MERGE_STEP = 64, 16


def exact(precision: str, dtype: torch.dtype) -> bool:
    """Full float32 keeps each row's own maximum: sharing one costs up to six bits of a log-sum-exp."""
    return dtype == torch.float32 and precision != "tf32"


def _sides(row_stats: Statistics | None, col_stats: Statistics | None) -> dict[str, Any]:
    return {
        "row_stats": None if row_stats is None else row_stats.data,
        "col_stats": None if col_stats is None else col_stats.data,
        "row_stats_stride": 0 if row_stats is None else row_stats.data.stride(0),
        "col_stats_stride": 0 if col_stats is None else col_stats.data.stride(0),
        "ROWS": row_stats is not None,
        "COLS": col_stats is not None,
    }


def statistics(
    rows: Side,
    cols: Side,
    scale: Tensor,
    rule: Rule,
    row_stats: Statistics | None,
    col_stats: Statistics | None,
    precision: str,
    related: Tensor | None = None,
) -> None:
    """Merges a chunk's candidates into the running statistics of its rows and of its columns (None: not wanted).

    `max` may exceed a row's largest u, where the row shared its tile's maximum; `log_sum` is less by as much.
    """
    tiles = Tiles.of("statistics", rows, cols, rule, precision, related=related)
    n_rows, n_cols, device = len(rows), len(cols), rows.embeds.device
    many = tiles.has_ids and rule.duplicates == "positive"
    # Where a mask leaves candidates out, the tiles say what; the block has counted all of them.
    left_out = tiles.arguments["MASK"] and rule.label_smoothing > 0
    planes = 2 + 2 * (many or left_out)
    # One allocation for both sides' parts.
    row_size = planes * tiles.tiles_n * n_rows if row_stats is not None else 0
    col_size = planes * tiles.tiles_m * n_cols if col_stats is not None else 0
    make = torch.zeros if planes > 2 else torch.empty
    parts = make(row_size + col_size, device=device, dtype=torch.float32)
    common = _sides(row_stats, col_stats) | {
        "row_parts": parts[:row_size],
        "col_parts": parts[row_size:],
        "scale": scale,
        "MANY_POSITIVES": many,
        "SMOOTH": left_out,
        "FRESH": False,
    }
    if exact(precision, rows.embeds.dtype):
        tiles.launch(statistics_kernel, **common, doubts=None, EXACT=True, REPAIR=False)
    else:
        doubts = torch.empty(tiles.tiles_m * tiles.tiles_n, device=device, dtype=torch.int32)
        tiles.launch(statistics_kernel, **common, doubts=doubts, EXACT=False, REPAIR=False)
        tiles.repair().launch(statistics_kernel, **common, doubts=doubts, EXACT=True, REPAIR=True)
    row_blocks = cdiv(n_rows, _MERGE_ROWS) if row_stats is not None else 0
    col_blocks = cdiv(n_cols, _MERGE_ROWS) if col_stats is not None else 0
    merge = common | {
        "n_rows": n_rows,
        "n_cols": n_cols,
        "row_tiles": tiles.tiles_m,
        "col_tiles": tiles.tiles_n,
        "row_blocks": row_blocks,
        "loss_parts": None,
        "share": 0.0,
        "smoothing": 0.0,
        "LOSS": False,
        "BLOCK": _MERGE_ROWS,
        "STEP": _MERGE_STEP,
    }
    launch(merge_kernel, row_blocks + col_blocks, merge, device, warps=4, stages=1)


def softmax_weights(
    rows: Side,
    cols: Side,
    scale: Tensor,
    rule: Rule,
    row_stats: Statistics | None,
    col_stats: Statistics | None,
    precision: str,
    want_sum: bool,
    related: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The chunk of G, dL/dl_ij without its factor 1/n, times `gain`: softmax less target, over rows plus over columns.

    Returns:
        G (n_rows, n_cols) in the embeddings' dtype, and sum_ij G_ij u_ij (the scale's gradient) if wanted.
    """
    dtype = rows.embeds.dtype
    tiles = Tiles.of("weights", rows, cols, rule, precision, related=related)
    g = empty_weights(rows, cols)
    n_tiles = tiles.tiles_m * tiles.tiles_n
    sums = torch.empty(n_tiles, device=g.device, dtype=torch.float32) if want_sum else None
    is_exact = exact(precision, dtype)
    defer = tiles.has_ids and not is_exact  # the few tiles in which ids may agree to a second launch
    common = _sides(row_stats, col_stats) | {
        "scale": scale,
        "g": tiles.weights(g),
        "g_stride": g.stride(0),
        "sum_parts": sums,
        "doubts": torch.empty(n_tiles, device=g.device, dtype=torch.int32) if defer else None,
        "smoothing": float(rule.label_smoothing),
        "gain": gain(dtype),
        "MANY_POSITIVES": tiles.has_ids and rule.duplicates == "positive",
        "SMOOTH": rule.label_smoothing > 0,
        "EXACT": is_exact,
        "WANT_SUM": want_sum,
    }
    tiles.launch(weights_kernel, **common, DEFER=defer, REPAIR=False)
    if defer:
        tiles.repair().launch(weights_kernel, **common, DEFER=False, REPAIR=True)
    return g, None if sums is None else sums.sum()
