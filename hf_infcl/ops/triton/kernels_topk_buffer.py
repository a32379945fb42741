"""The best k of every row for a k beyond the registers: buffers in memory, and thresholds.

What beats a row's k-th best so far is appended to the row's buffer, and when a buffer of the strip is full the program
cuts all of them back to their best k. Scores are kept as integers in the same order.
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_topk import NO_INDEX, candidates, halves

LOWEST_KEY = tl.constexpr(-2147483648)
# So many scores of a tile are appended one by one before all at once takes fewer instructions.
FEW = tl.constexpr(16)


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
def _mean(low, high):
    """The mean of two keys, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _narrow(low, high, reached, point, above, k):
    """The range of keys in which the k-th best lies, once it is known that `above` entries reach a point of it."""
    within = (low < point) & (point <= high)
    enough = above >= k
    high = tl.where(within & (enough == 0), point - 1, high)
    low = tl.where(within & enough, point, low)
    return low, high, tl.where(within & enough, above, reached)


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
def _append(u, best, col0, rows, n_rows, cut, cut_index, keys, indices, base, count):
    """Appends the scores of a tile that beat their row's cut to the row's buffer, and returns the new counts.

    best: (M,) maximum of every row of u. While few do, each row's best that is left; then all that are left at once.
    """
    at = (col0 + tl.arange(0, u.shape[1]))[None, :]
    more = tl.max(((_key(best) >= cut) & (rows < n_rows)).to(tl.int32), 0) > 0
    steps = 0
    while more & (steps < FEW):
        key = _key(best)
        index = tl.min(tl.where(u == best[:, None], at, NO_INDEX), 1)
        better = (key > cut) | ((key == cut) & (index < cut_index))
        better = better & (best > float("-inf")) & (rows < n_rows)
        tl.store(keys + base + count, key, mask=better)
        tl.store(indices + base + count, index, mask=better)
        count += better.to(tl.int32)
        u = tl.where(at == index[:, None], float("-inf"), u)
        best = tl.max(u, 1)
        more = tl.max((better & (best > float("-inf")) & (_key(best) >= cut)).to(tl.int32), 0) > 0
        steps += 1
    if more:
        count = _append_many(u, col0, rows, n_rows, cut, cut_index, keys, indices, base, count)
    return count


@triton.jit
def _append_many(u, col0, rows, n_rows, cut, cut_index, keys, indices, base, count):
    """The same, for all of a tile's scores at once."""
    if u.shape[1] > 32:
        left, right = halves(u)
        count = _append_many(left, col0, rows, n_rows, cut, cut_index, keys, indices, base, count)
        return _append_many(right, col0 + u.shape[1] // 2, rows, n_rows, cut, cut_index, keys, indices, base, count)
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
def _keep_best(keys, indices, base, count, cut, cut_index, k, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Keeps the best k of each row's buffer, which starts at `base`, in place. Rows with fewer keep all.

    Returns the new counts, and the key and index that what belongs to the best k must beat.
    """
    tl.debug_barrier()  # what other threads of this program have stored is read below
    longest = tl.max(count, 0)
    is_full = count >= k
    lowest = tl.full((BLOCK_M, WIDTH), NO_INDEX, tl.int32)
    highest = tl.full((BLOCK_M, WIDTH), LOWEST_KEY, tl.int32)
    for start in range(0, longest, WIDTH):
        at = (start + tl.arange(0, WIDTH))[None, :]
        mask = at < count[:, None]
        key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
        lowest = tl.where(mask, tl.minimum(lowest, key), lowest)
        highest = tl.maximum(highest, key)
    # Quarters the range of keys until just k entries, or equal ones, reach its lower end: about 8 passes over random
    # scores, 16 at most. What a pass costs is its loads, not its comparisons.
    low = tl.where(is_full, tl.min(lowest, 1), LOWEST_KEY)
    high = tl.where(is_full, tl.max(highest, 1), LOWEST_KEY)
    reached = count
    more = tl.max(((low < high) & (reached > k)).to(tl.int32), 0) > 0
    while more:
        middle = _mean(low, high)
        lower, upper = _mean(low, middle - 1), _mean(middle, high)
        hits_lower = tl.zeros((BLOCK_M, WIDTH), tl.int32)
        hits_middle = tl.zeros((BLOCK_M, WIDTH), tl.int32)
        hits_upper = tl.zeros((BLOCK_M, WIDTH), tl.int32)
        for start in range(0, longest, WIDTH):
            at = (start + tl.arange(0, WIDTH))[None, :]
            mask = at < count[:, None]
            key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
            hits_lower += (mask & (key >= lower[:, None])).to(tl.int32)
            hits_middle += (mask & (key >= middle[:, None])).to(tl.int32)
            hits_upper += (mask & (key >= upper[:, None])).to(tl.int32)
        low, high, reached = _narrow(low, high, reached, lower, tl.sum(hits_lower, 1), k)
        low, high, reached = _narrow(low, high, reached, middle, tl.sum(hits_middle, 1), k)
        low, high, reached = _narrow(low, high, reached, upper, tl.sum(hits_upper, 1), k)
        more = tl.max(((low < high) & (reached > k)).to(tl.int32), 0) > 0
    # Of those that equal it, the lowest indices stay: the smallest limit that lets enough of them in.
    limit = tl.full((BLOCK_M,), NO_INDEX, tl.int32)
    if tl.max(tl.where(is_full, reached - k, 0), 0) > 0:
        low_index = tl.zeros((BLOCK_M,), tl.int32)
        for _ in range(31):
            middle = (low_index & limit) + ((low_index ^ limit) >> 1)
            hits = tl.zeros((BLOCK_M, WIDTH), tl.int32)
            for start in range(0, longest, WIDTH):
                at = (start + tl.arange(0, WIDTH))[None, :]
                mask = at < count[:, None]
                key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
                index = tl.load(indices + base[:, None] + at, mask=mask, other=NO_INDEX)
                within = (key > low[:, None]) | ((key == low[:, None]) & (index <= middle[:, None]))
                hits += (mask & within).to(tl.int32)
            enough = tl.sum(hits, 1) >= k
            limit = tl.where(enough, middle, limit)
            low_index = tl.where(enough, low_index, middle + 1)
    kept = tl.zeros((BLOCK_M,), tl.int32)
    last = tl.full((BLOCK_M,), -1, tl.int32)
    for start in range(0, longest, 32):
        at = (start + tl.arange(0, 32))[None, :]
        mask = at < count[:, None]
        key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
        index = tl.load(indices + base[:, None] + at, mask=mask, other=NO_INDEX)
        tie = (key == low[:, None]) & (index <= limit[:, None])
        keep = mask & ((key > low[:, None]) | tie)
        places, chosen = _places(keep)
        to = base[:, None] + kept[:, None] + places
        tl.debug_barrier()  # all of this part is read before its room is written to
        tl.store(keys + to, key, mask=keep)
        tl.store(indices + to, index, mask=keep)
        kept += chosen
        last = tl.maximum(last, tl.max(tl.where(keep & tie, index, -1), 1))
    tl.debug_barrier()
    return kept, tl.where(is_full, low, cut), tl.where(is_full, last, cut_index)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift", "offset", "k"])
def topk_buffer_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, ceiling,
    scores, indices, offset, k, skipped, bounds, keys, key_indices, capacity,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr, LOAD: tl.constexpr,
    BOUNDED: tl.constexpr, REDO: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Best k of all columns, for a k beyond the registers. Grid: strips of rows.

    scores, indices: (n, k), read first where LOAD. keys, key_indices: (strips * BLOCK_M, capacity) int32, the buffers,
    with room for k entries and one tile's.
    bounds: (n,) float32 (BOUNDED): candidates below are passed over. Where fewer than k reach it, a second launch
    (REDO) offers those below to the rows concerned, and to no others.
    """
    strip = tl.program_id(0)
    row0 = strip * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    base = rows * capacity
    count = tl.zeros((BLOCK_M,), tl.int32)
    cut = tl.full((BLOCK_M,), LOWEST_KEY, tl.int32)
    cut_index = tl.full((BLOCK_M,), NO_INDEX, tl.int32)
    bound = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if BOUNDED or REDO:
        bound = tl.load(bounds + rows, mask=rows < n_rows, other=float("-inf"))
    if BOUNDED:
        cut = _key(bound)
    reached = tl.zeros((BLOCK_M,), tl.int32)
    if LOAD:
        for start in range(0, k, 32):
            at = start + tl.arange(0, 32)
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
            reached += tl.sum((keep & (s >= bound[:, None])).to(tl.int32), 1)
    last_col = n_cols + BLOCK_N
    if REDO:
        lacks = (reached < k) & (bound > float("-inf"))
        bound = tl.where(lacks, bound, float("-inf"))
        last_col = tl.where(tl.max(lacks.to(tl.int32), 0) > 0, last_col, 0)
    highest = tl.zeros((BLOCK_M,), tl.float32)
    if CEILING:
        highest = tl.load(ceiling + rows, mask=rows < n_rows, other=0.0)
    skips = tl.zeros((BLOCK_M,), tl.int32)
    # One round more than there are tiles: the last only cuts the buffer back.
    for col0 in range(0, last_col, BLOCK_N):
        if col0 < n_cols:
            u = candidates(
                x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, highest, row0, col0,
                ID_COLUMNS, EXCLUDE_PAIRS, CEILING, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA,
            )  # fmt: skip
            if REDO:
                u = tl.where(u < bound[:, None], u, float("-inf"))
            best = tl.max(u, 1)
            skips += (_key(best) < cut).to(tl.int32)
            count = _append(u, best, offset + col0, rows, n_rows, cut, cut_index, keys, key_indices, base, count)
        if (tl.max(count, 0) > capacity - BLOCK_N) | (col0 >= n_cols):
            count, cut, cut_index = _keep_best(
                keys, key_indices, base, count, cut, cut_index, k, WIDTH, BLOCK_M
            )  # fmt: skip
    for start in range(0, tl.where(last_col > 0, k, 0), WIDTH):
        at = start + tl.arange(0, WIDTH)
        held = at[None, :] < count[:, None]
        s = _number(tl.load(keys + base[:, None] + at[None, :], mask=held, other=0))
        index = tl.load(key_indices + base[:, None] + at[None, :], mask=held, other=-1)
        mask = (rows < n_rows)[:, None] & (at < k)[None, :]
        place = rows.to(tl.int64)[:, None] * k + at[None, :]
        tl.store(scores + place, tl.where(held, s, float("-inf")), mask=mask)
        tl.store(indices + place, index.to(tl.int64), mask=mask)
    if not REDO:
        tl.store(skipped + strip, tl.sum(tl.where(rows < n_rows, skips, 0)))
