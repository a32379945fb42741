"""A batch that fits in one chunk: the loss in two launches and a sum, its gradients in two more.

Up to some 8,192 pairs the GPU waits for the host; what counts is how little Python runs per step. The general path
makes running statistics, merges into them and finishes with small operations; here the kernels make, merge and finish.
"""

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.configs import TileConfig, interpreted
from hf_infcl.ops.triton.kernels_gradient import gradient_kernel
from hf_infcl.ops.triton.kernels_statistics import merge_kernel, statistics_kernel
from hf_infcl.ops.triton.kernels_weights import weights_kernel
from hf_infcl.ops.triton.launch import Tiles, launch, operand
from hf_infcl.ops.triton.products import gain, matmul
from hf_infcl.ops.triton.softmax import exact

LARGEST = 8192
# Up to here G is kept in float32 beside half-precision embeddings, and multiplied as the sum of two such numbers.
# Rounded to bfloat16 its errors may all point one way (n equal rows), and a small sum has too few to forgive one.
_LARGEST_SPLIT = 2048
# Beyond this the vendor's products are faster by more than their further launches cost (0.18 ms against 0.25 on an
# H200 at 8,192 pairs of 512).
_LARGEST_FUSED = 4096
_MERGE_ROWS, _MERGE_STEP = 32, 16
_RUN = 128


def suits(n: int, block_size: int | None) -> bool:
    """Whether a batch of n pairs goes this way."""
    return n <= (LARGEST if block_size is None else min(LARGEST, block_size))


def _tile(n: int, dtype: torch.dtype, precision: str, device: torch.device) -> TileConfig:
    if device.type != "cuda":
        return interpreted(n)
    if dtype == torch.float32:
        return TileConfig(64, 64, 32, 4, 3 if precision == "tf32" else 2, copy_engine=False)
    # Small tiles keep all multiprocessors busy; large ones read less.
    return TileConfig(128, 128, 64, 4, 3) if n > 2048 else TileConfig(64, 64, 64, 4, 3, copy_engine=False)


def _tiles(images: Tensor, texts: Tensor, ids: Tensor | None, rule: Rule, precision: str) -> Tiles:
    chosen = _tile(len(images), images.dtype, precision, images.device)
    return Tiles.of("whole", Side(images, 0, ids), Side(texts, 0, ids), rule, precision, chosen)


def softmax_forward(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    rule: Rule,
    precision: str,
    for_rows: bool,
    for_cols: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the statistics of rows and columns ((0,) where not wanted)."""
    tiles = _tiles(images, texts, ids, rule, precision)
    n, device = len(images), images.device
    many, smooth = tiles.has_ids and rule.duplicates == "positive", rule.label_smoothing > 0
    fields, planes, blocks = 6 if smooth else 4, 2 + 2 * many + 2 * smooth, -(-n // _MERGE_ROWS)
    sides = for_rows + for_cols
    rows, cols = (torch.empty((fields, n) if wanted else (0,), device=device) for wanted in (for_rows, for_cols))
    row_size = planes * tiles.tiles_n * n if for_rows else 0
    parts = torch.empty(row_size + (planes * tiles.tiles_m * n if for_cols else 0), device=device)
    losses = torch.empty(blocks * sides, device=device)
    running = rows if for_rows else None, cols if for_cols else None, n, n
    row_parts, col_parts = parts[:row_size], parts[row_size:]
    tiles.launch(
        statistics_kernel,
        (scale, *running, row_parts, col_parts, None),
        (for_rows, for_cols, many, smooth, True, False, True),
    )
    launch(
        merge_kernel,
        device,
        blocks * sides,
        (
            row_parts, col_parts, *running, n, n, tiles.tiles_m, tiles.tiles_n, blocks if for_rows else 0, scale,
            losses, 1.0 / (sides * n), float(rule.label_smoothing),
        ),
        (for_rows, for_cols, many, smooth, True, True, _MERGE_ROWS, _MERGE_STEP),
        warps=4,
        stages=1,
    )  # fmt: skip
    return losses.sum(), rows, cols


def softmax_gradients(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    rule: Rule,
    precision: str,
    rows: Tensor | None,
    cols: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of images, texts and scale in float32, None where not needed."""
    tiles = _tiles(images, texts, ids, rule, precision)
    n, dtype, device = len(images), images.dtype, images.device
    # Where dX is not computed, the scale's gradient comes from the tiles of G.
    from_tiles = needs[2] and not needs[0]
    split = dtype != torch.float32 and n <= _LARGEST_SPLIT
    width = -(-n // 16) * 16  # rows of G start on 16-byte boundaries, and are read up to there
    g = torch.empty(n, width, device=device, dtype=torch.float32 if split else dtype)
    if width > n:
        g[:, n:].zero_()
    sums = torch.empty(tiles.tiles_m * tiles.tiles_n, device=device) if from_tiles else None
    wanted = rows is not None, cols is not None
    factor = gain(dtype)
    many = tiles.has_ids and rule.duplicates == "positive"
    tiles.launch(
        weights_kernel,
        (scale, rows, cols, n, n, tiles.weights(g[:, :n]), width, sums, None, float(rule.label_smoothing), factor),
        (*wanted, many, rule.label_smoothing > 0, exact(precision, dtype), from_tiles, False, False),
    )
    share = 1.0 / (sum(wanted) * n * factor)
    if dtype != torch.float32 and n > _LARGEST_FUSED:
        d_x, d_y, sum_gu = _products(g[:, :n], images, texts, scale, share, needs)
    else:
        d_x, d_y, sum_gu = _fused_products(tiles.config, g, images, texts, scale, share, needs, split, precision)
    return d_x, d_y, sums.sum() * share if sums is not None else sum_gu


def _products(
    g: Tensor, images: Tensor, texts: Tensor, scale: Tensor, share: float, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Both gradients, and the scale's where that of the images is made, by the vendor's products."""
    factor = scale * share
    d_x = d_y = sum_gu = None
    if needs[0]:
        d_x = matmul(g, texts, "ieee")
        sum_gu = (images * d_x).sum() * share if needs[2] else None
        d_x.mul_(factor)
    if needs[1]:
        d_y = matmul(g.T, images, "ieee").mul_(factor)
    return d_x, d_y, sum_gu


def _fused_products(
    c: TileConfig,
    g: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    share: float,
    needs: tuple[bool, bool, bool],
    split: bool,
    precision: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same in one launch."""
    need_x, need_y, need_scale = needs
    if not (need_x or need_y):
        return None, None, None
    (n, depth), dtype, device = images.shape, images.dtype, images.device
    block_d = 16 if depth <= 16 else 32 if depth <= 32 else 64 if depth <= 64 else c.block_n
    programs = -(-n // c.block_m) * -(-depth // block_d)
    sums = torch.empty(programs, device=device) if need_scale and need_x else None
    d_x = torch.empty(n, depth, device=device) if need_x else None
    d_y = torch.empty(n, depth, device=device) if need_y else None
    x, y = operand(images), operand(texts)
    if x.dtype == torch.float32:  # under the interpreter half-precision operands are widened
        split, g = False, g.float()
    launch(
        gradient_kernel,
        device,
        programs * (need_x + need_y),
        (g, x, y, d_x, d_y, g.stride(0), x.stride(0), y.stride(0), n, depth, scale, share, sums),
        (
            need_x, need_y, sums is not None, split, precision, _RUN if dtype == torch.float32 else 2**30,
            c.block_m, block_d, c.block_k,
        ),
        c.warps,
        c.stages,
    )  # fmt: skip
    return d_x, d_y, None if sums is None else sums.sum()
