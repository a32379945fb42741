"""Triton's chunk functions against the PyTorch ones, in the interpreter (on a CPU) or on the GPU, over every switch."""

import weakref

import pytest
import torch

from hf_infcl.ops import Rule, Side, Statistics, torch_tiles
from hf_infcl.ops.dispatch import tiles as tiles_of
from hf_infcl.ops.dispatch import triton_installed
from tests.oracles import pairs

pytestmark = pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def triton_tiles():
    return tiles_of("triton")


def chunk(kind="random", n_rows=20, n_cols=40, depth=20, offsets=(3, 0), ids=None, dtype=torch.float32, seed=0):
    """A ragged chunk that holds part of the diagonal; neither side shares its memory with the other."""
    x, y = pairs(kind, 128, depth, seed)
    g = torch.Generator().manual_seed(seed)
    labels = None if ids is None else torch.randint(-(2**40), 2**40, (ids,), generator=g)
    both = (
        None if labels is None else torch.stack([labels[torch.randint(0, ids, (128,), generator=g)] for _ in "ab"], 1)
    )
    r, c = offsets
    rows, cols = slice(r, r + n_rows), slice(c, c + n_cols)
    make = lambda e, part: Side(  # noqa: E731
        e[part].to(DEVICE, dtype), part.start, None if both is None else both[part].to(DEVICE, copy=True)
    )
    return make(x, rows), make(y, cols)


def related(tiles, rows, cols, rule):
    """The chunk's map of where ids may agree, None where they do not matter."""
    known = tiles.relate(rows, cols, rule)
    return None if known is None else known.chunk(slice(0, len(rows)), slice(0, len(cols)))


def statistics(tiles, rows, cols, scale, rule, repeat=1, precision="ieee"):
    kwargs = dict(device=DEVICE, dtype=torch.float32)
    stats = Statistics.empty(len(rows), rule, **kwargs), Statistics.empty(len(cols), rule, **kwargs)
    for _ in range(repeat):
        tiles.statistics(rows, cols, scale, rule, *stats, precision, related(tiles, rows, cols, rule))
    return stats


def assert_same_statistics(stats, expected, scale, tol=2e-5):
    for a, b in zip(stats, expected, strict=True):
        lse = lambda t: scale * t.data[0] + t.data[1]  # noqa: E731
        torch.testing.assert_close(lse(a), lse(b), rtol=tol, atol=tol, equal_nan=True)
        torch.testing.assert_close(a.data[2:], b.data[2:], rtol=tol, atol=tol, equal_nan=True)


def complete(stats, rows, cols, rule):
    """What a chunk's statistics lack of a batch's."""
    if rule.label_smoothing:  # as the block counts them, before its chunks take masked ones out
        for part, mine, theirs in zip(stats, (rows, cols), (cols, rows), strict=True):
            part.data[4] += mine.embeds @ theirs.embeds.sum(0)
            part.data[5] += len(theirs)
    for part in stats:  # every row of a batch has a positive and a candidate somewhere, if not in this chunk
        part.data[3].clamp_(min=1)
        part.data[:2, part.data[0] == -torch.inf] = 0
        if rule.label_smoothing:
            part.data[5].clamp_(min=1)


BOTH, ROWS, COLS = (0, 1), (0,), (1,)
ON, SHIFTED, OFF = (3, 0), (0, 10), (60, 0)  # offsets of rows and columns: pairs on, below and away from the diagonal
CASES = [
    (None, Rule(), ON, BOTH),
    (None, Rule(), SHIFTED, ROWS),
    (None, Rule(), OFF, COLS),
    (60, Rule("mask"), ON, BOTH),
    (60, Rule("mask"), OFF, ROWS),
    (1, Rule("mask"), ON, BOTH),
    (60, Rule("positive"), SHIFTED, BOTH),
    (60, Rule("positive"), OFF, COLS),
    (60, Rule("keep"), ON, ROWS),
    (None, Rule("mask", 0.1), SHIFTED, BOTH),
    (60, Rule("mask", 0.1), ON, BOTH),
    (60, Rule("positive", 0.1), ON, ROWS),
]


# ieee keeps every row's own maximum, tf32 shares one exponential and leaves masks to a second launch.
@pytest.mark.parametrize(("ids", "rule", "offsets", "wanted"), CASES)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_statistics_and_weights_match_pytorch(triton_tiles, ids, rule, offsets, wanted, precision):
    rows, cols = chunk(offsets=offsets, ids=ids)
    scale = torch.tensor([14.3], device=DEVICE)
    stats = statistics(triton_tiles, rows, cols, scale, rule, repeat=2, precision=precision)
    expected = statistics(torch_tiles, rows, cols, scale, rule, repeat=2)
    tol = 2e-2 if precision == "tf32" and DEVICE == "cuda" else 2e-5
    assert_same_statistics(stats, expected, scale, tol)
    complete(expected, rows, cols, rule)
    chosen = [expected[i] if i in wanted else None for i in (0, 1)]
    known = related(triton_tiles, rows, cols, rule)
    g, gu = triton_tiles.softmax_weights(rows, cols, scale, rule, *chosen, precision, True, known)
    g_expected, gu_expected = torch_tiles.softmax_weights(rows, cols, scale, rule, *chosen, "ieee", True)
    torch.testing.assert_close(g, g_expected, rtol=tol, atol=tol / 10)
    torch.testing.assert_close(gu, gu_expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("kind", ["random", "trained", "identical", "opposite"])
@pytest.mark.parametrize(("scale", "precision"), [(1.0, "tf32"), (100.0, "tf32"), (10_000.0, "tf32"), (100.0, "ieee")])
def test_every_scale_keeps_the_largest_term(triton_tiles, kind, scale, precision):
    """Both branches of both kernels: a shared exponential where the spread is small, one's own where it is not."""
    rows, cols = chunk(kind)
    s = torch.tensor([scale], device=DEVICE)
    stats = statistics(triton_tiles, rows, cols, s, Rule(), precision=precision)
    u = rows.embeds.double() @ cols.embeds.double().T
    loose = 3e-3 * scale if DEVICE == "cuda" and precision == "tf32" else 0
    for part, along in zip(stats, (1, 0), strict=True):
        lse = s.double() * part.data[0].double() + part.data[1].double()
        torch.testing.assert_close(lse, (scale * u).logsumexp(along), rtol=2e-7, atol=1e-4 + 2e-7 * scale + loose)
    g, _ = triton_tiles.softmax_weights(rows, cols, s, Rule(), *stats, precision, False)
    expected, _ = torch_tiles.softmax_weights(rows, cols, s, Rule(), *stats, "ieee", False)
    torch.testing.assert_close(g, expected, rtol=1e-3 + 1e-6 * scale + loose, atol=3e-5 + 1e-6 * scale + loose)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(triton_tiles, dtype):
    rows, cols = chunk("trained", dtype=dtype)
    scale = torch.tensor([50.0], device=DEVICE)
    stats = statistics(triton_tiles, rows, cols, scale, Rule())
    expected = statistics(torch_tiles, rows, cols, scale, Rule())
    assert_same_statistics(stats, expected, scale, 1e-4)
    g, gu = triton_tiles.softmax_weights(rows, cols, scale, Rule(), *expected, "ieee", True)
    g_expected, gu_expected = torch_tiles.softmax_weights(rows, cols, scale, Rule(), *expected, "ieee", True)
    gain = triton_tiles.gain(dtype)
    assert g.dtype == dtype
    torch.testing.assert_close(g.float() / gain, g_expected, rtol=1e-2, atol=3e-5)
    torch.testing.assert_close(gu / gain, gu_expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rule", [Rule("mask"), Rule("mask", 0.1)])
def test_a_tile_that_both_launches_do_counts_its_pairs_once(triton_tiles, rule):
    """The first leaves a lone copy out by its place, but a row far below the tile's maximum asks for the second."""
    rows, cols = chunk(n_rows=120, n_cols=125, ids=10**6)
    rows.ids[7] = cols.ids[90]
    rows.embeds[11] *= 1e-3
    scale = torch.tensor([1000.0], device=DEVICE)
    expected = statistics(torch_tiles, rows, cols, scale, rule)
    for mine, reference in zip(
        statistics(triton_tiles, rows, cols, scale, rule, precision="tf32"), expected, strict=True
    ):
        assert torch.equal(mine.data[3], reference.data[3])
        torch.testing.assert_close(mine.data[2], reference.data[2], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("rule", [Rule("mask"), Rule("mask", 0.1)])
def test_a_lone_copy_is_left_out(triton_tiles, rule):
    """Where one pair of a cell is a copy, the map says which, and no ids are compared."""
    from hf_infcl.ops.triton.kernels_common import SEVERAL

    rows, cols = chunk(n_rows=120, n_cols=125, ids=10**6)
    rows.ids[7, 1] = cols.ids[10, 1] = cols.ids[90, 1]  # pairs 10 and 90, either's image with the other's text
    cells = related(triton_tiles, rows, cols, rule)
    assert (cells > 0).sum() == 2
    assert (cells != SEVERAL.value).all()
    scale = torch.tensor([3.0], device=DEVICE)
    expected = statistics(torch_tiles, rows, cols, scale, rule)
    stats = statistics(triton_tiles, rows, cols, scale, rule, precision="tf32")
    tol = 2e-2 if DEVICE == "cuda" else 2e-5
    assert_same_statistics(stats, expected, scale, tol)
    complete(expected, rows, cols, rule)
    g, _ = triton_tiles.softmax_weights(rows, cols, scale, rule, *expected, "tf32", False, cells)
    g_expected, _ = torch_tiles.softmax_weights(rows, cols, scale, rule, *expected, "ieee", False)
    assert g_expected[7, 90] == g_expected[87, 10] == 0  # a copy is no candidate
    torch.testing.assert_close(g, g_expected, rtol=tol, atol=tol / 10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_reaches_the_statistics(triton_tiles, bad):
    rows, cols = chunk()
    rows.embeds[5, 2] = bad
    scale = torch.tensor([10.0], device=DEVICE)
    row_stats, col_stats = statistics(triton_tiles, rows, cols, scale, Rule())
    assert not torch.isfinite(row_stats.losses(scale, Rule())[5])
    assert not torch.isfinite(col_stats.data[1]).all()
    assert torch.isfinite(row_stats.data[:2, torch.arange(20) != 5]).all()


@pytest.mark.parametrize("ids", [None, 60])
@pytest.mark.parametrize("bias", [-10.0, 3.0])
@pytest.mark.parametrize("offsets", [(3, 0), (60, 0)])
def test_sigmoid_matches_pytorch(triton_tiles, ids, bias, offsets):
    rows, cols = chunk("trained", offsets=offsets, ids=ids)
    scale, bias = torch.tensor([10.0], device=DEVICE), torch.tensor([bias], device=DEVICE)
    args = (rows, cols, scale, bias, Rule(), "ieee")
    torch.testing.assert_close(triton_tiles.sigmoid_loss(*args), torch_tiles.sigmoid_loss(*args), rtol=1e-5, atol=1e-6)
    for out, expected in zip(
        triton_tiles.sigmoid_weights(*args, True), torch_tiles.sigmoid_weights(*args, True), strict=True
    ):
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 70, 100), (50, 2, 33), (31, 33, 16)])
def test_ragged_and_strided_chunks_read_nothing_outside(triton_tiles, shape):
    n_rows, n_cols, depth = shape
    g = torch.Generator().manual_seed(1)
    wide = torch.full((2, n_rows + n_cols, 2 * depth + 3), torch.nan)
    data = torch.randn(n_rows + n_cols, depth, generator=g) / depth**0.5
    wide[0, :, 1 : 2 * depth : 2] = data  # every other number, amid NaN
    view = wide.to(DEVICE)[0, :, 1 : 2 * depth : 2]
    transposed = data.T.contiguous().to(DEVICE).T
    scale = torch.tensor([14.3], device=DEVICE)
    results = []
    for embeds in (view, transposed):
        rows, cols = Side(embeds[:n_rows], 0), Side(embeds[n_rows:], 0)
        stats = statistics(triton_tiles, rows, cols, scale, Rule())
        expected = statistics(torch_tiles, rows, cols, scale, Rule())
        assert_same_statistics(stats, expected, scale)
        g_, _ = triton_tiles.softmax_weights(rows, cols, scale, Rule(), *expected, "ieee", False)
        torch.testing.assert_close(
            g_,
            torch_tiles.softmax_weights(rows, cols, scale, Rule(), *expected, "ieee", False)[0],
            rtol=2e-5,
            atol=2e-6,
        )
        results.append(g_)
    torch.testing.assert_close(*results)


def test_a_descriptor_describes_its_matrix_and_keeps_no_memory():
    """They are looked up by address, over steps: the memory is the allocator's in between."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from hf_infcl.ops.triton.launch import descriptor

    x = torch.zeros(48, 64, dtype=torch.bfloat16)[:, :40]
    there = weakref.ref(x)
    made, expected = descriptor(x, 16, 32), TensorDescriptor(x, [48, 40], [64, 1], [16, 32])
    for name in ("shape", "strides", "block_shape", "padding"):
        assert getattr(made, name) == getattr(expected, name)
    assert (made.base.data_ptr(), made.base.dtype) == (x.data_ptr(), x.dtype)
    assert descriptor(x, 16, 32) is made
    others = descriptor(x, 32, 32), descriptor(x[:32], 16, 32), descriptor(x[1:], 16, 32), descriptor(x.half(), 16, 32)
    assert all(other is not made for other in others)
    del x, expected
    assert there() is None


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize(("capability", "has_engine"), [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_the_interpreter_has_no_copy_engine(monkeypatch, capability, has_engine, interpreted):
    """It runs kernels on any CUDA tensors, and would copy what a descriptor describes."""
    from hf_infcl.ops.triton import configs

    monkeypatch.setattr(configs, "chip", lambda index: (capability, 132))
    monkeypatch.setattr(configs, "triton_interpreted", lambda: interpreted)
    assert configs.uses_tma(torch.device("cuda", 0)) == (has_engine and not interpreted)
    assert not configs.uses_tma(torch.device("cpu"))


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_adds_in_float32(triton_tiles, precision, dtype):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=g).to(DEVICE, dtype) for s in ((24, 40), (40, 16)))
    out = torch.ones(24, 16, device=DEVICE)
    expected = 1 + a.double() @ b.double()
    tol = 1e-2 if precision == "tf32" and DEVICE == "cuda" else 2e-5
    torch.testing.assert_close(triton_tiles.matmul(a, b, precision).double() + 1, expected, rtol=tol, atol=tol)
    assert triton_tiles.matmul(a, b, precision, out=out) is out
    torch.testing.assert_close(out.double(), expected, rtol=tol, atol=tol)
