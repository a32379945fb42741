"""The kernels under the ring, in Triton's interpreter: what has travelled lies in memory as they expect it."""

import itertools
import os

import pytest

from tests.distributed.test_hard_negatives import _loss as hard_negative_case
from tests.distributed.test_losses import Batch, contrastive_case, forced_paths, sigmoid_case
from tests.processes import run_processes

pytestmark = pytest.mark.distributed


def _kernels(rank: int, world_size: int) -> list[float]:
    assert os.environ["TRITON_INTERPRET"] == "1"
    batch = Batch(rank, world_size)
    values = []
    for _, (smoothing, bank) in itertools.product(forced_paths(), [(0.0, False), (0.1, True)]):
        options = dict(direction="both", duplicates="positive", label_smoothing=smoothing, backend="triton")
        values.append(contrastive_case(batch, ids=True, with_bank=bank, **options).item())
    for _ in forced_paths():
        values.append(sigmoid_case(batch, ids=True, backend="triton").item())
        values += hard_negative_case(batch, True, 3, True, direction="both", backend="triton")
    return values


def test_kernels_on_two_processes_match_float64():
    pytest.importorskip("triton", reason="Triton is on Linux only")
    first, second = run_processes(_kernels, 2, env={"TRITON_INTERPRET": "1"})
    assert first == second
