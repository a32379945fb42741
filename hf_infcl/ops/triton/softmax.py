"""InfoNCE's chunk functions on Triton; the same meaning as `hf_infcl.ops.torch_tiles`."""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.statistics import Statistics
from hf_infcl.ops.triton import pingpong
from hf_infcl.ops.triton.kernels_statistics import merge_kernel, statistics_kernel
from hf_infcl.ops.triton.kernels_weights import weights_kernel
from hf_infcl.ops.triton.launch import Tiles, cdiv, launch
from hf_infcl.ops.triton.products import empty_weights, gain

_MERGE_ROWS, _MERGE_STEP = 64, 16
# In place of the exponentials to keep, their row stride and their number of rows.
NONE_KEPT = None, 0, 0


def exact(precision: str, dtype: torch.dtype) -> bool:
    """Full float32 keeps each row's own maximum: sharing one costs up to six bits of a log-sum-exp."""
    return dtype == torch.float32 and precision != "tf32"


def _sides(row_stats: Statistics | None, col_stats: Statistics | None) -> tuple[Any, ...]:
    """The running statistics and their strides, as the kernels take them."""
    rows, cols = (None if stats is None else stats.data for stats in (row_stats, col_stats))
    return rows, cols, 0 if rows is None else rows.stride(0), 0 if cols is None else cols.stride(0)


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
    left_out = tiles.masks and rule.label_smoothing > 0
    planes = 2 + 2 * (many or left_out)
    # One allocation for both sides' parts.
    row_size = planes * tiles.tiles_n * n_rows if row_stats is not None else 0
    col_size = planes * tiles.tiles_m * n_cols if col_stats is not None else 0
    make = torch.zeros if planes > 2 else torch.empty
    parts = make(row_size + col_size, device=device, dtype=torch.float32)
    row_parts, col_parts = parts[:row_size], parts[row_size:]
    running = _sides(row_stats, col_stats)
    wanted = row_stats is not None, col_stats is not None
    if exact(precision, rows.embeds.dtype):
        values = (scale, *running, row_parts, col_parts, None, None, *NONE_KEPT)
        tiles.launch(statistics_kernel, values, (*wanted, many, left_out, True, False, False, False))
    else:
        doubts = torch.empty(tiles.tiles_m * tiles.tiles_n, device=device, dtype=torch.int32)
        values = (scale, *running, row_parts, col_parts, doubts)
        if pingpong.suits(tiles, False, pingpong.STATISTICS):
            pingpong.statistics(tiles, rule, values, wanted, False)
        else:
            first = (*wanted, many, left_out, False, False, False, False)
            tiles.launch(statistics_kernel, (*values, None, *NONE_KEPT), first)
        second = (*wanted, many, left_out, True, True, False, False)
        tiles.launch(statistics_kernel, (*values, None, *NONE_KEPT), second, repair=True)
    row_blocks = cdiv(n_rows, _MERGE_ROWS) if row_stats is not None else 0
    col_blocks = cdiv(n_cols, _MERGE_ROWS) if col_stats is not None else 0
    merge = (
        row_parts, col_parts, *running, n_rows, n_cols, tiles.tiles_m, tiles.tiles_n, row_blocks, scale, None, None,
        0.0, 0.0,
    )  # fmt: skip
    switches = (*wanted, many, left_out, False, False, _MERGE_ROWS, _MERGE_STEP)
    launch(merge_kernel, device, row_blocks + col_blocks, merge, switches, warps=4, stages=1)


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
    doubts = torch.empty(n_tiles, device=g.device, dtype=torch.int32) if defer else None
    stats = _sides(row_stats, col_stats)
    last = float(rule.label_smoothing), gain(dtype)
    many = tiles.has_ids and rule.duplicates == "positive"
    wanted = row_stats is not None, col_stats is not None
    switches = (*wanted, many, rule.label_smoothing > 0, is_exact, want_sum)
    in_turn = not want_sum and pingpong.suits(tiles, is_exact, pingpong.WEIGHTS)
    if in_turn:
        pingpong.weights(tiles, rule, g, (scale, *stats, doubts, *last), wanted)
    if defer or not in_turn:
        values = (scale, *stats, tiles.weights(g), g.stride(0), sums, doubts, *last)
        if not in_turn:
            tiles.launch(weights_kernel, values, (*switches, defer, False))
        if defer:
            tiles.launch(weights_kernel, values, (*switches, False, True), repair=True)
    return g, None if sums is None else sums.sum()
