"""Sizes that are no powers of two, on both backends: every row count with every width, and a bank that makes blocks
rectangular."""

import pytest
import torch

from hf_infcl.ops.dispatch import triton_installed
from tests import oracles
from tests.comparisons import KINDS, SCALES, compare

ROWS, WIDTHS = (1, 2, 3, 63, 127, 300, 513, 1000), (1, 7, 64, 100, 512, 768)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")


@pytest.mark.parametrize("n", ROWS)
def test_every_row_count_with_every_width(n):
    """Of the four scales and structures each one meets every row count and every width."""
    for place, d in enumerate(WIDTHS):
        for kind, scale in zip(KINDS, (*SCALES[place % 4 :], *SCALES[: place % 4]), strict=True):
            compare(*oracles.pairs(kind, n, d, seed=place), scale)


@pytest.mark.parametrize("d", [1, 2, 8])
def test_thousands_of_equal_rows_of_few_features(d):
    """Their gradient is zero: n equal terms less a large one, added up without a common error."""
    compare(*oracles.pairs("identical", 2000, d), 100.0, device=DEVICE)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize(
    ("n", "d"),
    [(1, 1), (2, 16), (63, 96), (65, 100), (130, 512), (33, 640), (17, 768), (130, 1152), (1, 1152), (130, 1)],
)
@pytest.mark.parametrize("with_bank", [False, True])
def test_rectangles_of_odd_sizes(n, d, with_bank, backend):
    bank = None
    if with_bank:  # N x (N + 37)
        bank = (*(side.float().double() for side in oracles.pairs("random", 37, d, seed=9)), None)
    for view in (lambda t: t, lambda t: t.T.contiguous().T):
        compare(*map(view, oracles.pairs("trained", n, d)), 14.3, bank=bank, device=DEVICE, backend=backend)
