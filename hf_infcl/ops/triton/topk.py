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
from hf_infcl.ops.triton.kernels_topk import link_kernel, maxima_kernel, merge_kernel, topk_kernel
from hf_infcl.ops.triton.kernels_topk_buffer import topk_buffer_kernel
from hf_infcl.ops.triton.launch import Tiles, on, operand

_LARGEST_IN_REGISTERS = 64
# A strip of 64 rows leaves room for three or four programs on a multiprocessor, whose selections overlap with the
# others' products; more waves than these leave less of the chip idle at the end.
_WAVES = 6
# A segment starts with nothing to compare with: below this its first tiles, which all insert, outweigh the rest.
_TILES_PER_SEGMENT = 8
_BUFFER_ROWS = 32_768  # at k = 256: 128 MiB of buffers
_BUFFER_ENTRIES = 2**27  # 1 GiB, which bounds the rows at very large k
_MAX_INDEX = 2**31 - 2**16
# A cut: a pass for the range, about 16 halvings on random scores (32 at most), one that moves what stays.
_PASSES_PER_CUT = 18
# What is counted in multiply-adds of a product: a pass's visit to one entry of a buffer, and the part in a `torch.topk`
# of one column's share of its block's maximum.
_VISIT, _MAXIMUM = 40, 64
_NARROWEST = 32  # columns of a block whose maximum is kept
_MAXIMA = 2**24  # 64 MiB of block maxima at a time
# Three programs of 128 threads share a multiprocessor's 65,536 registers, so that two selections overlap with one
# product; the compiler spills 24 bytes at k = 8 and 272 at k = 32 for it. At k = 64 it would spill too much.
_REGISTERS = 168


def chunk_shape(device: torch.device, block_size: int | None) -> tuple[int, int]:
    """A whole block at once: the kernels need no room for scores."""
    return 2**31, 2**31


def _config(device: torch.device, dtype: torch.dtype, k: int, block_size: int | None) -> TileConfig:
    if device.type != "cuda":
        width = block_size if block_size in (16, 32, 64) else 32
        return TileConfig(16, width, 32, 1, 1)
    width = block_size if block_size in (32, 64, 128, 256) else 128
    if dtype == torch.float32:
        return TileConfig(64, min(width, 64), 32, 4, 2)
    return TileConfig(64, width, 64, 4, 3)


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
        search = _offer_in_registers if best.k <= _LARGEST_IN_REGISTERS else _offer_in_buffers
        with on(best.scores.device):
            search(anchors, others, best, exclude_pairs, ceiling, precision, block_size)


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


def sweeps_twice(k: int, n_cols: int, depth: int) -> bool:
    """Whether a first sweep for bounds pays: it costs a product, and saves all cuts of a buffer but the last.

    Without bounds a buffer, half as large again as k, is full whenever the columns seen have grown by half. For a k in
    registers the sweep never pays: the insertions it saves cost less than a product.
    """
    if k <= _LARGEST_IN_REGISTERS or n_cols < 2 * k * _NARROWEST:
        return False
    cuts = math.log(n_cols / (1.5 * k)) / math.log(1.5)
    return cuts * _PASSES_PER_CUT * 1.5 * k * _VISIT > n_cols * (depth + _MAXIMUM)


def _bounds(
    anchors: Side,
    others: Side,
    k: int,
    exclude_pairs: bool,
    ceiling: Tensor | None,
    precision: str,
    block_size: int | None,
) -> Tensor | None:
    """(n,) the k-th largest of every row's block maxima, which at least k of its candidates reach; None: not worth it.

    A block has as many columns as a tile, or fewer where that would leave less than four blocks for each of the k.
    """
    n, n_cols = len(anchors), len(others)
    sub = _config(anchors.embeds.device, anchors.embeds.dtype, k, block_size).block_n
    while sub > _NARROWEST and n_cols < 4 * k * sub:
        sub //= 2
    blocks = triton.cdiv(n_cols, sub)
    if blocks < k or not sweeps_twice(k, n_cols, anchors.embeds.shape[1]):
        return None
    bounds = torch.empty(n, device=anchors.embeds.device, dtype=torch.float32)
    for part in parts(n, max(_MAXIMA // blocks // 64, 1) * 64):
        tiles = _tiles(anchors[part], others, k, precision, block_size)
        segment = triton.cdiv(tiles.tiles_n, max(_WAVES * tiles.processors // tiles.tiles_m, 1)) * tiles.config.block_n
        maxima = torch.empty(len(bounds[part]), blocks, device=bounds.device, dtype=torch.float32)
        maxima_kernel[(tiles.tiles_m, triton.cdiv(n_cols, segment))](
            **_arguments(tiles, exclude_pairs, None if ceiling is None else ceiling[part]),
            maxima=maxima,
            n_blocks=blocks,
            segment=segment,
            SUB=sub,
        )
        torch.amin(maxima.topk(k, dim=1, sorted=False).values, 1, out=bounds[part])
    return bounds


def _count(best: TopK, skipped: Tensor, met: int) -> None:
    best.counts[0] += skipped.sum()
    best.counts[1] += met


def _offer_in_registers(
    anchors: Side,
    others: Side,
    best: TopK,
    exclude_pairs: bool,
    ceiling: Tensor | None,
    precision: str,
    block_size: int | None,
) -> None:
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
    bounds = _bounds(anchors, others, k, exclude_pairs, ceiling, precision, block_size)
    few = {"maxnreg": _REGISTERS} if slots <= 32 and tiles.arguments["USE_TMA"] else {}
    topk_kernel[(tiles.tiles_m, segments)](
        **_arguments(tiles, exclude_pairs, ceiling),
        scores=scores,
        indices=indices,
        stride=scores.stride(0),
        offset=others.offset,
        k=k,
        segment=segment,
        skipped=skipped,
        bounds=bounds,
        LOAD=segments == 1,
        BOUNDED=bounds is not None,
        K=slots,
        **few,
    )
    if segments > 1:
        block_m = 16
        merge_kernel[(triton.cdiv(n, block_m),)](
            scores, indices, segments * k, best.scores, best.indices, n, k, LOAD=True, K=slots, BLOCK_M=block_m,
            BLOCK_N=32 if k <= 32 else 64, num_warps=1,
        )  # fmt: skip
    _count(best, skipped, n * tiles.tiles_n)


def _offer_in_buffers(
    anchors: Side,
    others: Side,
    best: TopK,
    exclude_pairs: bool,
    ceiling: Tensor | None,
    precision: str,
    block_size: int | None,
) -> None:
    width = 64  # what a pass reads of a row at a time: enough loads in flight, and no spills
    block_n = _config(anchors.embeds.device, anchors.embeds.dtype, best.k, block_size).block_n
    # Half as much again as k before a buffer is cut back.
    capacity = triton.cdiv(best.k + max(best.k // 2, 2 * block_n), width) * width
    bounds = _bounds(anchors, others, best.k, exclude_pairs, ceiling, precision, block_size)
    for part in parts(len(anchors), min(_BUFFER_ROWS, max(_BUFFER_ENTRIES // capacity // 64, 1) * 64)):
        tiles = _tiles(anchors[part], others, best.k, precision, block_size)
        block_m = tiles.config.block_m
        strips = tiles.tiles_m
        buffers = [
            torch.empty(strips * block_m, capacity, device=best.scores.device, dtype=torch.int32) for _ in range(2)
        ]
        skipped = torch.empty(strips, device=best.scores.device, dtype=torch.int32)
        topk_buffer_kernel[(strips,)](
            **_arguments(tiles, exclude_pairs, None if ceiling is None else ceiling[part]),
            scores=best.scores[part],
            indices=best.indices[part],
            offset=others.offset,
            k=best.k,
            skipped=skipped,
            bounds=None if bounds is None else bounds[part],
            keys=buffers[0],
            key_indices=buffers[1],
            LOAD=True,
            BOUNDED=bounds is not None,
            capacity=capacity,
            WIDTH=width,
        )
        _count(best, skipped, (min(part.stop, len(anchors)) - part.start) * tiles.tiles_n)


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
            STEP=8,
            BLOCK_D=block_d,
            num_warps=4,
        )  # fmt: skip
