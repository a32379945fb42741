"""Candidates as 64-bit keys in the order of (score, lower index), no two of which are equal; the k-th best of many.

A row's keys stand one after the other in memory. LOWEST_KEY stands where there is none.
"""

import triton
import triton.language as tl

from hf_infcl.ops.triton.kernels_topk import NO_INDEX

# Below every key, and above.
LOWEST_KEY = tl.constexpr(-(2**63))
HIGHEST_KEY = tl.constexpr(2**63 - 1)
# Stores 64-bit values from the threads that hold them. `tl.store` moves a tile, its addresses and its mask between
# threads first, for neighbours to write to neighbouring places, which a few entries of a buffer never are.
if triton.knobs.runtime.interpret:

    @triton.jit
    def scatter(to, value, mask):
        tl.store(to, value, mask=mask)

else:

    @triton.jit
    def scatter(to, value, mask):
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
def key_of(s, index):
    return (_in_order(s).to(tl.int64) << 32) | (-index + NO_INDEX).to(tl.int64)


@triton.jit
def score_of(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def index_of(key):
    return -(key & 0x7FFFFFFF) + NO_INDEX


@triton.jit
def below(s):
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
def ones(words):
    """How many bits of 32-bit words are set; the compiler makes one instruction of it."""
    v = words.to(tl.uint32)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    return ((((v + (v >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def places(chosen):
    """The place of each chosen entry among its row's chosen ones, from 0 on, and how many each row has.

    A row's at most 32 entries are the bits of a word, which is a plain sum: on a tile whose threads' layout repeats
    along its rows, Triton 3.6's `tl.cumsum` gives wrong sums on the device.
    """
    bit = (1 << tl.arange(0, chosen.shape[1]))[None, :]
    words = tl.sum(tl.where(chosen, bit, 0), 1)
    return ones(words[:, None] & (bit - 1)), ones(words)


@triton.jit
def kth_key(keys, base, length, longest, k, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """(M,) the least of the best k keys of each row; of a row that has fewer, a key that all of them reach.

    base, length: (M,) where each row's keys start, and how many there may be, `longest` at most.

    Reads what other threads have stored: a barrier comes before.
    """
    reached = tl.zeros((BLOCK_M, WIDTH), tl.int32)
    lowest = tl.full((BLOCK_M, WIDTH), HIGHEST_KEY, tl.int64)
    highest = tl.full((BLOCK_M, WIDTH), LOWEST_KEY, tl.int64)
    for start in range(0, longest, WIDTH):
        at = (start + tl.arange(0, WIDTH))[None, :]
        held = tl.load(keys + base[:, None] + at, mask=at < length[:, None], other=LOWEST_KEY)
        there = held > LOWEST_KEY
        reached += there.to(tl.int32)
        lowest = tl.where(there, tl.minimum(lowest, held), lowest)
        highest = tl.maximum(highest, held)
    # Quarters the range of keys until just k entries reach its lower end: about 8 passes over random scores, 32 at
    # most. What a pass costs is its loads, not its comparisons.
    n_reached = tl.sum(reached, 1)
    low = tl.where(n_reached >= k, tl.min(lowest, 1), LOWEST_KEY + 1)
    high = tl.where(n_reached >= k, tl.max(highest, 1), LOWEST_KEY + 1)
    more = tl.max(((low < high) & (n_reached > k)).to(tl.int32), 0) > 0
    while more:
        middle = _mean(low, high)
        lower, upper = _mean(low, middle - 1), _mean(middle, high)
        hits_lower = tl.zeros((BLOCK_M, WIDTH), tl.int32)
        hits_middle = tl.zeros((BLOCK_M, WIDTH), tl.int32)
        hits_upper = tl.zeros((BLOCK_M, WIDTH), tl.int32)
        for start in range(0, longest, WIDTH):
            at = (start + tl.arange(0, WIDTH))[None, :]
            held = tl.load(keys + base[:, None] + at, mask=at < length[:, None], other=LOWEST_KEY)
            hits_lower += (held >= lower[:, None]).to(tl.int32)
            hits_middle += (held >= middle[:, None]).to(tl.int32)
            hits_upper += (held >= upper[:, None]).to(tl.int32)
        low, high, n_reached = _narrow(low, high, n_reached, lower, tl.sum(hits_lower, 1), k)
        low, high, n_reached = _narrow(low, high, n_reached, middle, tl.sum(hits_middle, 1), k)
        low, high, n_reached = _narrow(low, high, n_reached, upper, tl.sum(hits_upper, 1), k)
        more = tl.max(((low < high) & (n_reached > k)).to(tl.int32), 0) > 0
    return low
