"""The top-k sweep on the device: selection against a dense sort, the loss against float64, memory and bits."""

import pytest
import torch

from hf_infcl import MemoryBank, contrastive_loss, hard_negative_loss, hardest_negatives
from tests.oracles import gradient_error, hard_negative, pairs

KS_ON_DEVICE = (1, 8, 32, 64, 65, 256, 1000)


def exact(n, d, dtype, seed=0):
    """Small integers: every score is exact in any dtype, and ties abound."""
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-2, 3, (n, d), generator=g, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 8), (130, 777, 100), (2000, 3001, 64), (300, 20_000, 512)])
def test_selection_equals_a_dense_sort(n, m, d, dtype):
    queries, keys = exact(n, d, dtype), exact(m, d, dtype, 1)
    ids, key_ids = (torch.randint(0, 200, (size, 2), device="cuda") for size in (n, m))
    dense = (queries.float() @ keys.float().T).masked_fill((ids[:, None] == key_ids[None]).any(-1), -torch.inf)
    scores, indices = dense.sort(dim=1, descending=True, stable=True)
    for k in KS_ON_DEVICE:
        found_scores, found, stats = hardest_negatives(queries, keys, k, ids=ids, key_ids=key_ids)
        most = min(k, m)
        assert torch.equal(found_scores[:, :most], scores[:, :most])
        assert torch.equal(found[:, :most], indices[:, :most].masked_fill(scores[:, :most] == -torch.inf, -1))
        assert (found[:, most:] == -1).all()
        assert 0 <= stats["row_skip_ratio"] < 1


@pytest.mark.parametrize("order", ["equal", "rising", "falling", "nan"])
def test_selection_in_the_worst_orders(order):
    queries, keys = torch.ones(200, 16, device="cuda"), torch.ones(5000, 16, device="cuda")
    if order in ("rising", "falling"):
        keys *= torch.arange(5000, device="cuda")[:, None] * (1 if order == "rising" else -1)
    if order == "nan":
        keys[[7, 4000], 3] = torch.nan
    dense = (queries.double() @ keys.double().T).float()
    expected = dense.sort(dim=1, descending=True, stable=True)
    for k in (5, 300):
        scores, indices, _ = hardest_negatives(queries, keys, k)
        assert torch.equal(indices, expected.indices[:, :k])
        torch.testing.assert_close(scores, expected.values[:, :k], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [65, 100, 600])
@pytest.mark.parametrize("block_size", [None, 32, 256])
def test_buffers_of_rows_that_differ(dtype, k, block_size):
    """Every row has scores of its own that rise with the columns: buffers are cut many times, at different places."""
    queries, keys = exact(200, 32, dtype), exact(8000, 32, dtype, 1)
    keys *= (1 + torch.arange(8000, device="cuda")[:, None] // 2000).to(dtype)
    expected = (queries.float() @ keys.float().T).sort(dim=1, descending=True, stable=True)
    scores, indices, _ = hardest_negatives(queries, keys, k, block_size=block_size)
    assert torch.equal(scores, expected.values[:, :k])
    assert torch.equal(indices, expected.indices[:, :k])


@pytest.mark.parametrize("order", ["random", "sample best", "sample worst", "equal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [32, 65, 256, 1000])
@pytest.mark.parametrize("block_size", [None, 32, 256])
def test_a_bound_from_a_sample_leaves_the_result_as_it_is(dtype, k, order, block_size):
    """Every eighth column (of k = 1,000 every 31st) is looked at first; they may be the best of all, or the worst."""
    from hf_infcl.ops.triton.topk import sampling

    queries, keys = exact(300, 64, dtype).abs(), exact(33_000, 64, dtype, 1).abs()
    step, _ = sampling(k, len(keys))
    if order == "equal":
        keys[100:] = 1
    elif order != "random":
        keys[::step] *= 4 if order == "sample best" else 0.25
    expected = (queries.float() @ keys.float().T).sort(dim=1, descending=True, stable=True)
    scores, indices, _ = hardest_negatives(queries, keys, k, block_size=block_size)
    assert torch.equal(scores, expected.values[:, :k])
    assert torch.equal(indices, expected.indices[:, :k])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [4, 100])
@pytest.mark.parametrize("with_bank", [False, True])
def test_the_loss_matches_float64(dtype, k, with_bank):
    n, d, scale = 700, 96, 20.0
    x, y = (side.to("cuda", dtype) for side in pairs("trained", n, d))
    stored = tuple(side.to("cuda", dtype) for side in pairs("random", 150, d, 3)) if with_bank else None
    bank = None
    if stored is not None:
        bank = MemoryBank(150, d, dtype=dtype, device="cuda")
        bank.push(*stored)
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_(), torch.tensor([scale], device="cuda")]
    leaves[2].requires_grad_()
    loss = hard_negative_loss(*leaves, k=k, bank=bank)
    loss.backward()
    exact_leaves = [x.double().cpu().requires_grad_(), y.double().cpu().requires_grad_()]
    known = None if stored is None else (*(side.double().cpu() for side in stored), None)
    expected = hard_negative(*exact_leaves, torch.tensor(scale).double(), k, bank=known)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for leaf, reference in zip(leaves[:2], exact_leaves, strict=True):
        assert gradient_error(leaf.grad.cpu(), reference.grad, scale) < (2**-7 if dtype == torch.bfloat16 else 1e-4)


def test_a_k_that_covers_all_is_the_contrastive_loss():
    x, y = (side.to("cuda", torch.float32).requires_grad_() for side in pairs("trained", 300, 64))
    dense, hard = contrastive_loss(x, y, 20.0), hard_negative_loss(x, y, 20.0, k=299)
    torch.testing.assert_close(dense, hard, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(dense, (x, y)), torch.autograd.grad(hard, (x, y)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_same_inputs_give_the_same_bits():
    x, y = (side.to("cuda", torch.bfloat16).requires_grad_() for side in pairs("random", 3000, 128))
    runs = []
    for _ in range(3):
        loss = hard_negative_loss(x, y, 50.0, k=16)
        runs.append((loss, *torch.autograd.grad(loss, (x, y))))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_memory_is_linear():
    """At n = 65,536 and k = 32: at most 200 MiB beyond inputs, gradients and the n x k result."""
    n, k = 65_536, 32
    x, y = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    gradients, result = 2 * n * 512 * 2, n * k * (4 + 8)
    for kept, step in (
        (gradients + 2 * result, lambda: hard_negative_loss(x, y, 20.0, k=k).backward()),
        (result, lambda: hardest_negatives(x.detach(), y.detach(), k)),
    ):
        x.grad = y.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before - kept < 200 * 2**20


def test_the_loss_waits_for_no_device():
    x, y = (torch.randn(512, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    scale = torch.tensor([20.0], device="cuda", requires_grad=True)
    hard_negative_loss(x, y, scale, k=8).backward()  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        hard_negative_loss(x, y, scale, k=8).backward()
        hard_negative_loss(x, y, scale, k=100).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
