"""The best k of every row for a k beyond the registers: buffers in memory, and thresholds.

What beats a row's k-th best so far is appended to the row's buffer, and when a buffer of the strip is full the program
cuts all of them back to their best k. An entry is one 64-bit key in the order of (score, lower index), so that no two
are equal.
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_keys import (
    HIGHEST_KEY,
    LOWEST_KEY,
    below,
    index_of,
    key_of,
    kth_key,
    ones,
    places,
    scatter,
    score_of,
)
from hf_infcl.ops.triton.kernels_topk import candidates


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
    better = u >= score_of(cut)[:, None, None]
    key = key_of(u, at)
    better = better & (key > cut[:, None, None])
    bit = (1 << tl.arange(0, bits))[None, None, :]
    chosen = tl.sum(tl.where(better, bit, 0), 2)
    each = ones(chosen)
    earlier = tl.sum(tl.where((word[:, None] < word[None, :])[None, :, :], each[:, :, None], 0), 1)
    place = (count[:, None] + earlier)[:, :, None] + ones(chosen[:, :, None] & (bit - 1))
    scatter(keys + (base[:, None, None] + place), key, better)
    return count + tl.sum(each, 1)


@triton.jit
def _keep_best(keys, base, count, cut, k, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Keeps the best k of each row's buffer, which starts at `base`, in place. Rows with fewer keep all.

    Returns the new counts, and the keys that what belongs to the best k must beat.
    """
    tl.debug_barrier()  # what other threads of this program have stored is read below
    longest = tl.max(count, 0)
    low = kth_key(keys, base, count, longest, k, WIDTH, BLOCK_M)
    kept = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, longest, 32):
        at = (start + tl.arange(0, 32))[None, :]
        mask = at < count[:, None]
        key = tl.load(keys + base[:, None] + at, mask=mask, other=LOWEST_KEY)
        keep = mask & (key >= low[:, None])
        place, chosen = places(keep)
        tl.debug_barrier()  # all of this part is read before its room is written to
        tl.store(keys + (base + kept)[:, None] + place, key, mask=keep)
        kept += chosen
    tl.debug_barrier()
    return kept, tl.where(count >= k, low, cut)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift", "offset", "k"])
def topk_buffer_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, ceiling,
    scores, indices, offset, k, wanted, skipped, keys, capacity,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr, SOME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Best k of all columns, for a k beyond the registers. Grid: strips of rows.

    scores, indices: (n, k), read and written. keys: (strips * BLOCK_M, capacity) int64, the buffers, with room for k
    entries and one tile's.
    wanted: (n,) int32, 0 for rows that are left as they are (SOME).
    """
    strip = tl.program_id(0)
    row0 = strip * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    base = rows * capacity
    count = tl.zeros((BLOCK_M,), tl.int32)
    is_wanted = rows < n_rows
    last_col = n_cols + BLOCK_N
    if SOME:
        is_wanted = tl.load(wanted + rows, mask=rows < n_rows, other=0) != 0
        last_col = tl.where(tl.max(is_wanted.to(tl.int32), 0) > 0, last_col, 0)
    cut = tl.where(is_wanted, below(tl.full((BLOCK_M,), float("-inf"), tl.float32)), HIGHEST_KEY)
    for start in range(0, tl.where(last_col > 0, k, 0), 32):
        at = start + tl.arange(0, 32)
        mask = is_wanted[:, None] & (at < k)[None, :]
        place = rows.to(tl.int64)[:, None] * k + at[None, :]
        s = tl.load(scores + place, mask=mask, other=float("-inf"))
        index = tl.load(indices + place, mask=mask, other=-1).to(tl.int32)
        keep = index >= 0
        place, more = places(keep)
        tl.store(keys + (base + count)[:, None] + place, key_of(s, index), mask=keep)
        count += more
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
            best = tl.max(u, 1)
            least = score_of(cut)
            skips += (best < least).to(tl.int32)
            if tl.max((best >= least).to(tl.int32), 0) > 0:
                count = _append(u, offset + col0, cut, keys, base, count)
        if (tl.max(count, 0) > capacity - BLOCK_N) | (col0 >= n_cols):
            count, cut = _keep_best(keys, base, count, cut, k, WIDTH, BLOCK_M)
    for start in range(0, tl.where(last_col > 0, k, 0), WIDTH):
        at = start + tl.arange(0, WIDTH)
        held = at[None, :] < count[:, None]
        key = tl.load(keys + base[:, None] + at[None, :], mask=held, other=0)
        mask = is_wanted[:, None] & (at < k)[None, :]
        place = rows.to(tl.int64)[:, None] * k + at[None, :]
        tl.store(scores + place, tl.where(held, score_of(key), float("-inf")), mask=mask)
        tl.store(indices + place, tl.where(held, index_of(key), -1), mask=mask)
    if not SOME:
        tl.store(skipped + strip, tl.sum(tl.where(rows < n_rows, skips, 0)))
