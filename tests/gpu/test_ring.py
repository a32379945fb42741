"""The ring over NCCL, on as many GPUs as there are: values and gradients of one GPU that has the whole batch."""

import itertools
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hf_infcl import contrastive_loss, hard_negative_loss, retrieval_metrics, sigmoid_loss
from tests import oracles

D, SCALE = 128, 20.0
# Of the largest gradient: what rounding the result to bfloat16 costs, and what another order of adding costs float32.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
LOSSES = {
    "contrastive": lambda x, y, s, **options: contrastive_loss(x, y, s, **options),
    "positives, smoothed": lambda x, y, s, **options: contrastive_loss(
        x, y, s, duplicates="positive", label_smoothing=0.1, **options
    ),
    "hard negatives": lambda x, y, s, **options: hard_negative_loss(x, y, s, k=8, **options),
    "sigmoid": lambda x, y, s, **options: sigmoid_loss(x, y, s, -5.0, **options),
}


def _sizes(world_size: int) -> list[int]:
    """Uneven, and none a multiple of a tile."""
    return [1000 + 333 * rank for rank in range(world_size)]


def _compare(rank: int, world_size: int, dtype: torch.dtype) -> None:
    sizes = _sizes(world_size)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    images, texts = (side.to("cuda", dtype) for side in oracles.pairs("trained", sum(sizes), D))
    ids = torch.randint(0, sum(sizes) // 2, (sum(sizes), 2), generator=torch.Generator().manual_seed(0)).cuda()
    for name, loss in LOSSES.items():
        found = []
        for rows, group in ((slice(None), False), (own, None)):
            leaves = [images[rows].clone().requires_grad_(), texts[rows].clone().requires_grad_()]
            leaves.append(torch.tensor(SCALE, device="cuda", requires_grad=True))
            value = loss(*leaves, ids=ids[rows], group=group)
            found.append((value.detach(), *torch.autograd.grad(value, leaves)))
        (value, *gradients), (own_value, *own_gradients) = found
        torch.testing.assert_close(own_value, value, rtol=1e-5, atol=1e-5)
        for whole, part in zip(gradients[:2], own_gradients[:2], strict=True):
            expected = world_size * whole[own].float()
            error = (part.float() - expected).norm() / expected.norm()
            assert error < TOLERANCES[dtype], (name, float(error))
        torch.testing.assert_close(own_gradients[2], gradients[2], rtol=1e-3, atol=1e-5)
    metrics = retrieval_metrics(images[own].float(), texts[own].float(), group=None)
    assert metrics == retrieval_metrics(images.float(), texts.float())


def _work(rank: int, world_size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    for limit, dtype in itertools.product(("0", "1000000"), TOLERANCES):
        os.environ["HF_INFCL_GATHER_BELOW"] = limit
        _compare(rank, world_size, dtype)
    Path(folder, f"done-{rank}").touch()
    dist.destroy_process_group()


def test_values_and_gradients_are_those_of_one_gpu():
    world_size = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (world_size, folder), nprocs=world_size)
        assert all(Path(folder, f"done-{rank}").exists() for rank in range(world_size))


def _disagree(rank: int, world_size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    rows = torch.ones(4, 8 if rank == 0 else 16, device="cuda")
    if world_size > 1:
        with pytest.raises(ValueError, match="embedding dimension: rank 0 has 8, rank 1 has 16"):
            contrastive_loss(rows, rows, 1.0)
        with pytest.raises(ValueError, match="cannot send tensors that are on cpu"):
            contrastive_loss(rows.cpu(), rows.cpu(), 1.0)
    dist.destroy_process_group()


def test_ranks_that_disagree_are_told_so():
    world_size = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_disagree, (world_size, folder), nprocs=world_size)
