"""The kernels in which two groups of warps take turns, against the plain ones: the same bits."""

import itertools

import pytest
import torch

from hf_infcl import contrastive_loss
from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.statistics import Statistics
from hf_infcl.ops.triton import pingpong, softmax, whole
from hf_infcl.ops.triton.related import relate
from tests import oracles

CUDA = torch.device("cuda")
# Rows, columns and their offset: one pair of tiles; fewer pairs than multiprocessors; pairs that do not divide among
# them, so that programs begin within a row of tiles and go on in the next; a diagonal off the tiles' corners.
PLAIN = Rule()
SHAPES = ((128, 256, 0), (384, 512, 100), (2176, 2560, -300), (4096, 4096, 0))


@pytest.fixture
def counted(monkeypatch):
    """Chunks of any size go this way; counts the launches that did."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.fail("these kernels are Hopper's alone, as their dispatch knows; run them on such a chip")
    launches = []
    run = pingpong._run

    def count(kernel, *arguments):
        launches.append(kernel)
        run(kernel, *arguments)

    monkeypatch.setattr(pingpong, "_SMALLEST", 0)
    monkeypatch.setattr(pingpong, "_run", count)
    return launches


def without(monkeypatch, compute):
    """What `compute` returns when no chunk goes this way."""
    with monkeypatch.context() as patch:
        patch.setattr(pingpong, "suits", lambda *_: False)
        return compute()


def chunk(rows, cols, scale, rule, wanted):
    """Statistics and G of a chunk, made from nothing."""
    related = relate(rows, cols, rule)
    cells = None if related is None else related.chunk(slice(0, len(rows)), slice(0, len(cols)))
    stats = [
        Statistics.empty(len(side), rule, device=CUDA, dtype=torch.float32) if want else None
        for side, want in zip((rows, cols), wanted, strict=True)
    ]
    softmax.statistics(rows, cols, scale, rule, *stats, "ieee", cells)
    if rule.label_smoothing:  # what a block does when its chunks are done
        for side, other in ((0, cols), (1, rows)):
            if stats[side] is not None:
                stats[side].data[5] += len(other)
    g, _ = softmax.softmax_weights(rows, cols, scale, rule, *stats, "ieee", False, cells)
    return [g, *(each.data for each in stats if each is not None)]


def sides(n_rows, n_cols, shift, d, dtype, kind="trained", ids=None):
    n = max(n_rows, n_cols) + abs(shift)
    x, y = (side.to(CUDA, dtype) for side in oracles.pairs(kind, n, d))
    if kind == "random":
        x[: n // 2] *= 0.1  # rows of the same tiles with maxima far apart
    given = torch.arange(2 * n, device=CUDA).view(n, 2) if ids else None
    if ids == "few":
        copies = torch.randint(0, n, (2, n // 8), device=CUDA)
        given[copies[0], 0] = given[copies[1], 0]
    elif ids == "many":
        given = torch.randint(0, 40, (n, 2), device=CUDA)
    first, second = max(shift, 0), max(-shift, 0)
    rows = Side(x[first:][:n_rows], first, None if given is None else given[first:][:n_rows])
    return rows, Side(y[second:][:n_cols], second, None if given is None else given[second:][:n_cols])


def check(monkeypatch, counted, rows, cols, scale, rule=PLAIN, wanted=(True, True), launches=2):
    scale = torch.tensor(scale, device=CUDA)
    counted.clear()
    found = chunk(rows, cols, scale, rule, wanted)
    assert len(counted) == launches
    expected = without(monkeypatch, lambda: chunk(rows, cols, scale, rule, wanted))
    assert len(counted) == launches
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all() or rule.duplicates == "mask"  # whose rows may be left without a candidate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [8, 64, 200, 512, 576, 768, 1000, 1152, 1536, 2048])
def test_the_same_bits_at_every_depth(monkeypatch, counted, d, dtype):
    for shape, (kind, scale) in itertools.product(SHAPES, (("random", 100.0), ("trained", 50.0), ("opposite", 1.0))):
        launches = 2 if d <= 1536 else 1  # deeper, G alone
        check(monkeypatch, counted, *sides(*shape, d, dtype, kind), scale, launches=launches)


@pytest.mark.parametrize(
    ("ids", "duplicates"), [(None, "mask"), *itertools.product(("few", "many"), ("mask", "positive"))]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_same_bits_with_every_option(monkeypatch, counted, ids, duplicates, smoothing):
    for shape in SHAPES:
        both = sides(*shape, 128, torch.bfloat16, ids=ids)
        check(monkeypatch, counted, *both, 14.3, Rule(duplicates, smoothing))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
@pytest.mark.parametrize(("ids", "rule"), [(None, Rule()), ("few", Rule("mask")), ("few", Rule("positive", 0.1))])
def test_the_same_bits_in_one_direction(monkeypatch, counted, ids, rule, wanted):
    for shape in SHAPES:
        check(monkeypatch, counted, *sides(*shape, 128, torch.bfloat16, ids=ids), 14.3, rule, wanted)


def test_the_same_bits_every_time(counted):
    """Two groups and a loader that never agree on the time, fifty times over."""
    scale = torch.tensor(30.0, device=CUDA)
    for d in (64, 512, 1024, 1536):
        rows, cols = sides(4096, 8192, 0, d, torch.bfloat16)
        first = chunk(rows, cols, scale, Rule(), (True, True))
        for _ in range(50):
            again = chunk(rows, cols, scale, Rule(), (True, True))
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize(("n", "d", "launches"), [(16_384, 64, 5), (8192, 768, 0), (8192, 1024, 0), (16_384, 1024, 1)])
def test_batches_in_which_the_chip_is_the_bound(monkeypatch, counted, n, d, launches):
    """The way of a batch alone, which shares a maximum and multiplies by bands there.

    Beyond a depth of 512 the forward launch keeps exponentials, plainly; of the larger batch half of G is left to make.
    """
    assert whole.suits(n, torch.bfloat16, False, None)
    x, y = (side.to(CUDA, torch.bfloat16) for side in oracles.pairs("trained", n, d))

    def made(backend="triton"):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        s = torch.tensor(30.0, device=CUDA, requires_grad=True)
        loss = contrastive_loss(a, b, s, backend=backend)
        loss.backward()
        return loss.detach(), a.grad, b.grad, s.grad

    found = made()
    assert len(counted) == launches
    assert all(torch.equal(one, other) for one, other in zip(found, without(monkeypatch, made), strict=True))
    expected = made("torch")
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5, abs=1e-5)
    assert found[3].item() == pytest.approx(expected[3].item(), rel=2**-7, abs=2**-7)
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        assert oracles.gradient_error(one.cpu(), other.cpu(), 30.0) < 2**-7
