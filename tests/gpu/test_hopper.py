"""The warp-specialised kernels against the plain ones: the same arithmetic, in another order of work."""

import pytest
import torch

from hf_infcl.ops import Rule, Side, Statistics
from hf_infcl.ops import triton as tiles
from hf_infcl.ops.triton import hopper
from tests.oracles import pairs

# A barrier waited on wrongly hangs; it should not hang the suite.
pytestmark = pytest.mark.timeout(120)

CUDA = torch.device("cuda")
CASES = [
    (Rule(), None, (0, 1)),
    (Rule(), None, (0,)),
    (Rule("mask"), 4000, (0, 1)),
    (Rule("mask", 0.1), None, (0, 1)),
    (Rule("mask", 0.1), 4000, (0, 1)),
]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def run(rule, ids, wanted, scale, depth, monkeypatch, on):
    monkeypatch.setenv("HF_INFCL_HOPPER", "1" if on else "0")
    x, y = (side.to(CUDA, torch.bfloat16) for side in pairs("trained", 4200, depth))
    labels = (
        None if ids is None else torch.randint(0, ids, (4200, 2), generator=torch.Generator().manual_seed(1)).cuda()
    )
    rows, cols = Side(x, 0, labels)[100:3333], Side(y, 0, labels)[:4100]
    assert hopper.suits(rows, cols, rule) == on
    s = torch.tensor(scale, device=CUDA)
    kwargs = {"device": CUDA, "dtype": torch.float32}
    stats = [
        Statistics.empty(len(side), rule, **kwargs) if i in wanted else None for i, side in enumerate((rows, cols))
    ]
    tiles.statistics(rows, cols, s, rule, *stats, "ieee")
    for part in stats:
        if part is not None:
            part.data[3].clamp_(min=1)
    g, gu = tiles.softmax_weights(rows, cols, s, rule, *stats, "ieee", True)
    return [part.data for part in stats if part is not None], g.float(), gu


@pytest.mark.parametrize(("rule", "ids", "wanted"), CASES)
@pytest.mark.parametrize(("scale", "depth"), [(20.0, 512), (400.0, 200)])
def test_agrees_with_the_plain_kernels(rule, ids, wanted, scale, depth, monkeypatch):
    stats, g, gu = run(rule, ids, wanted, scale, depth, monkeypatch, True)
    stats_plain, g_plain, gu_plain = run(rule, ids, wanted, scale, depth, monkeypatch, False)
    for a, b in zip(stats, stats_plain, strict=True):
        torch.testing.assert_close(scale * a[0] + a[1], scale * b[0] + b[1], rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(a[2:], b[2:], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(g, g_plain, rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(gu, gu_plain, rtol=1e-3, atol=1e-3)


def test_gives_the_same_bits_twice(monkeypatch):
    once, twice = (run(Rule(), None, (0, 1), 50.0, 512, monkeypatch, True) for _ in range(2))
    assert torch.equal(once[1], twice[1])
    assert all(torch.equal(a, b) for a, b in zip(once[0], twice[0], strict=True))
