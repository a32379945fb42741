"""The best k of every row given a bound that more than k of them reach, in two launches.

The first keeps what reaches its row's bound, each thread writing what it holds: a product, a comparison an element, and
no thread that waits for another. The second finds the best k among that.
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_keys import LOWEST_KEY, index_of, key_of, kth_key, places, scatter, score_of
from hf_infcl.ops.triton.kernels_topk import candidates

# Columns of a tile that are this far apart share a lane of their row. A product's tile on a multiprocessor is spread
# over its threads in just this way, so that a lane's entries come from one thread, which counts them alone.
LANES = tl.constexpr(8)


@triton.jit
def _append(u, at, bound, to, count):
    """Appends what reaches its row's bound to the row's lanes; a NaN does. Returns the new counts.

    u: (M, A, LANES) scores; at: (LANES,) indices of the first LANES columns; bound: (M,).
    to, count: (M, LANES) where each lane starts, and how many entries it has.
    """
    if u.shape[1] > 1:
        half: tl.constexpr = u.shape[1] // 2
        u = tl.reshape(u, (u.shape[0], 2, half, u.shape[2]))
        left, right = tl.split(tl.permute(u, (0, 2, 3, 1)))
        count = _append(left, at, bound, to, count)
        count = _append(right, at + half * u.shape[3], bound, to, count)
    else:
        s = tl.reshape(u, (u.shape[0], u.shape[2]))
        reaches = (s < bound[:, None]) == 0
        entry = (s.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at[None, :].to(tl.int64)
        scatter(to + count, entry, reaches)
        count += reaches.to(tl.int32)
    return count


@triton.jit(do_not_specialize=["n_rows", "n_cols", "depth", "shift", "offset", "segment", "room"])
def filter_kernel(
    x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, ceiling,
    bounds, entries, length, room, counts, offset, segment, skipped,
    ID_COLUMNS: tl.constexpr, EXCLUDE_PAIRS: tl.constexpr, CEILING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Keeps the candidates that reach their row's bound. Grid: strips of rows, segments of columns.

    bounds: (n,) float32; to a row of -inf nothing is offered.
    entries: (strips * BLOCK_M, length) int64: of every row segments * LANES lanes of room entries, and more.
    counts: (strips * BLOCK_M, segments * LANES) int32, entries of a lane; room + 1 where it may have lost some.
    skipped: (strips * segments,) int32, how many (row, tile) pairs had none.
    """
    strip, part = tl.program_id(0), tl.program_id(1)
    most: tl.constexpr = BLOCK_N // LANES  # of a tile, in one lane
    row0 = strip * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    lanes = part * LANES + tl.arange(0, LANES)[None, :]
    to = entries + rows.to(tl.int64)[:, None] * length + lanes * room
    bound = tl.load(bounds + rows, mask=rows < n_rows, other=float("-inf"))
    # Of such a row, and of those beyond the last that fill up a strip, only NaN passes; nobody reads it.
    bound = tl.where(bound == float("-inf"), float("inf"), bound)
    highest = bound
    if CEILING:
        highest = tl.load(ceiling + rows, mask=rows < n_rows, other=0.0)
    count = tl.zeros((BLOCK_M, LANES), tl.int32)
    longest = tl.zeros((BLOCK_M, LANES), tl.int32)
    skips = tl.zeros((BLOCK_M,), tl.int32)
    for col0 in range(part * segment, tl.minimum((part + 1) * segment, n_cols), BLOCK_N):
        u = candidates(
            x, y, x_stride, y_stride, n_rows, n_cols, depth, shift, x_ids, y_ids, highest, row0, col0,
            ID_COLUMNS, EXCLUDE_PAIRS, CEILING, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, USE_TMA,
        )  # fmt: skip
        # A lane without room for a tile's worth goes on over its last entries, and is known to have lost some.
        longest = tl.maximum(longest, count)
        count = tl.minimum(count, room - most)
        before = count
        at = offset + col0 + tl.arange(0, LANES)
        count = _append(tl.reshape(u, (BLOCK_M, most, LANES)), at, bound, to, count)
        skips += (tl.max(count - before, 1) == 0).to(tl.int32)
    count = tl.where(longest > room - most, room + 1, count)
    tl.store(counts + rows[:, None] * (tl.num_programs(1) * LANES) + lanes, count)
    tl.store(skipped + strip * tl.num_programs(1) + part, tl.sum(tl.where(rows < n_rows, skips, 0)))


@triton.jit(do_not_specialize=["n_rows", "n_lanes", "k", "room"])
def select_kernel(
    entries, length, room, counts, n_lanes, bounds, scores, indices, n_rows, k, left,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Takes the entries that `filter_kernel` kept into the best k. Grid: rows by BLOCK_M.

    entries: (rows, length), length = n_lanes * room + k; made into keys here, with those of the best so far behind.
    scores, indices: (n, k), read and written.
    left: (n,) int32, set to 1 for a row of which fewer than k are known to reach the bound, and that is left as it is.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = (rows < n_rows)[:, None]
    base = rows.to(tl.int64) * length
    bound = tl.load(bounds + rows, mask=rows < n_rows, other=float("-inf"))
    reached = tl.zeros((BLOCK_M, WIDTH), tl.int32)
    lost = tl.zeros((BLOCK_M, WIDTH), tl.int32)
    for start in range(0, n_lanes * room, WIDTH):
        at = (start + tl.arange(0, WIDTH))[None, :]
        lane = at // room
        mask = there & (at < n_lanes * room)
        count = tl.load(counts + rows[:, None] * n_lanes + lane, mask=mask, other=0)
        held = mask & (at - lane * room < count)
        entry = tl.load(entries + base[:, None] + at, mask=held, other=0)
        s = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        key = key_of(tl.where(s == s, s, float("inf")), (entry & 0x7FFFFFFF).to(tl.int32))
        tl.store(entries + base[:, None] + at, tl.where(held, key, LOWEST_KEY), mask=mask)
        reached += held.to(tl.int32)
        lost += (count > room).to(tl.int32)
    for start in range(0, k, WIDTH):
        at = (start + tl.arange(0, WIDTH))[None, :]
        mask = there & (at < k)
        place = rows.to(tl.int64)[:, None] * k + at
        s = tl.load(scores + place, mask=mask, other=float("-inf"))
        index = tl.load(indices + place, mask=mask, other=-1).to(tl.int32)
        held = index >= 0
        tl.store(entries + base[:, None] + n_lanes * room + at, tl.where(held, key_of(s, index), LOWEST_KEY), mask=mask)
        reached += (held & (s >= bound[:, None])).to(tl.int32)
    done = (tl.sum(reached, 1) >= k) & (tl.max(lost, 1) == 0) & (bound > float("-inf"))
    tl.store(left + rows, (done == 0).to(tl.int32), mask=rows < n_rows)
    tl.debug_barrier()  # what other threads of this program have stored is read below
    total = n_lanes * room + k
    low = kth_key(entries, base, tl.where(done, total, 0), total, k, WIDTH, BLOCK_M)
    kept = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, total, 32):
        at = (start + tl.arange(0, 32))[None, :]
        key = tl.load(entries + base[:, None] + at, mask=done[:, None] & (at < total), other=LOWEST_KEY)
        keep = key >= tl.maximum(low, LOWEST_KEY + 1)[:, None]
        place, chosen = places(keep)
        place = rows.to(tl.int64)[:, None] * k + kept[:, None] + place
        tl.store(scores + place, score_of(key), mask=keep)
        tl.store(indices + place, index_of(key), mask=keep)
        kept += chosen
