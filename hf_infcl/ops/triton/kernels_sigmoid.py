"""SigLIP's two epilogues on the logits tile: -log sigmoid(z (s u + b)) and its derivative by s u + b."""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_common import (
    LN_2,
    LOG2_E,
    UNSPECIALIZED,
    exp2,
    inside,
    log2,
    meets_diagonal,
    own,
    product,
    relates,
    same,
    store_tile,
    tile_origin,
)

# Below this log2 of e = exp(s u + b), where nearly every tile of negatives lies (SigLIP starts at b = -10), the first
# terms of the series of log(1 + e) and of e / (1 + e) are exact in float32 and spare the second transcendental.
SMALL_LOG2 = tl.constexpr(-3.0)
# Beyond this 1 + 2^t is 2^t to float32.
LARGE_LOG2 = tl.constexpr(60.0)


@triton.jit
def _log1p_series(e):
    """log(1 + e), e < 1/8: seven terms."""
    tail = 0.25 - e * (0.2 - e * (0.1666666667 - e * 0.1428571429))
    return e * (1.0 - e * (0.5 - e * (0.3333333333 - e * tail)))


@triton.jit
def _sigmoid_series(e):
    """e / (1 + e), e < 1/8: (1 - e) (1 + e^2) (1 + e^4) e."""
    square = e * e
    return (e - square) * (1.0 + square) * (1.0 + square * square)


@triton.jit
def _softplus(t2):
    """log(1 + 2^t2), without overflow and without losing a small 2^t2 beside 1. The hardware's logarithm is exact to
    2^-22, which is little only beside values that are not small."""
    e = exp2(tl.minimum(t2, LARGE_LOG2))
    inner = tl.where(e < 0.125, _log1p_series(e), log2(1.0 + e) * LN_2)
    return inner + tl.maximum(t2 - LARGE_LOG2, 0.0) * LN_2 + (t2 - t2)


@triton.jit
def _tile_logits(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, s2, b2,
    row0, col0, rows, cols, diagonal,
    ID_COLUMNS: tl.constexpr, CELLS: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """The tile of u, and of -z (s u + b) log2(e): what softplus and sigmoid take."""
    u = product(
        x, y, x_stride, y_stride, n_rows, n_cols, depth, row0, col0, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA
    )
    t = tl.fma(u, s2, b2)
    # What does not count: so low that its softplus and its sigmoid are zero (-inf would be NaN in t - t).
    if (row0 + BLOCK_M > n_rows) | (col0 + BLOCK_N > n_cols):
        t = tl.where(inside(rows, cols, n_rows, n_cols), t, -1e30)
    if MASK:
        found = relates(
            related, related_stride, x_ids, y_ids, row0, col0, n_rows, n_cols, ID_COLUMNS, CELLS, BLOCK_M, BLOCK_N
        )
        if found > 0:
            others = same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS) & (own(rows, cols, shift) == 0)
            t = tl.where(others, -1e30, t)
    if diagonal:
        t = tl.where(own(rows, cols, shift) & inside(rows, cols, n_rows, n_cols), -t, t)
    return u, t


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sigmoid_loss_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, scale, bias,
    parts, n_programs,
    ID_COLUMNS: tl.constexpr, CELLS: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """parts: (tiles,) float32, the sum of -log sigmoid(z (s u + b)) over every tile."""
    tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    b2 = tl.load(bias).to(tl.float32) * LOG2_E
    for tile in range(tl.program_id(0), tiles, n_programs):
        row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
        rows = row0 + tl.arange(0, BLOCK_M)
        cols = col0 + tl.arange(0, BLOCK_N)
        diagonal = meets_diagonal(row0, col0, shift, BLOCK_M, BLOCK_N)
        _, t = _tile_logits(
            x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, s2, b2,
            row0, col0, rows, cols, diagonal,
            ID_COLUMNS, CELLS, MASK, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA,
        )  # fmt: skip
        if tl.max(t) < SMALL_LOG2:
            total = tl.sum(_log1p_series(exp2(t)))
        else:
            total = tl.sum(_softplus(t))
        tl.store(parts + tile, total)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sigmoid_weights_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, scale, bias,
    g, g_stride, parts, gain, n_programs,
    WANT_SUM: tl.constexpr, ID_COLUMNS: tl.constexpr, CELLS: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """G = -z sigmoid(-z (s u + b)), times `gain`, and the loss.

    parts: (3, tiles) float32, sums over every tile of -log sigmoid(z (s u + b)), of G and (WANT_SUM) of G u.
    """
    tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N)
    s2 = tl.load(scale).to(tl.float32) * LOG2_E
    b2 = tl.load(bias).to(tl.float32) * LOG2_E
    for tile in range(tl.program_id(0), tiles, n_programs):
        row0, col0 = tile_origin(tile, n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP)
        rows = row0 + tl.arange(0, BLOCK_M)
        cols = col0 + tl.arange(0, BLOCK_N)
        diagonal = meets_diagonal(row0, col0, shift, BLOCK_M, BLOCK_N)
        u, t = _tile_logits(
            x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, related, related_stride, s2, b2,
            row0, col0, rows, cols, diagonal,
            ID_COLUMNS, CELLS, MASK, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA,
        )  # fmt: skip
        if tl.max(t) < SMALL_LOG2:
            e = exp2(t)
            total = tl.sum(_log1p_series(e))
            w = _sigmoid_series(e)
        else:
            total = tl.sum(_softplus(t))
            w = 1.0 / (1.0 + exp2(-t))
        if diagonal:
            w = tl.where(own(rows, cols, shift), -w, w)
        tl.store(parts + tile, total)
        tl.store(parts + tiles + tile, gain * tl.sum(w))
        if WANT_SUM:
            tl.store(parts + 2 * tiles + tile, gain * tl.sum(w * u))
        store_tile(g, g_stride, w * gain, row0, col0, n_rows, n_cols, USE_TMA)
