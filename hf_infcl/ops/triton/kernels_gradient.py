"""Both gradients of a small batch from its G in one launch, and what the backward pass makes of them in another."""

import triton
import triton.language as tl


@triton.jit
def _add_product(a, b, acc, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b. SPLIT: a in float32 times b in half precision, a as the sum of two numbers in b's dtype."""
    if SPLIT:
        high = a.to(b.dtype)
        acc = tl.dot(high, b, acc)
        acc = tl.dot((a - high.to(tl.float32)).to(b.dtype), b, acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _gradient_tile(
    tile, g, own, other, out, g_stride, own_stride, other_stride, n, depth, scale, share, sum_parts,
    TRANSPOSED: tl.constexpr, WANT_SUM: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of f G `other`, of f G' `other` if TRANSPOSED."""
    tiles_d = tl.cdiv(depth, BLOCK_N)
    factor = share * tl.load(scale).to(tl.float32)
    rows = (tile // tiles_d) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_depth = (tile % tiles_d) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_depth = (at_depth < depth)[None, :]
    there = (rows < n)[:, None] & in_depth
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, n, RUN):
        run = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(first, tl.minimum(first + RUN, n), BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            if TRANSPOSED:
                g_at = g + ks.to(tl.int64)[:, None] * g_stride + rows[None, :]
                a = tl.load(g_at, mask=(ks < n)[:, None] & (rows < g_stride)[None, :], other=0.0).T
            else:
                g_at = g + rows.to(tl.int64)[:, None] * g_stride + ks[None, :]
                a = tl.load(g_at, mask=(rows < n)[:, None] & (ks < g_stride)[None, :], other=0.0)
            other_at = other + ks.to(tl.int64)[:, None] * other_stride + at_depth[None, :]
            b = tl.load(other_at, mask=(ks < n)[:, None] & in_depth, other=0.0)
            run = _add_product(a, b, run, SPLIT, PRECISION)
        acc += run
    if WANT_SUM:
        mine = tl.load(own + rows.to(tl.int64)[:, None] * own_stride + at_depth[None, :], mask=there, other=0.0)
        tl.store(sum_parts + tile, tl.sum(mine.to(tl.float32) * acc) * share)
    tl.store(out + rows.to(tl.int64)[:, None] * depth + at_depth[None, :], acc * factor, mask=there)


@triton.jit(do_not_specialize=["n"])
def gradient_kernel(
    g, x, y, out_x, out_y, g_stride, x_stride, y_stride, n, depth, scale, share, sum_parts,
    FOR_X: tl.constexpr, FOR_Y: tl.constexpr, WANT_SUM: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dX = f G Y and dY = f G'X with f = s * share, in float32.

    g: (n, n), its rows g_stride apart and zero beyond column n. x, y: (n, depth) embeddings. out_x, out_y: (n, depth),
    contiguous. The first programs make dX, the others dY (FOR_X, FOR_Y: whether they are wanted).
    RUN: terms that are added up before their sum joins the others. One long chain of float32 additions would let the
    rounding errors of n equal rows, which all point one way, grow with n.
    sum_parts: (programs of dX,) float32, x_i . (G Y)_i summed over a tile, times share (WANT_SUM).
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(n, BLOCK_M) * tl.cdiv(depth, BLOCK_N)
    # A condition that mixed run time and compile time would have both branches compiled, also the one without memory.
    if FOR_X and FOR_Y:
        if program < tiles:
            _gradient_tile(
                program, g, x, y, out_x, g_stride, x_stride, y_stride, n, depth, scale, share, sum_parts,
                False, WANT_SUM, SPLIT, PRECISION, RUN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _gradient_tile(
                program - tiles, g, y, x, out_y, g_stride, y_stride, x_stride, n, depth, scale, share, sum_parts,
                True, False, SPLIT, PRECISION, RUN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    elif FOR_X:
        _gradient_tile(
            program, g, x, y, out_x, g_stride, x_stride, y_stride, n, depth, scale, share, sum_parts,
            False, WANT_SUM, SPLIT, PRECISION, RUN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        _gradient_tile(
            program, g, y, x, out_y, g_stride, y_stride, x_stride, n, depth, scale, share, sum_parts,
            True, False, SPLIT, PRECISION, RUN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def dot_kernel(a, b, parts, length, share, BLOCK: tl.constexpr):
    """parts: (programs,) float32, share times the sum of a b over BLOCK numbers each. a, b: (length,)."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < length
    product = tl.load(a + at, mask=there, other=0.0).to(tl.float32) * tl.load(b + at, mask=there, other=0.0)
    tl.store(parts + program, tl.sum(product) * share)


@triton.jit
def _multiply(values, factor, out, at, there):
    product = tl.load(values + at, mask=there, other=0.0) * factor
    tl.store(out + at, product.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["n_sums"])
def finish_kernel(
    d_x, d_y, sums, scale, share, grad, out_x, out_y, out_scale, length, n_sums,
    FOR_X: tl.constexpr, FOR_Y: tl.constexpr, WANT_SCALE: tl.constexpr, DUE: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Float32 gradients times the incoming one, and s share where that is DUE, rounded once to the outs' dtypes.

    d_x, d_y, out_x, out_y: (length,). The first programs make out_x, the others out_y. sums: (n_sums,) parts of the
    scale's gradient, which the first program adds up in their order.
    """
    program = tl.program_id(0)
    by = tl.load(grad).to(tl.float32)
    if WANT_SCALE:
        if program == 0:
            total = tl.zeros((STEP,), tl.float32)
            for start in range(0, n_sums, STEP):
                at = start + tl.arange(0, STEP)
                total += tl.load(sums + at, mask=at < n_sums, other=0.0)
            tl.store(out_scale, (tl.sum(total, 0) * by).to(out_scale.dtype.element_ty))
    if DUE:
        by *= tl.load(scale).to(tl.float32) * share
    blocks = tl.cdiv(length, BLOCK)
    block = program % blocks
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if FOR_X and FOR_Y:
        if program < blocks:
            _multiply(d_x, by, out_x, at, at < length)
        else:
            _multiply(d_y, by, out_y, at, at < length)
    elif FOR_X:
        _multiply(d_x, by, out_x, at, at < length)
    elif FOR_Y:
        _multiply(d_y, by, out_y, at, at < length)
