"""The best k of every row, selected while the logits tiles are still on chip.

A program owns a strip of rows and walks over the columns. For k <= 64 the best k stay in registers, unsorted: while a
tile's best beats a row's worst, it takes its place. For larger k what beats the row's k-th best is appended to a
buffer, and when that is full the program keeps its best k. The order is (score, then lowest index) everywhere.

A NaN is kept as +inf, the one value that nothing beats.
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_common import may_match, meets_diagonal, own, product, same

# Global indices are kept in 32 bits; the last 2^16 of them stand for empty slots and "no limit".
NO_INDEX = tl.constexpr(2147483647)
LOWEST_KEY = tl.constexpr(-2147483648)


@triton.jit
def _candidates(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, highest, row0, col0,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """A tile of scores, -inf where a column is no candidate of a row.

    highest: (BLOCK_M,) the highest score a row's candidate may have (CEILING).
    """
    u = product(
        x, y, x_stride, y_stride, n_rows, n_cols, depth, row0, col0, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA
    )
    rows = row0 + tl.arange(0, BLOCK_M)
    cols = col0 + tl.arange(0, BLOCK_N)
    u = tl.where(u == u, u, float("inf"))
    if CEILING:
        u = tl.where((u > highest[:, None]) & (u < float("inf")), float("-inf"), u)
    if ID_COLUMNS > 0:
        if may_match(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS):
            u = tl.where(same(x_ids, y_ids, rows, cols, n_rows, n_cols, ID_COLUMNS), float("-inf"), u)
    if EXCLUDE_PAIRS:
        if meets_diagonal(row0, col0, shift, BLOCK_M, BLOCK_N):
            u = tl.where(own(rows, cols, shift), float("-inf"), u)
    if col0 + BLOCK_N > n_cols:
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

    u: (M, N) scores; at: (M, N) or (1, N) their global indices; best: (M,) maximum of every row of u.
    s, i: (M, K) the entries; worst, worst_index: (M,).
    """
    more = tl.max((best >= worst).to(tl.int32), 0) > 0
    while more:
        first = tl.min(tl.where(u == best[:, None], at, NO_INDEX), 1)
        better = ((best > worst) | ((best == worst) & (first < worst_index))) & (best > float("-inf"))
        place = better[:, None] & (s == worst[:, None]) & (i == worst_index[:, None])
        s = tl.where(place, best[:, None], s)
        i = tl.where(place, first[:, None], i)
        u = tl.where(better[:, None] & (at == first[:, None]), float("-inf"), u)
        worst = tl.min(s, 1)
        worst_index = tl.max(tl.where(s == worst[:, None], i, -1), 1)
        best = tl.max(u, 1)
        more = tl.max((better & (best >= worst)).to(tl.int32), 0) > 0
    return s, i, worst, worst_index


@triton.jit
def _load_entries(scores, indices, stride, rows, n_rows, k, LOAD: tl.constexpr, BLOCK_M: tl.constexpr, K: tl.constexpr):
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
    tl.store(scores + at, s, mask=mask)
    tl.store(indices + at, tl.where(s == float("-inf"), -1, i).to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift", "offset", "segment"])
def topk_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, ceiling,
    scores, indices, stride, offset, k, segment, skipped,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr, LOAD: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Best k of the columns of a segment. Grid: strips of rows, segments of columns.

    scores, indices: (n, segments * k), row stride `stride`; read first where LOAD (one segment).
    skipped: (strips * segments,) int32, how many (row, tile) pairs were skipped.
    """
    strip, part = tl.program_id(0), tl.program_id(1)
    row0 = strip * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    scores += part * k
    indices += part * k
    s, i = _load_entries(scores, indices, stride, rows, n_rows, k, LOAD, BLOCK_M, K)
    worst, worst_index = _worst(s, i)
    highest = worst
    if CEILING:
        highest = tl.load(ceiling + rows, mask=rows < n_rows, other=0.0)
    skips = tl.zeros((BLOCK_M,), tl.int32)
    for col0 in range(part * segment, tl.minimum((part + 1) * segment, n_cols), BLOCK_N):
        u = _candidates(
            x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, highest, row0, col0,
            ID_COLUMNS, EXCLUDE_PAIRS, CEILING, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA,
        )  # fmt: skip
        best = tl.max(u, 1)
        skips += (best < worst).to(tl.int32)
        at = (offset + col0 + tl.arange(0, BLOCK_N))[None, :]
        s, i, worst, worst_index = _insert(u, at, best, s, i, worst, worst_index)
    _store_entries(scores, indices, stride, rows, n_rows, k, s, i, K)
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
        s, i, worst, worst_index = _insert(u, index, tl.max(u, 1), s, i, worst, worst_index)
    _store_entries(scores, indices, k, rows, n_rows, k, s, i, K)


@triton.jit
def _key(s):
    """32-bit integers in the order of the numbers. -0.0 equals 0.0."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ones(words):
    """How many bits of 32-bit words are set; the compiler makes one instruction of it."""
    v = words.to(tl.uint32)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    return ((((v + (v >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _places(chosen):
    """The place of each chosen entry among its row's chosen ones, from 0 on, and how many each row has.

    A row's at most 32 entries are the bits of a word, which is a plain sum: on a tile whose threads' layout repeats
    along its rows, Triton 3.6's `tl.cumsum` gives wrong sums on the device.
    """
    bit = (1 << tl.arange(0, chosen.shape[1]))[None, :]
    words = tl.sum(tl.where(chosen, bit, 0), 1)
    return _ones(words[:, None] & (bit - 1)), _ones(words)


@triton.jit
def _append(u, col0, rows, n_rows, cut, cut_index, keys, indices, base, count):
    """Appends the scores of a tile that beat their row's cut to the row's buffer, and returns the new counts."""
    if u.shape[1] > 32:
        half: tl.constexpr = u.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(u, (u.shape[0], 2, half)), (0, 2, 1)))
        count = _append(left, col0, rows, n_rows, cut, cut_index, keys, indices, base, count)
        return _append(right, col0 + half, rows, n_rows, cut, cut_index, keys, indices, base, count)
    else:
        key = _key(u)
        at = tl.broadcast_to((col0 + tl.arange(0, u.shape[1]))[None, :], u.shape)
        better = (key > cut[:, None]) | ((key == cut[:, None]) & (at < cut_index[:, None]))
        better = better & (u > float("-inf")) & (rows < n_rows)[:, None]
        places, more = _places(better)
        to = base[:, None] + count[:, None] + places
        tl.store(keys + to, key, mask=better)
        tl.store(indices + to, at, mask=better)
        return count + more


@triton.jit
def _keep_best(keys, indices, base, count, k, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Keeps the best k of each row's buffer, which starts at `base`, in place. Rows with fewer keep all.

    Returns the new counts, and the key and index of the k-th best: the lowest key and NO_INDEX for rows with fewer.
    """
    tl.debug_barrier()  # what other threads of this program have stored is read below
    longest = tl.max(count, 0)
    # The k-th best key is the largest that at least k entries reach: 32 halvings of the range of keys.
    low = tl.full((BLOCK_M,), LOWEST_KEY, tl.int32)
    high = tl.full((BLOCK_M,), NO_INDEX, tl.int32)
    for _ in range(32):
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        reached = tl.zeros((BLOCK_M,), tl.int32)
        for start in range(0, longest, WIDTH):
            at = (start + tl.arange(0, WIDTH))[None, :]
            mask = at < count[:, None]
            key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
            reached += tl.sum((mask & (key >= middle[:, None])).to(tl.int32), 1)
        low = tl.where(reached >= k, middle, low)
        high = tl.where(reached >= k, high, middle - 1)
    reached = tl.zeros((BLOCK_M,), tl.int32)
    above = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, longest, WIDTH):
        at = (start + tl.arange(0, WIDTH))[None, :]
        mask = at < count[:, None]
        key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
        reached += tl.sum((mask & (key >= low[:, None])).to(tl.int32), 1)
        above += tl.sum((mask & (key > low[:, None])).to(tl.int32), 1)
    is_full = count >= k
    # Of those that equal it, the lowest indices stay: the smallest limit that lets enough of them in.
    limit = tl.full((BLOCK_M,), NO_INDEX, tl.int32)
    if tl.max(tl.where(is_full, reached - k, 0), 0) > 0:
        low_index = tl.zeros((BLOCK_M,), tl.int32)
        for _ in range(31):
            middle = (low_index & limit) + ((low_index ^ limit) >> 1)
            within = above
            for start in range(0, longest, WIDTH):
                at = (start + tl.arange(0, WIDTH))[None, :]
                mask = at < count[:, None]
                key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
                index = tl.load(indices + base[:, None] + at, mask=mask, other=NO_INDEX)
                within += tl.sum((mask & (key == low[:, None]) & (index <= middle[:, None])).to(tl.int32), 1)
            limit = tl.where(within >= k, middle, limit)
            low_index = tl.where(within >= k, low_index, middle + 1)
    kept = tl.zeros((BLOCK_M,), tl.int32)
    cut_index = tl.full((BLOCK_M,), -1, tl.int32)
    for start in range(0, longest, WIDTH):
        at = (start + tl.arange(0, WIDTH))[None, :]
        mask = at < count[:, None]
        key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
        index = tl.load(indices + base[:, None] + at, mask=mask, other=NO_INDEX)
        tie = (key == low[:, None]) & (index <= limit[:, None])
        keep = mask & ((is_full == 0)[:, None] | (key > low[:, None]) | tie)
        places, more = _places(keep)
        to = base[:, None] + kept[:, None] + places
        tl.debug_barrier()  # all of this part is read before its room is written to
        tl.store(keys + to, key, mask=keep)
        tl.store(indices + to, index, mask=keep)
        kept += more
        cut_index = tl.maximum(cut_index, tl.max(tl.where(keep & tie, index, -1), 1))
    tl.debug_barrier()
    return kept, tl.where(is_full, low, LOWEST_KEY), tl.where(is_full, cut_index, NO_INDEX)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift", "offset"])
def topk_buffer_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, ceiling,
    scores, indices, offset, k, skipped, keys, key_indices,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr, LOAD: tl.constexpr,
    CAPACITY: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Best k of all columns, for a k beyond the registers. Grid: strips of rows.

    scores, indices: (n, k), read first where LOAD. keys, key_indices: (strips * BLOCK_M, CAPACITY) int32, the buffers,
    with room for k entries and one tile's.
    """
    strip = tl.program_id(0)
    row0 = strip * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    base = rows * CAPACITY
    count = tl.zeros((BLOCK_M,), tl.int32)
    cut = tl.full((BLOCK_M,), LOWEST_KEY, tl.int32)
    cut_index = tl.full((BLOCK_M,), NO_INDEX, tl.int32)
    if LOAD:
        for start in range(0, k, WIDTH):
            at = start + tl.arange(0, WIDTH)
            mask = (rows < n_rows)[:, None] & (at < k)[None, :]
            place = rows.to(tl.int64)[:, None] * k + at[None, :]
            s = tl.load(scores + place, mask=mask, other=float("-inf"))
            index = tl.load(indices + place, mask=mask, other=-1)
            keep = index >= 0
            places, more = _places(keep)
            to = base[:, None] + count[:, None] + places
            tl.store(keys + to, _key(s), mask=keep)
            tl.store(key_indices + to, index.to(tl.int32), mask=keep)
            count += more
    highest = tl.zeros((BLOCK_M,), tl.float32)
    if CEILING:
        highest = tl.load(ceiling + rows, mask=rows < n_rows, other=0.0)
    skips = tl.zeros((BLOCK_M,), tl.int32)
    # One round more than there are tiles: the last only cuts the buffer back.
    for col0 in range(0, n_cols + BLOCK_N, BLOCK_N):
        if col0 < n_cols:
            u = _candidates(
                x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, highest, row0, col0,
                ID_COLUMNS, EXCLUDE_PAIRS, CEILING, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA,
            )  # fmt: skip
            best = _key(tl.max(u, 1))
            skips += (best < cut).to(tl.int32)
            if tl.max((best >= cut).to(tl.int32), 0) > 0:
                count = _append(u, offset + col0, rows, n_rows, cut, cut_index, keys, key_indices, base, count)
        if (tl.max(count, 0) > CAPACITY - BLOCK_N) | (col0 >= n_cols):
            count, cut, cut_index = _keep_best(keys, key_indices, base, count, k, WIDTH, BLOCK_M)
    for start in range(0, k, WIDTH):
        at = start + tl.arange(0, WIDTH)
        held = at[None, :] < count[:, None]
        s = _number(tl.load(keys + base[:, None] + at[None, :], mask=held, other=0))
        index = tl.load(key_indices + base[:, None] + at[None, :], mask=held, other=-1)
        mask = (rows < n_rows)[:, None] & (at < k)[None, :]
        place = rows.to(tl.int64)[:, None] * k + at[None, :]
        tl.store(scores + place, tl.where(held, s, float("-inf")), mask=mask)
        tl.store(indices + place, index.to(tl.int64), mask=mask)
    tl.store(skipped + strip, tl.sum(tl.where(rows < n_rows, skips, 0)))


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
