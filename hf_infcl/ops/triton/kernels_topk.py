"""The best k of every row, selected while the logits tiles are still on chip.

A program owns a strip of rows and walks over the columns. For k <= 64 the best k stay in registers, unsorted: while a
tile's best beats a row's worst, it takes its place. For larger k, see `kernels_topk_buffer`. The order is (score, then
lowest index) everywhere.

A NaN is kept as +inf, the one value that nothing beats.
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_common import may_match, meets_diagonal, own, product, same

# Global indices are kept in 32 bits; the last 2^16 of them stand for empty slots and "no limit".
NO_INDEX = tl.constexpr(2147483647)


if triton.knobs.runtime.interpret:

    @triton.jit
    def peak(u):
        """(M,) the best score of each row of a tile; NaN where one is."""
        best = tl.max(u, 1)
        return tl.where(tl.max((u != u).to(tl.int32), 1) > 0, float("nan"), best)

else:

    @triton.jit
    def _greater(a, b):
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def peak(u):
        """(M,) the best score of each row of a tile; NaN where one is: one instruction carries both."""
        return tl.reduce(u, 1, _greater)


@triton.jit
def candidates(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, highest, row0, col0,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """A tile of scores, -inf where a column is no candidate of a row; a NaN stays.

    Few tiles meet the diagonal or the ragged edge. Without a barrier under these `if`s the compiler would compute the
    masks of all tiles, half as many instructions as the rest of the search, and throw them away.

    highest: (BLOCK_M,) the highest score a row's candidate may have (CEILING).
    """
    u = product(
        x, y, x_stride, y_stride, n_rows, n_cols, depth, row0, col0, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA
    )
    rows = row0 + tl.arange(0, BLOCK_M)
    cols = col0 + tl.arange(0, BLOCK_N)
    if CEILING:
        u = tl.where((u > highest[:, None]) & (u < float("inf")), float("-inf"), u)
    if ID_COLUMNS > 0:
        if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
            u = tl.where(same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS), float("-inf"), u)
    if EXCLUDE_PAIRS:
        if meets_diagonal(row0, col0, shift, BLOCK_M, BLOCK_N):
            tl.debug_barrier()
            u = tl.where(own(rows, cols, shift), float("-inf"), u)
    if col0 + BLOCK_N > n_cols:
        tl.debug_barrier()
        u = tl.where((cols < n_cols)[None, :], u, float("-inf"))
    return u


@triton.jit
def _worst(s, i):
    """Score and index of the entry of each row that gives way: the lowest score, of equal ones the highest index."""
    score = tl.min(s, 1)
    return score, tl.max(tl.where(s == score[:, None], i, -1), 1)


@triton.jit
def _insert(u, at, best, s, i, worst, worst_index):
    """Takes a tile's scores in while they beat a row's worst entry.

    u: (M, N) scores; at: (M, N) or (1, N) their global indices; best: (M,) `peak` of every row of u.
    s, i: (M, K) the entries; worst, worst_index: (M,).
    """
    more = tl.min((best < worst).to(tl.int32), 0) == 0
    while more:
        best = tl.where(best == best, best, float("inf"))
        # Neither below nor above: the best, or NaN.
        first = tl.min(tl.where((u < best[:, None]) | (u > best[:, None]), NO_INDEX, at), 1)
        better = ((best > worst) | ((best == worst) & (first < worst_index))) & (best > float("-inf"))
        place = better[:, None] & (s == worst[:, None]) & (i == worst_index[:, None])
        s = tl.where(place, best[:, None], s)
        i = tl.where(place, first[:, None], i)
        u = tl.where(better[:, None] & (at == first[:, None]), float("-inf"), u)
        worst = tl.min(s, 1)
        worst_index = tl.max(tl.where(s == worst[:, None], i, -1), 1)
        best = peak(u)
        more = tl.max((better & ((best < worst) == 0)).to(tl.int32), 0) > 0
    return s, i, worst, worst_index


@triton.jit
def _load_entries(
    scores, indices, stride, rows, n_rows, k, LOAD: tl.constexpr, BLOCK_M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The entries kept so far. Empty slots are worse than any candidate, those beyond k are never the worst."""
    slots = tl.arange(0, K)
    empty = tl.broadcast_to((-slots + NO_INDEX)[None, :], (BLOCK_M, K))
    s = tl.full((BLOCK_M, K), float("-inf"), tl.float32)
    i = empty
    if LOAD:
        at = rows.to(tl.int64)[:, None] * stride + slots[None, :]
        mask = (rows < n_rows)[:, None] & (slots < k)[None, :]
        s = tl.load(scores + at, mask=mask, other=float("-inf"))
        index = tl.load(indices + at, mask=mask, other=-1)
        i = tl.where(index < 0, empty, index.to(tl.int32))
    s = tl.where((slots < k)[None, :], s, float("inf"))
    i = tl.where((slots < k)[None, :], i, -1)
    return s, i


@triton.jit
def _store_entries(scores, indices, stride, rows, n_rows, k, s, i, K: tl.constexpr):
    slots = tl.arange(0, K)
    at = rows.to(tl.int64)[:, None] * stride + slots[None, :]
    mask = (rows < n_rows)[:, None] & (slots < k)[None, :]
    is_empty = i > NO_INDEX - K
    tl.store(scores + at, tl.where(is_empty, float("-inf"), s), mask=mask)
    tl.store(indices + at, tl.where(is_empty, -1, i).to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift", "offset", "segment"])
def topk_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, ceiling,
    scores, indices, stride, offset, k, segment, wanted, skipped,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr, LOAD: tl.constexpr,
    SOME: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Best k of the columns of a segment. Grid: strips of rows, segments of columns.

    scores, indices: (n, segments * k), row stride `stride`; read first where LOAD (one segment).
    wanted: (n,) int32, 0 for rows to which nothing is offered (SOME).
    skipped: (strips * segments,) int32, how many (row, tile) pairs were skipped.
    """
    strip, part = tl.program_id(0), tl.program_id(1)
    row0 = strip * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    end = tl.minimum((part + 1) * segment, n_cols)
    if SOME:
        is_wanted = tl.load(wanted + rows, mask=rows < n_rows, other=0) != 0
        end = tl.where(tl.max(is_wanted.to(tl.int32), 0) > 0, end, 0)
    scores += part * k
    indices += part * k
    s, i = _load_entries(scores, indices, stride, rows, n_rows, k, LOAD, BLOCK_M, K)
    worst, worst_index = _worst(s, i)
    highest = worst
    if CEILING:
        highest = tl.load(ceiling + rows, mask=rows < n_rows, other=0.0)
    skips = tl.zeros((BLOCK_M,), tl.int32)
    for col0 in range(part * segment, end, BLOCK_N):
        u = candidates(
            x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, highest, row0, col0,
            ID_COLUMNS, EXCLUDE_PAIRS, CEILING, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA,
        )  # fmt: skip
        if SOME:
            u = tl.where(is_wanted[:, None], u, float("-inf"))
        best = peak(u)
        skips += (best < worst).to(tl.int32)
        at = (offset + col0 + tl.arange(0, BLOCK_N))[None, :]
        s, i, worst, worst_index = _insert(u, at, best, s, i, worst, worst_index)
    _store_entries(scores, indices, stride, rows, n_rows, k, s, i, K)
    if not SOME:
        tl.store(skipped + strip * tl.num_programs(1) + part, tl.sum(tl.where(rows < n_rows, skips, 0)))


@triton.jit(do_not_specialize=["n_rows", "width"])
def merge_kernel(
    more_scores, more_indices, width, scores, indices, n_rows, k,
    LOAD: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes (n, width) scores with their indices (-1 for none) into the (n, k) best."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, i = _load_entries(scores, indices, k, rows, n_rows, k, LOAD, BLOCK_M, K)
    worst, worst_index = _worst(s, i)
    for start in range(0, width, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        at = rows.to(tl.int64)[:, None] * width + cols[None, :]
        mask = (rows < n_rows)[:, None] & (cols < width)[None, :]
        u = tl.load(more_scores + at, mask=mask, other=float("-inf"))
        index = tl.load(more_indices + at, mask=mask, other=-1).to(tl.int32)
        s, i, worst, worst_index = _insert(u, index, peak(u), s, i, worst, worst_index)
    _store_entries(scores, indices, k, rows, n_rows, k, s, i, K)


@triton.jit(do_not_specialize=["n_source", "depth"])
def link_kernel(
    out, out_stride, source, source_stride, n_source, depth, factor,
    weights, indices, k, starts, sources, shares,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out_i += factor (sum_t weights_it source[indices_it] + sum of shares_e source[sources_e] over entries of row i).

    weights, indices: (n, k). starts: (n + 1,) where the entries of each row of `out` start. Grid: rows, parts of depth.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_d = (d < depth)[None, :]
    total = tl.zeros((BLOCK_D,), tl.float32)
    if GATHER:
        for start in range(0, k, STEP):
            t = start + tl.arange(0, STEP)
            j = tl.load(indices + row * k + t, mask=t < k, other=-1)
            inside = (j >= 0) & (j < n_source)
            w = tl.load(weights + row * k + t, mask=inside, other=0.0)
            v = tl.load(source + j[:, None] * source_stride + d[None, :], mask=inside[:, None] & inside_d, other=0.0)
            total += tl.sum(w[:, None] * v.to(tl.float32), 0)
    if SCATTER:
        first, last = tl.load(starts + row), tl.load(starts + row + 1)
        for start in range(first, last, STEP):
            e = start + tl.arange(0, STEP)
            j = tl.load(sources + e, mask=e < last, other=0).to(tl.int64)
            w = tl.load(shares + e, mask=e < last, other=0.0)
            mask = (e < last)[:, None] & inside_d
            v = tl.load(source + j[:, None] * source_stride + d[None, :], mask=mask, other=0.0)
            total += tl.sum(w[:, None] * v.to(tl.float32), 0)
    at = out + row * out_stride + d
    before = tl.load(at, mask=d < depth, other=0.0).to(tl.float32)
    tl.store(at, (before + tl.load(factor) * total).to(out.dtype.element_ty), mask=d < depth)
