"""The top-k sweep's chunk functions on Triton; the same meaning as `hf_infcl.ops.torch_topk`."""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from hf_infcl.ops.chunks import parts
from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.topk import Links, TopK
from hf_infcl.ops.triton.configs import TileConfig
from hf_infcl.ops.triton.kernels_topk import link_kernel, merge_kernel, topk_kernel
from hf_infcl.ops.triton.kernels_topk_buffer import topk_buffer_kernel
from hf_infcl.ops.triton.kernels_topk_filter import LANES, filter_kernel, select_kernel
from hf_infcl.ops.triton.launch import Tiles, on, operand

_LARGEST_IN_REGISTERS = 64
# Up to k = 16 a strip has 128 rows, eight warps share it, and two programs a multiprocessor: the fewest bytes for a
# product (on an H200, D = 512 and k = 8: 485 TFLOP/s against 364 with 64 rows). With a larger k the registers would not
# hold what has been found beside such a tile. Strips of 64 rows leave room for three programs or four.
_LARGEST_IN_WIDE_STRIPS = 16
# More waves than these leave less of the chip idle at the end.
_WAVES = 6
# A segment starts with nothing to compare with: below this its first tiles, which all insert, outweigh the rest.
_TILES_PER_SEGMENT, _MOST_SEGMENTS = 8, 16
_BUFFER_ROWS = 32_768  # at k = 256: 128 MiB of buffers
_BUFFER_ENTRIES = 2**27  # 1 GiB, which bounds the rows at very large k
_MAX_INDEX = 2**31 - 2**16
# Beyond wide strips a sample of the columns, every eighth or fewer, bounds what can be among the best k: some sqrt(k)
# of these, 32 at most, fall into the sample, and its entry this many standard deviations further down is below them
# all (one row in a million finds it is not, at k = 32). A larger sample costs more itself and lets fewer pass.
_SAMPLED, _DEVIATIONS = 32, 4.9
_SAMPLE_STEP = 8
# With fewer columns than the first times k nearly all pass anyway. With fewer than the second over k further launches
# cost the host more than is saved: on an H200 the sample wins from 32,768 columns on at k = 32, from 16,384 at k = 64.
_COLUMNS_PER_NEGATIVE, _COLUMNS_TIMES_NEGATIVES = 16, 2**20
# Rows at a time whose entries fill 128 MiB at k = 32, and at most as many as fill 512 MiB.
_FILTER_ROWS, _FILTER_ENTRIES = 16_384, 2**26
# What a lane has room for beyond the mean: bounds and entries that are so many standard deviations off.
_LOOSEST_BOUND, _MOST_ENTRIES = 4, 6
_SELECT_ROWS, _SELECT_WIDTH = 4, 64  # a warp for each row
# Three programs of 128 threads share a multiprocessor's 65,536 registers, so that two selections overlap with one
# product; the compiler spills 24 bytes at k = 8 and 272 at k = 32 for it. At k = 64 it would spill too much.
_REGISTERS, _REGISTERS_WIDE = 168, 128
# With buffers eight warps share a tile, and two programs a multiprocessor. With four, a thread's part of the tile, of
# its keys and of what a cut reads would not fit beside each other.
_BUFFER_WARPS, _BUFFER_REGISTERS = 8, 128
# Rows that a program of the backward gathers at a time. It waits for memory: many small programs serve best.
_LINK_STEP, _LINK_WARPS = 8, 2


def chunk_shape(device: torch.device, block_size: int | None) -> tuple[int, int]:
    """A whole block at once: the kernels need no room for scores."""
    return 2**31, 2**31


def _config(device: torch.device, dtype: torch.dtype, k: int, block_size: int | None) -> TileConfig:
    """Tiles of the search in registers, or in buffers."""
    if device.type != "cuda":
        width = block_size if block_size in (16, 32, 64) else 32
        return TileConfig(16, width, 32, 1, 1)
    width = block_size if block_size in (32, 64, 128, 256) else 128
    if dtype == torch.float32:
        return TileConfig(64, min(width, 64), 32, 4, 2)
    if k <= _LARGEST_IN_WIDE_STRIPS and width <= 128:
        return TileConfig(128, width, 64, 8, 3)
    return TileConfig(64, width, 64, 4 if k <= _LARGEST_IN_REGISTERS else _BUFFER_WARPS, 3)


def _filter_config(device: torch.device, dtype: torch.dtype, block_size: int | None) -> TileConfig:
    wide = _config(device, dtype, 1, block_size)
    return TileConfig(64, 256, 64, 8, 2) if wide.block_n == 256 else wide


def offer(
    rows: Side,
    cols: Side,
    row_best: TopK | None,
    col_best: TopK | None,
    exclude_pairs: bool,
    row_ceiling: Tensor | None,
    col_ceiling: Tensor | None,
    precision: str,
    block_size: int | None,
) -> None:
    """Offers a block's candidates to the best k of its rows, and to those of its columns: a product for each."""
    for anchors, others, best, ceiling in ((rows, cols, row_best, row_ceiling), (cols, rows, col_best, col_ceiling)):
        if best is None:
            continue
        if others.offset + len(others) > _MAX_INDEX:
            raise ValueError(f"backend='triton' selects among at most {_MAX_INDEX} candidates; use backend='torch'")
        sampled = sampling(best.k, len(others))
        with on(best.scores.device):
            left = None
            if sampled is not None:
                left = _offer_by_bound(anchors, others, best, *sampled, exclude_pairs, ceiling, precision, block_size)
            search = _offer_in_registers if best.k <= _LARGEST_IN_REGISTERS else _offer_in_buffers
            search(anchors, others, best, exclude_pairs, ceiling, precision, block_size, left)


def _arguments(tiles: Tiles, exclude_pairs: bool, ceiling: Tensor | None) -> dict[str, Any]:
    names = (
        "x", "y", "x_stride", "y_stride", "n_rows", "n_cols", "depth", "shift", "x_ids", "y_ids", "ID_COLUMNS",
        "BLOCK_M", "BLOCK_N", "BLOCK_K", "PRECISION", "USE_TMA",
    )  # fmt: skip
    return {name: tiles.arguments[name] for name in names} | {
        "ceiling": ceiling,
        "EXCLUDE_PAIRS": exclude_pairs,
        "CEILING": ceiling is not None,
        "num_warps": tiles.config.warps,
        "num_stages": tiles.config.stages,
    }


def _tiles(anchors: Side, others: Side, k: int, precision: str, block_size: int | None) -> Tiles:
    chosen = _config(anchors.embeds.device, anchors.embeds.dtype, k, block_size)
    return Tiles.of("topk", anchors, others, Rule("mask"), precision, chosen)


def sampling(k: int, n_cols: int) -> tuple[int, int] | None:
    """Of how many columns to sample one, and which entry of the sample bounds the best k; None: it does not pay."""
    if k <= _LARGEST_IN_WIDE_STRIPS or n_cols < _COLUMNS_PER_NEGATIVE * k or n_cols * k < _COLUMNS_TIMES_NEGATIVES:
        return None
    step = max(_SAMPLE_STEP, math.isqrt(k), -(-k // _SAMPLED))
    hits = k / step
    return step, math.ceil(hits + _DEVIATIONS * math.sqrt(hits)) + 2


def segments_of(strips: int, tiles: int, programs: int) -> int:
    """Into how many segments to cut the columns: as few as keep nine tenths of the programs at work.

    Args:
        strips: of rows.
        tiles: of columns.
        programs: that run at a time.
    """
    most = max(min(tiles // _TILES_PER_SEGMENT, _MOST_SEGMENTS), 1)

    def share(segments: int) -> float:
        items = strips * segments
        return items / (-(-items // programs) * programs)

    return next((count for count in range(1, most + 1) if share(count) >= 0.9), max(range(1, most + 1), key=share))


def _bounds(
    anchors: Side, others: Side, step: int, rank: int, ceiling: Tensor | None, precision: str, block_size: int | None
) -> Tensor:
    """(n,) the score at a rank of every row in a sample of the columns; -inf where the sample has fewer candidates.

    Nearly always more than k candidates of all columns reach it.
    A row's own pair may be in the sample, which makes one entry's difference.
    """
    sample = Side(others.embeds[::step], 0, None if others.ids is None else others.ids[::step])
    best = TopK.empty(len(anchors), rank, device=anchors.embeds.device, dtype=torch.float32)
    _offer_in_registers(anchors, sample, best, False, ceiling, precision, block_size)
    return best.scores.amin(1)


def _count(best: TopK, skipped: Tensor, met: int) -> None:
    best.counts[0] += skipped.sum()
    best.counts[1] += met


def _offer_by_bound(
    anchors: Side,
    others: Side,
    best: TopK,
    step: int,
    rank: int,
    exclude_pairs: bool,
    ceiling: Tensor | None,
    precision: str,
    block_size: int | None,
) -> Tensor:
    """Offers what reaches a bound from a sample. Returns (n,) int32, 1 for rows that this did not do for."""
    device, n, k = best.scores.device, len(anchors), best.k
    bounds = torch.maximum(_bounds(anchors, others, step, rank, ceiling, precision, block_size), best.scores.amin(1))
    left = torch.empty(n, device=device, dtype=torch.int32)
    config = _filter_config(anchors.embeds.device, anchors.embeds.dtype, block_size)
    passing = rank * step
    at_a_time = triton.cdiv(n, max(1, min(_FILTER_ROWS, _FILTER_ENTRIES // (3 * passing))))
    height = triton.cdiv(n, at_a_time * config.block_m) * config.block_m
    for part in parts(n, height):
        tiles = Tiles.of("topk", anchors[part], others, Rule("mask"), precision, config)
        segments = segments_of(tiles.tiles_m, tiles.tiles_n, 2 * tiles.processors)
        segment = triton.cdiv(tiles.tiles_n, segments) * config.block_n
        segments = triton.cdiv(len(others), segment)
        lanes = segments * LANES.value
        expected = passing / lanes * (1 + _LOOSEST_BOUND / math.sqrt(rank))
        room = int(expected + _MOST_ENTRIES * math.sqrt(expected)) + 1 + config.block_n // LANES.value
        length = lanes * room + k  # of the entries of a row, and of the best so far behind them
        rows = tiles.tiles_m * config.block_m
        entries = torch.empty(rows, length, device=device, dtype=torch.int64)
        counts = torch.empty(rows, lanes, device=device, dtype=torch.int32)
        skipped = torch.empty(tiles.tiles_m * segments, device=device, dtype=torch.int32)
        few = {"maxnreg": _REGISTERS_WIDE} if tiles.arguments["USE_TMA"] and config.warps == 8 else {}
        filter_kernel[(tiles.tiles_m, segments)](
            **_arguments(tiles, exclude_pairs, None if ceiling is None else ceiling[part]),
            bounds=bounds[part],
            entries=entries,
            length=length,
            room=room,
            counts=counts,
            offset=others.offset,
            segment=segment,
            skipped=skipped,
            **few,
        )
        n_rows = tiles.arguments["n_rows"]
        select_kernel[(triton.cdiv(n_rows, _SELECT_ROWS),)](
            entries, length, room, counts, lanes, bounds[part], best.scores[part], best.indices[part], n_rows, k,
            left[part], WIDTH=_SELECT_WIDTH, BLOCK_M=_SELECT_ROWS, num_warps=_SELECT_ROWS,
        )  # fmt: skip
        _count(best, skipped, n_rows * tiles.tiles_n)
        del entries  # else the next part's would be made beside it
    return left


def _offer_in_registers(
    anchors: Side,
    others: Side,
    best: TopK,
    exclude_pairs: bool,
    ceiling: Tensor | None,
    precision: str,
    block_size: int | None,
    wanted: Tensor | None = None,
) -> None:
    """wanted: (n,) int32, 0 for rows to which nothing is offered; they are not counted then."""
    tiles = _tiles(anchors, others, best.k, precision, block_size)
    n, k, slots = len(anchors), best.k, max(triton.next_power_of_2(best.k), 2)
    # Few strips: the columns are cut into segments, so that the whole chip has work.
    segments = max(1, min(_WAVES * tiles.processors // (2 * tiles.tiles_m), tiles.tiles_n // _TILES_PER_SEGMENT, 16))
    segment = triton.cdiv(tiles.tiles_n, segments) * tiles.config.block_n
    segments = triton.cdiv(len(others), segment)
    if segments == 1:
        scores, indices = best.scores, best.indices
    else:
        scores = torch.empty(n, segments * k, device=best.scores.device, dtype=torch.float32)
        indices = torch.empty(n, segments * k, device=best.scores.device, dtype=torch.int64)
    skipped = torch.empty(tiles.tiles_m * segments, device=scores.device, dtype=torch.int32)
    few = {}
    if slots <= 32 and tiles.arguments["USE_TMA"]:
        few = {"maxnreg": _REGISTERS_WIDE if tiles.config.warps == 8 else _REGISTERS}
    topk_kernel[(tiles.tiles_m, segments)](
        **_arguments(tiles, exclude_pairs, ceiling),
        scores=scores,
        indices=indices,
        stride=scores.stride(0),
        offset=others.offset,
        k=k,
        segment=segment,
        wanted=wanted,
        skipped=skipped,
        LOAD=segments == 1,
        SOME=wanted is not None,
        K=slots,
        **few,
    )
    if segments > 1:
        block_m = 16
        merge_kernel[(triton.cdiv(n, block_m),)](
            scores, indices, segments * k, best.scores, best.indices, n, k, LOAD=True, K=slots, BLOCK_M=block_m,
            BLOCK_N=32 if k <= 32 else 64, num_warps=1,
        )  # fmt: skip
    if wanted is None:
        _count(best, skipped, n * tiles.tiles_n)


def _offer_in_buffers(
    anchors: Side,
    others: Side,
    best: TopK,
    exclude_pairs: bool,
    ceiling: Tensor | None,
    precision: str,
    block_size: int | None,
    wanted: Tensor | None = None,
) -> None:
    """wanted: (n,) int32, 0 for rows to which nothing is offered; they are not counted then."""
    width = 32  # what a pass reads of a row at a time; with 64 twice as many registers spill
    block_n = _config(anchors.embeds.device, anchors.embeds.dtype, best.k, block_size).block_n
    capacity = best.k + max(best.k // 2, 2 * block_n)  # half as much again as k before a buffer is cut back
    capacity = triton.cdiv(capacity, width) * width
    for part in parts(len(anchors), min(_BUFFER_ROWS, max(_BUFFER_ENTRIES // capacity // 64, 1) * 64)):
        tiles = _tiles(anchors[part], others, best.k, precision, block_size)
        strips = tiles.tiles_m
        keys = torch.empty(strips * tiles.config.block_m, capacity, device=best.scores.device, dtype=torch.int64)
        skipped = torch.empty(strips, device=best.scores.device, dtype=torch.int32)
        fits = tiles.arguments["USE_TMA"] and tiles.config.warps == _BUFFER_WARPS
        few = {"maxnreg": _BUFFER_REGISTERS} if fits else {}
        topk_buffer_kernel[(strips,)](
            **_arguments(tiles, exclude_pairs, None if ceiling is None else ceiling[part]),
            scores=best.scores[part],
            indices=best.indices[part],
            offset=others.offset,
            k=best.k,
            wanted=None if wanted is None else wanted[part],
            skipped=skipped,
            keys=keys,
            capacity=capacity,
            SOME=wanted is not None,
            WIDTH=width,
            **few,
        )
        if wanted is None:
            _count(best, skipped, tiles.arguments["n_rows"] * tiles.tiles_n)


def link_gradient(
    from_target: Links | None, from_source: Links | None, source: Tensor, factor: Tensor, out: Tensor
) -> None:
    """out_i += factor times the sum over both kinds of links. Indices are positions; those outside are left out."""
    x = operand(source)
    n, depth = out.shape
    starts = sources = shares = None
    if from_source is not None:
        k = from_source.indices.shape[1]
        inside = (from_source.indices >= 0) & (from_source.indices < n)
        targets, order = torch.where(inside, from_source.indices, n).to(torch.int32).flatten().sort(stable=True)
        starts = torch.searchsorted(targets, torch.arange(n + 1, device=out.device, dtype=torch.int32), out_int32=True)
        shares = from_source.weights.flatten()[order]
        sources = order.div_(k, rounding_mode="floor").to(torch.int32)
    block_d = min(triton.next_power_of_2(depth), 1024)
    with on(out.device):
        link_kernel[(n, triton.cdiv(depth, block_d))](
            out, out.stride(0), x, x.stride(0), len(x), depth, factor,
            weights=None if from_target is None else from_target.weights,
            indices=None if from_target is None else from_target.indices,
            k=0 if from_target is None else from_target.indices.shape[1],
            starts=starts,
            sources=sources,
            shares=shares,
            GATHER=from_target is not None,
            SCATTER=from_source is not None,
            STEP=_LINK_STEP,
            BLOCK_D=block_d,
            num_warps=_LINK_WARPS,
        )  # fmt: skip
