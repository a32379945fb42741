"""What a rank holds does not grow with the number of ranks: its allocations are counted."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from hf_infcl import MemoryBank, contrastive_loss, hard_negative_loss, retrieval_metrics, sigmoid_loss
from tests import oracles
from tests.processes import run_processes

pytestmark = pytest.mark.distributed

ROWS, D = 128, 64


def peak_and_largest(step) -> tuple[int, int]:
    """Most bytes held at a time on top of what was there before, and the largest single allocation."""
    step()  # connections and caches of the first call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak, largest = max(peak, held), max(largest, event.nbytes())
    return peak, largest


def _count(rank: int, group: Any) -> dict[str, tuple[int, int]]:
    os.environ["HF_INFCL_GATHER_BELOW"] = "0"
    x, y = (side.float().requires_grad_() for side in oracles.pairs("random", ROWS, D, rank))
    scale, bias = torch.tensor(9.0, requires_grad=True), torch.tensor(-3.0, requires_grad=True)
    ids = torch.arange(ROWS) + rank * ROWS
    bank = MemoryBank(ROWS, D, group=False)  # this rank's part
    bank.push(x.detach(), y.detach(), ids)
    options = dict(ids=ids, block_size=32, group=group)
    found = {
        "contrastive": peak_and_largest(lambda: contrastive_loss(x, y, scale, **options).backward()),
        "bank": peak_and_largest(lambda: contrastive_loss(x, y, scale, bank=bank, **options).backward()),
        "sigmoid": peak_and_largest(lambda: sigmoid_loss(x, y, scale, bias, **options).backward()),
        "hard negatives": peak_and_largest(lambda: hard_negative_loss(x, y, scale, k=4, **options).backward()),
        "metrics": peak_and_largest(lambda: retrieval_metrics(x, y, block_size=32, group=group)),
    }
    os.environ["HF_INFCL_GATHER_BELOW"] = "1000000"
    found["gathered"] = peak_and_largest(lambda: contrastive_loss(x, y, scale, **options).backward())
    return found


def _four_and_five(rank: int, world_size: int) -> list[dict[str, tuple[int, int]]]:
    # From four ranks on there is a step at which everything that can be under way is.
    four = dist.new_group(range(4))
    return [_count(rank, group) for size, group in ((4, four), (5, None)) if rank < size]


def test_allocations_do_not_grow_with_the_number_of_ranks():
    four, five = run_processes(_four_and_five, 5)[0]
    local = ROWS * D * 4
    # What is counted would show a global batch: gathering holds one, of texts and of their gradients.
    peak, largest = five.pop("gathered")
    assert largest >= 5 * local
    assert peak >= four.pop("gathered")[0] + 2 * local
    for loss in five:
        # Numbers (of pairs, in the metrics) are all that grows: 8 bytes for each row, some times over.
        assert five[loss][0] <= four[loss][0] + 10 * 8 * ROWS, loss
        assert five[loss][1] <= four[loss][1], loss
    assert five["bank"][1] <= local  # of a bank as large as the batch, too, only one rank's part is anywhere
    for loss in ("contrastive", "sigmoid"):
        # No single thing is larger than the embeddings of one rank. There are: both gradients, the visiting and the
        # arriving texts, their gradient here, on its way out and on its way in; and the scratch of one chunk.
        peak, largest = five[loss]
        assert largest <= local, loss
        assert peak <= 9 * local, loss
