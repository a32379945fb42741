"""The best k of every row for a k beyond the registers: buffers in memory, and thresholds.

What beats a row's k-th best so far is appended to the row's buffer, and when a buffer of the strip is full the program
cuts all of them back to their best k. An entry is one 64-bit key in the order of (score, lower index), so that no two
are equal.
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_topk import NO_INDEX, candidates

# Below every key, and above.
LOWEST_KEY = tl.constexpr(-(2**63))
HIGHEST_KEY = tl.constexpr(2**63 - 1)
# Stores 64-bit values from the threads that hold them. `tl.store` moves a tile, its addresses and its mask between
# threads first, for neighbours to write to neighbouring places, which a few entries of a buffer never are.
if triton.knobs.runtime.interpret:

    @triton.jit
    def _scatter(to, value, mask):
        tl.store(to, value, mask=mask)

else:

    @triton.jit
    def _scatter(to, value, mask):
        tl.inline_asm_elementwise(
            "{ .reg .pred %p; setp.ne.s32 %p, $3, 0; @%p st.global.b64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l,r", [to.to(tl.int64), value, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _in_order(s):
    """32-bit integers in the order of the numbers. -0.0 equals 0.0."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(s, index):
    return (_in_order(s).to(tl.int64) << 32) | (-index + NO_INDEX).to(tl.int64)


@triton.jit
def _score(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index(key):
    return -(key & 0x7FFFFFFF) + NO_INDEX


@triton.jit
def _below(s):
    """A key that just the scores from s on beat; of -inf, which is no candidate's: those above."""
    return (_in_order(s).to(tl.int64) << 32) + tl.where(s == float("-inf"), NO_INDEX, -1)


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
def _append(u, col0, cut, keys, base, count):
    """Appends the scores of a tile that beat their row's cut to the row's buffer, and returns the new counts.

    In (M, words, bits): nothing of the tile moves from thread to thread.
    """
    bits: tl.constexpr = min(u.shape[1], 32)
    words: tl.constexpr = u.shape[1] // bits
    u = tl.reshape(u, (u.shape[0], words, bits))
    word = tl.arange(0, words)
    at = col0 + (word * bits)[None, :, None] + tl.arange(0, bits)[None, None, :]
    better = u >= _score(cut)[:, None, None]
    key = _key(u, at)
    better = better & (key > cut[:, None, None])
    bit = (1 << tl.arange(0, bits))[None, None, :]
    chosen = tl.sum(tl.where(better, bit, 0), 2)
    each = _ones(chosen)
    earlier = tl.sum(tl.where((word[:, None] < word[None, :])[None, :, :], each[:, :, None], 0), 1)
    place = (count[:, None] + earlier)[:, :, None] + _ones(chosen[:, :, None] & (bit - 1))
    _scatter(keys + (base[:, None, None] + place), key, better)
    return count + tl.sum(each, 1)


@triton.jit
def _keep_best(keys, base, count, cut, k, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Keeps the best k of each row's buffer, which starts at `base`, in place. Rows with fewer keep all.

    Returns the new counts, and the keys that what belongs to the best k must beat.
    """
    tl.debug_barrier()  # what other threads of this program have stored is read below
    longest = tl.max(count, 0)
    is_full = count >= k
    lowest = tl.full((BLOCK_M, WIDTH), HIGHEST_KEY, tl.int64)
    highest = tl.full((BLOCK_M, WIDTH), LOWEST_KEY, tl.int64)
    for start in range(0, longest, WIDTH):
        at = (start + tl.arange(0, WIDTH))[None, :]
        mask = at < count[:, None]
        key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
        lowest = tl.where(mask, tl.minimum(lowest, key), lowest)
        highest = tl.maximum(highest, key)
    # Quarters the range of keys until just k entries reach its lower end: about 8 passes over random scores, 32 at
    # most. What a pass costs is its loads, not its comparisons.
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
    kept = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, longest, 32):
        at = (start + tl.arange(0, 32))[None, :]
        mask = at < count[:, None]
        key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
        keep = mask & (key >= low[:, None])
        places, chosen = _places(keep)
        tl.debug_barrier()  # all of this part is read before its room is written to
        tl.store(keys + (base + kept)[:, None] + places, key, mask=keep)
        kept += chosen
    tl.debug_barrier()
    # Never below what it was: a row may hold k of earlier blocks that lie under its bound, and a second launch offers
    # all of this block's that do.
    return kept, tl.where(is_full, tl.maximum(low, cut), cut)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift", "offset", "k"])
def topk_buffer_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, ceiling,
    scores, indices, offset, k, skipped, bounds, keys, capacity,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr, LOAD: tl.constexpr,
    BOUNDED: tl.constexpr, REDO: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Best k of all columns, for a k beyond the registers. Grid: strips of rows.

    scores, indices: (n, k), read first where LOAD. keys: (strips * BLOCK_M, capacity) int64, the buffers, with room for
    k entries and one tile's.
    bounds: (n,) float32 (BOUNDED): candidates below are passed over. Where fewer than k reach it, a second launch
    (REDO) offers those below to the rows concerned, and to no others.
    """
    strip = tl.program_id(0)
    row0 = strip * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    base = rows * capacity
    count = tl.zeros((BLOCK_M,), tl.int32)
    bound = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if BOUNDED or REDO:
        bound = tl.load(bounds + rows, mask=rows < n_rows, other=float("-inf"))
    if BOUNDED:
        cut = _below(bound)
    else:
        cut = _below(tl.full((BLOCK_M,), float("-inf"), tl.float32))
    cut = tl.where(rows < n_rows, cut, HIGHEST_KEY)
    reached = tl.zeros((BLOCK_M,), tl.int32)
    if LOAD:
        for start in range(0, k, 32):
            at = start + tl.arange(0, 32)
            mask = (rows < n_rows)[:, None] & (at < k)[None, :]
            place = rows.to(tl.int64)[:, None] * k + at[None, :]
            s = tl.load(scores + place, mask=mask, other=float("-inf"))
            index = tl.load(indices + place, mask=mask, other=-1).to(tl.int32)
            keep = index >= 0
            places, more = _places(keep)
            tl.store(keys + (base + count)[:, None] + places, _key(s, index), mask=keep)
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
            u = tl.where(u == u, u, float("inf"))
            if REDO:
                u = tl.where(u < bound[:, None], u, float("-inf"))
            best = tl.max(u, 1)
            least = _score(cut)
            skips += (best < least).to(tl.int32)
            if tl.max((best >= least).to(tl.int32), 0) > 0:
                count = _append(u, offset + col0, cut, keys, base, count)
        if (tl.max(count, 0) > capacity - BLOCK_N) | (col0 >= n_cols):
            count, cut = _keep_best(keys, base, count, cut, k, WIDTH, BLOCK_M)
    for start in range(0, tl.where(last_col > 0, k, 0), WIDTH):
        at = start + tl.arange(0, WIDTH)
        held = at[None, :] < count[:, None]
        key = tl.load(keys + base[:, None] + at[None, :], mask=held, other=0)
        mask = (rows < n_rows)[:, None] & (at < k)[None, :]
        place = rows.to(tl.int64)[:, None] * k + at[None, :]
        tl.store(scores + place, tl.where(held, _score(key), float("-inf")), mask=mask)
        tl.store(indices + place, tl.where(held, _index(key), -1), mask=mask)
    if not REDO:
        tl.store(skipped + strip, tl.sum(tl.where(rows < n_rows, skips, 0)))
