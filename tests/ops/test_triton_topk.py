"""Triton's top-k sweep against the PyTorch one, in the interpreter (on a CPU) or on the GPU."""

import pytest
import torch

from hf_infcl.ops import Engine, Side, TopK
from hf_infcl.ops.dispatch import triton_installed
from hf_infcl.ops.topk import Links, block_link_gradient, block_topk

pytestmark = pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def integers(n, d=5, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (n, d), generator=g).to(DEVICE, dtype)


def search(backend, k, blocks, n_rows, directions=(True, True), ceilings=(None, None), block_size=None, pairs=True):
    """The best k of a side of rows and one of columns after a sequence of blocks of columns, best first."""
    rows = blocks[0][0]
    engine = Engine.of(rows.embeds, backend, "ieee", block_size)
    make = lambda n: TopK.empty(n, k, device=DEVICE, dtype=torch.float32)  # noqa: E731
    row_best = make(n_rows) if directions[0] else None
    found = []
    for rows, cols in blocks:
        col_best = make(len(cols)) if directions[1] else None
        block_topk(
            engine, rows, cols, row_best, col_best, exclude_pairs=pairs, row_ceiling=ceilings[0],
            col_ceiling=None if ceilings[1] is None else ceilings[1][: len(cols)],
        )  # fmt: skip
        if col_best is not None:
            found += col_best.in_order()
            assert 0 <= col_best.skip_ratio <= 1
    return (*(row_best.in_order() if row_best is not None else ()), *found)


def assert_same(k, blocks, n_rows, **options):
    for a, b in zip(
        search("triton", k, blocks, n_rows, **options), search("torch", k, blocks, n_rows, **options), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def sides(n, m, offset=0, ids=0, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(-(2**40), 2**40, (40,), generator=g).to(DEVICE)
    draw = lambda size: labels[torch.randint(0, 40, (size, 2), generator=g).to(DEVICE)] if ids else None  # noqa: E731
    return Side(integers(n, dtype=dtype, seed=seed), 0, draw(n)), Side(
        integers(m, dtype=dtype, seed=1), offset, draw(m)
    )


# In registers and in buffers; the buffer of k = 70 holds two tiles more.
KS = (1, 20, 70)


@pytest.mark.parametrize("k", KS)
def test_ties_pairs_and_ids(k):
    for n, m, offset, ids in ((20, 37, 0, 1), (7, 70, 5, 0), (1, 1, 0, 0)):
        rows, cols = sides(n, m, offset, ids)
        assert_same(k, [(rows, cols)], n, directions=(True, n != 7))


@pytest.mark.parametrize("k", KS)
def test_blocks_in_any_order(k):
    rows, cols = sides(8, 90, 0, 1)
    blocks = [(rows, cols[slice(30 * part, 30 * part + 30)]) for part in (1, 0, 2)]
    assert_same(k, blocks, 8, directions=(True, False))


def test_columns_in_segments(monkeypatch):
    from hf_infcl.ops.triton import topk

    monkeypatch.setattr(topk, "_TILES_PER_SEGMENT", 1)
    rows, cols = sides(8, 100, 0, 1)
    blocks = [(rows, cols[slice(50, 100)]), (rows, cols[slice(0, 50)])]
    assert_same(5, blocks, 8, directions=(True, False), block_size=16)


@pytest.mark.parametrize("k", [2, 70])
@pytest.mark.parametrize("kind", ["equal", "sorted", "hardest last", "nan"])
def test_hard_orders(k, kind):
    x, y = integers(8), integers(150, seed=1)
    if kind == "equal":
        y[:] = y[0]
    if kind in ("sorted", "hardest last"):
        x[:] = 1.0
        y = torch.linspace(-75, 74, 150, device=DEVICE).round()[:, None].expand(-1, 5).contiguous()
        if kind == "sorted":
            y = y.flip(0)
    if kind == "nan":
        y[[3, 120], 1] = torch.nan
    assert_same(k, [(Side(x), Side(y, 1000))], 8, directions=(True, False))


def test_buffers_of_rows_that_differ():
    """Several strips, of scores that rise, so that buffers are cut several times."""
    x, y = integers(34, 8), integers(250, 8, seed=1)
    y *= 1 + torch.arange(250, device=DEVICE)[:, None] // 16
    assert_same(70, [(Side(x), Side(y, 1000))], 34, directions=(True, False), block_size=32)


@pytest.fixture(params=["fitting", "too high", "too low", "no room"])
def sampled(request, monkeypatch):
    """A sample of every third column; bounds that fit, that too few candidates reach, and that nearly all do; and room
    for fewer than reach it."""
    from hf_infcl.ops.triton import topk

    share = {"fitting": 0.4, "too high": 0.1, "too low": 0.7, "no room": 0.4}[request.param]
    monkeypatch.setattr(topk, "sampling", lambda k, n_cols: (3, min(int(share * k), n_cols // 4)))
    monkeypatch.setattr(topk, "_TILES_PER_SEGMENT", 1)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(topk, "_SELECT_WIDTH", 256)  # the interpreter's time goes by operations, not by elements
    if request.param == "no room":
        monkeypatch.setattr(topk, "_MOST_ENTRIES", 0)
        monkeypatch.setattr(topk, "_LOOSEST_BOUND", 0)


@pytest.mark.parametrize("k", [20, 70])  # what the bound leaves over is found in registers, and in buffers
def test_a_bound_from_a_sample_leaves_the_result_as_it_is(sampled, k):
    n, m = 12, 150
    rows, cols = sides(n, m, 5, 1)
    rows.embeds[3] = 0  # all equal
    ceilings = torch.linspace(0, 8, n, device=DEVICE).round(), None
    blocks = [(rows, cols[slice(30, m)]), (rows, cols[slice(0, 30)])]
    assert_same(k, blocks, n, directions=(True, False), block_size=32, ceilings=ceilings)


def test_a_bound_from_a_sample_that_deceives(sampled):
    """The sample holds the best columns only, or none of them, or what overflowed."""
    x, y = integers(8).abs() + 1, torch.ones(150, 5, device=DEVICE)
    for values in (torch.arange(150) % 3 == 0, torch.arange(150) % 3 > 0):
        y[:] = torch.where(values, 2.0, torch.arange(150) / 512)[:, None].to(DEVICE)
        assert_same(40, [(Side(x), Side(y, 1000))], 8, directions=(True, False))
    y[::3] = torch.nan
    assert_same(40, [(Side(x), Side(y, 1000))], 8, directions=(True, False))


def test_rows_that_a_deceiving_sample_leaves_over_keep_what_they_had(monkeypatch):
    """Of the second row, which holds k of a block before, only the sample reaches the bound that it gives."""
    from hf_infcl.ops.triton import topk

    k, m = 65, 240
    rows = Side(torch.eye(2, device=DEVICE), 10**6)
    early, late = torch.zeros(100, 2, device=DEVICE), torch.ones(m, 2, device=DEVICE)
    early[:, 1] = -torch.arange(100, device=DEVICE) / 1000
    late[:, 1] += torch.arange(m, device=DEVICE) / 4096
    late[torch.arange(0, m, 4, device=DEVICE)[:30], 1] = 3.0
    monkeypatch.setattr(topk, "sampling", lambda k, n_cols: (4, 24) if n_cols == m else None)
    assert_same(k, [(rows, Side(early, 5000)), (rows, Side(late, 0))], 2, directions=(True, False), pairs=False)


def test_a_row_of_earlier_blocks_needs_no_more_than_beats_them(monkeypatch):
    """The second block's candidates are all worse; a bound of its own sample would let hundreds pass."""
    from hf_infcl.ops.triton import topk

    monkeypatch.setattr(topk, "sampling", lambda k, n_cols: (3, 30))
    x, y = integers(4).abs() + 1, integers(260, seed=1)
    y[:100] += 8
    side = Side(y, 1000)
    engine = Engine.of(x, "triton", "ieee", None)
    best = TopK.empty(4, 20, device=DEVICE, dtype=torch.float32)
    for part in (slice(0, 100), slice(100, 260)):
        before = best.counts.clone()
        block_topk(engine, Side(x, 10**6), side[part], best, None, exclude_pairs=False)
        skipped, met = (best.counts - before).tolist()
    assert skipped == met > 0


def test_more_than_k_candidates_reach_the_bound_of_a_sample():
    from hf_infcl.ops.triton.topk import sampling

    generator = torch.Generator().manual_seed(0)
    for k, n_cols in ((17, 65_536), (32, 65_536), (65, 20_000), (256, 20_000), (1024, 65_536)):
        step, rank = sampling(k, n_cols)
        scores = torch.randn(100, n_cols, generator=generator)
        bounds = scores[:, ::step].topk(rank).values[:, -1:]
        reached = (scores >= bounds).sum(1)
        assert reached.min() > k
        assert reached.float().mean() == pytest.approx(rank * step, rel=0.1)
    for k, n_cols in ((1000, 10_000), (16, 10**6), (32, 16_384)):
        assert sampling(k, n_cols) is None


def test_segments_keep_the_programs_at_work():
    from hf_infcl.ops.triton.topk import segments_of

    for strips, tiles, programs, expected in (
        (512, 512, 264, 1),  # 97% of two rounds
        (128, 512, 264, 2),  # 97% of one
        (1, 512, 264, 16),  # as many as there may be
        (1, 40, 264, 5),  # each of eight tiles
        (264, 1, 264, 1),
    ):
        assert segments_of(strips, tiles, programs) == expected


@pytest.mark.parametrize("k", [3, 70])
def test_ceilings_and_no_pairs(k):
    rows, cols = sides(12, 64)
    ceilings = torch.linspace(-6, 8, 12, device=DEVICE).round(), torch.linspace(-6, 8, 64, device=DEVICE).round()
    assert_same(k, [(rows, cols)], 12, ceilings=ceilings)
    assert_same(k, [(rows, cols)], 12, pairs=False, directions=(True, False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_block_sizes(dtype):
    rows, cols = sides(10, 70, dtype=dtype)
    for k, block_size in ((3, 16), (70, 64), (3, 7)):
        assert_same(k, [(rows, cols)], 10, block_size=block_size, directions=(True, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)])
def test_link_gradients(dtype, kinds):
    n, m, d, k = 19, 33, 20, 5
    g = torch.Generator().manual_seed(0)
    target = Side(torch.randn(n, d, generator=g).to(DEVICE, dtype), 7)
    source = Side(torch.randn(m, d, generator=g).to(DEVICE, dtype), 100)
    links = []
    for size, low, high in ((n, 95, 140), (m, 0, 30)):  # some outside
        weights = torch.randn(size, k, generator=g).to(DEVICE)
        links.append(Links(weights, torch.randint(low, high, (size, k), generator=g).to(DEVICE)))
    links[0].indices[2] = -1
    results = []
    for backend in ("triton", "torch"):
        out = torch.ones(n, d, device=DEVICE)
        engine = Engine.of(target.embeds, backend, "ieee", None)
        given = [link if kind else None for link, kind in zip(links, kinds, strict=True)]
        block_link_gradient(engine, target, source, *given, torch.tensor(0.5, device=DEVICE), out)
        results.append(out)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [3, 70])
def test_the_loss_matches_pytorchs(k):
    from hf_infcl import MemoryBank, hard_negative_loss

    bank = MemoryBank(6, 5, device=DEVICE)
    bank.push(integers(8, seed=3), integers(8, seed=4), torch.arange(8, device=DEVICE))
    ids = (torch.arange(10) // 2).to(DEVICE)
    results = []
    for backend in ("triton", "torch"):
        leaves = [integers(10), integers(10, seed=1), torch.tensor([0.5], device=DEVICE)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        loss = hard_negative_loss(*leaves, k=k, ids=ids, bank=bank, backend=backend, relative_margin=0.1)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
