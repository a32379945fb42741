"""Processes that are about to do different things are told so, all of them, before anything travels."""

import os
import re

import pytest
import torch

from hf_infcl import contrastive_loss, sigmoid_loss
from tests.processes import ProcessesError, run_processes

pytestmark = pytest.mark.distributed

# What rank 1 does differently, and what every rank then says.
CASES = [
    (dict(d=8), "embedding dimension: rank 0 has 4, rank 1 has 8, rank 2 has 4"),
    (dict(dtype=torch.bfloat16), "dtype: rank 0 has 'float32', rank 1 has 'bfloat16', rank 2 has 'float32'"),
    (dict(direction="image_to_text"), "direction: rank 0 has 'both', rank 1 has 'image_to_text', rank 2 has 'both'"),
    (dict(duplicates="keep"), "duplicates: rank 0 has 'mask', rank 1 has 'keep'"),
    (dict(label_smoothing=0.1), "label_smoothing: rank 0 has 0.0, rank 1 has 0.1"),
    (dict(precision="tf32"), "precision: rank 0 has 'auto', rank 1 has 'tf32'"),
    (dict(backend="torch"), "backend: rank 0 has 'auto', rank 1 has 'torch'"),
    (dict(ids=torch.zeros(3, 2, dtype=torch.int64)), "columns of ids: rank 0 has None, rank 1 has 2"),
    (dict(train=False), "gradients: rank 0 has 'images', rank 1 has None"),
    (dict(loss=sigmoid_loss), "loss: rank 0 has 'contrastive_loss', rank 1 has 'sigmoid_loss'"),
    (dict(limit="7"), "HF_INFCL_GATHER_BELOW: rank 0 has 100, rank 1 has 7"),
]  # fmt: skip


def call(d=4, dtype=torch.float32, train=True, loss=contrastive_loss, limit="100", **options) -> torch.Tensor:
    os.environ["HF_INFCL_GATHER_BELOW"] = limit
    images = torch.ones(3, d, dtype=dtype, requires_grad=train)
    scalars = (1.0, 0.0) if loss is sigmoid_loss else (1.0,)
    return loss(images, torch.ones(3, d, dtype=dtype), *scalars, **options)


def _disagree(rank: int, world_size: int) -> list[str]:
    messages = []
    for different, _ in CASES:
        with pytest.raises(ValueError, match="the processes of the group must agree") as error:
            call(**(different if rank == 1 else {}))
        messages.append(str(error.value))
    for value in ("many", "-1", "1.5"):
        with pytest.raises(ValueError, match=f"HF_INFCL_GATHER_BELOW must be a whole number .* got '{value}'"):
            call(limit=value)
    with pytest.raises(ValueError, match="cannot send tensors that are on meta"):
        contrastive_loss(torch.ones(3, 4, device="meta"), torch.ones(3, 4, device="meta"), 1.0)
    # Nothing is left under way: the next call works.
    call().backward()
    return messages


def test_every_rank_shows_each_ranks_value():
    for messages in run_processes(_disagree, 3):
        for message, (_, expected) in zip(messages, CASES, strict=True):
            assert expected in message


def _one_stops(rank: int, world_size: int) -> None:
    call()
    if rank == 1:
        raise ValueError("broken on purpose")
    call()


def test_a_rank_that_stopped_is_named_by_the_others():
    with pytest.raises(ProcessesError) as error:
        run_processes(_one_stops, 3)
    assert "ValueError: broken on purpose" in str(error.value)
    # Of the others, one may hear of the end of another that heard of it first.
    assert re.search(r"rank 1 of 3 ended or stopped answering while rank [02] waited for it", str(error.value))
