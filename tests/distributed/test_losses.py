"""Every loss over 1 to 4 processes with uneven shards against the float64 oracle of the whole batch."""

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_infcl import MemoryBank, contrastive_loss, sigmoid_loss
from tests import oracles
from tests.processes import run_processes

pytestmark = pytest.mark.distributed

PATHS = {"hop": "0", "gather": "1000000"}
SIZES, BANK_SIZES = (5, 1, 7, 3), (2, 0, 3, 1)
D, SCALE, BIAS = 6, 9.0, -3.0


def forced_paths() -> Iterator[str]:
    for name, limit in PATHS.items():
        os.environ["HF_INFCL_GATHER_BELOW"] = limit
        yield name


class Batch:
    """The global batch in float64, and this rank's part of it."""

    def __init__(self, rank: int, world_size: int, dtype: torch.dtype = torch.float32):
        sizes, bank_sizes = SIZES[:world_size], BANK_SIZES[:world_size]
        self.rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        self.bank_rows = slice(sum(bank_sizes[:rank]), sum(bank_sizes[: rank + 1]))
        self.dtype, self.world_size = dtype, world_size
        generator = torch.Generator().manual_seed(1)
        n, p = sum(sizes), sum(bank_sizes)
        self.images, self.texts = (side.to(dtype).double() for side in oracles.pairs("trained", n, D))
        self.bank = tuple(side.to(dtype).double() for side in oracles.pairs("random", p, D, 5))
        self.ids = torch.randint(0, 6, (n, 2), generator=generator)
        self.bank_ids = torch.randint(0, 6, (p, 2), generator=generator)

    def leaves(self, scalars: list[float]) -> tuple[list[Tensor], list[Tensor]]:
        """The oracle's (the whole batch), and this rank's."""
        exact = [side.clone().requires_grad_() for side in (self.images, self.texts)]
        exact += [torch.tensor(value).double().requires_grad_() for value in scalars]
        own = [side[self.rows].to(self.dtype).requires_grad_() for side in (self.images, self.texts)]
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        own += [torch.tensor([value], dtype=wide, requires_grad=True) for value in scalars]
        return exact, own

    def own_bank(self) -> MemoryBank | None:
        images, texts = (side[self.bank_rows].to(self.dtype) for side in self.bank)
        if len(images) == 0:
            return None
        bank = MemoryBank(10, D, dtype=self.dtype, group=False)
        bank.push(images, texts, self.bank_ids[self.bank_rows])
        return bank

    def check(self, expected: Tensor, loss: Tensor, exact: list[Tensor], own: list[Tensor], tolerance: float) -> None:
        """Value, gradients at the embeddings (W times the mean's) and at the scalars (the mean's own)."""
        expected.backward()
        loss.backward()
        close = dict(rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(loss.double(), expected.detach(), **close)
        for mine, reference in zip(own[:2], exact[:2], strict=True):
            assert mine.grad.dtype == self.dtype
            torch.testing.assert_close(mine.grad.double(), self.world_size * reference.grad[self.rows], **close)
        for mine, reference in zip(own[2:], exact[2:], strict=True):
            torch.testing.assert_close(mine.grad.double(), reference.grad.reshape(1), **close)


def contrastive_case(batch: Batch, ids: bool, with_bank: bool, tolerance: float = 2e-5, **options) -> Tensor:
    exact, own = batch.leaves([SCALE])
    known = batch.ids if ids else None
    bank = (*batch.bank, batch.bank_ids) if with_bank else None
    meaning = {name: value for name, value in options.items() if name not in ("backend", "block_size")}
    expected = oracles.contrastive(*exact, ids=known, bank=bank, **meaning)
    own_bank = batch.own_bank() if with_bank else None
    loss = contrastive_loss(*own, ids=None if known is None else known[batch.rows], bank=own_bank, **options)
    batch.check(expected, loss, exact, own, tolerance)
    return loss.detach()


CONTRASTIVE = [
    dict(direction=direction, duplicates=duplicates, label_smoothing=smoothing, with_bank=bank)
    for direction, duplicates, smoothing, bank in itertools.product(
        ("both", "image_to_text", "text_to_image"), ("mask", "positive", "keep"), (0.0, 0.1), (False, True)
    )
]


def sigmoid_case(batch: Batch, ids: bool, **options) -> Tensor:
    exact, own = batch.leaves([SCALE, BIAS])
    known = batch.ids if ids else None
    expected = oracles.sigmoid(*exact, ids=known)
    loss = sigmoid_loss(*own, ids=None if known is None else known[batch.rows], **options)
    batch.check(expected, loss, exact, own, 2e-5)
    return loss.detach()


def _all_losses(rank: int, world_size: int) -> list[float]:
    batch = Batch(rank, world_size)
    values = []
    for _ in forced_paths():
        for options in CONTRASTIVE:
            values.append(contrastive_case(batch, ids=True, **options).item())
        values.append(contrastive_case(batch, ids=False, with_bank=False).item())
        values.append(sigmoid_case(batch, ids=False).item())
        values.append(sigmoid_case(batch, ids=True).item())
    return values


def test_one_process_matches_float64(monkeypatch):
    monkeypatch.setenv("HF_INFCL_GATHER_BELOW", "")  # restored afterwards
    _all_losses(0, 1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_uneven_shards_match_float64(world_size):
    by_rank = run_processes(_all_losses, world_size)
    assert all(values == by_rank[0] for values in by_rank)  # the same bits everywhere


TOLERANCES = {torch.float64: 1e-10, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def _other_dtypes(rank: int, world_size: int) -> None:
    for _, (dtype, tolerance) in itertools.product(forced_paths(), TOLERANCES.items()):
        contrastive_case(Batch(rank, world_size, dtype), ids=True, with_bank=True, tolerance=tolerance)


def _views_and_blocks(rank: int, world_size: int) -> None:
    batch = Batch(rank, world_size)
    expected = oracles.contrastive(batch.images, batch.texts, torch.tensor(SCALE), ids=batch.ids)
    for _, block_size in itertools.product(forced_paths(), (1, 2, 100)):
        images, texts = (side[batch.rows].float() for side in (batch.images, batch.texts))
        wide = torch.full((2 * len(images), 2 * D), torch.nan)
        wide[::2, ::2] = images
        ids = batch.ids.T.contiguous().T[batch.rows]
        loss = contrastive_loss(wide[::2, ::2], texts.T.contiguous().T, SCALE, ids=ids, block_size=block_size)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


def _only_wanted_gradients(rank: int, world_size: int) -> None:
    batch = Batch(rank, world_size)
    for _, wanted in itertools.product(forced_paths(), ((True, False), (False, True), (False, False))):
        exact, own = batch.leaves([SCALE])
        for side, needed in enumerate(wanted):
            own[side].requires_grad_(needed)
        oracles.contrastive(*exact).backward()
        contrastive_loss(*own).backward()
        for mine, reference, needed in zip(own, exact, wanted, strict=False):
            assert (mine.grad is not None) == needed
            if needed:
                expected = world_size * reference.grad[batch.rows]
                torch.testing.assert_close(mine.grad.double(), expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(own[2].grad[0].double(), exact[2].grad, rtol=2e-5, atol=2e-5)


def _same_bits_again(rank: int, world_size: int) -> None:
    batch = Batch(rank, world_size)
    for _ in forced_paths():
        runs = []
        for _ in range(3):
            _, own = batch.leaves([SCALE])
            loss = contrastive_loss(*own, ids=batch.ids[batch.rows], label_smoothing=0.1)
            runs.append((loss, *torch.autograd.grad(loss, own)))
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def _groups(rank: int, world_size: int) -> None:
    batch = Batch(rank, world_size)
    images, texts = (side[batch.rows] for side in (batch.images, batch.texts))
    alone = contrastive_loss(images, texts, SCALE, group=False)
    torch.testing.assert_close(alone, oracles.contrastive(images, texts, torch.tensor(SCALE)))
    everyone: list[Tensor | None] = [None] * world_size
    dist.all_gather_object(everyone, (images, texts))
    # Ranks 3 and 1 by themselves, beside 0 and 2: neither default group nor default order.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    members, group = ([0, 2], groups[0]) if rank in (0, 2) else ([1, 3], groups[1])
    together = [torch.cat([everyone[member][side] for member in members]) for side in (0, 1)]
    expected = oracles.contrastive(*together, torch.tensor(SCALE))
    for _ in forced_paths():
        torch.testing.assert_close(contrastive_loss(images, texts, SCALE, group=group), expected)
    with pytest.raises(ValueError, match="group: this process is not a member"):
        contrastive_loss(images, texts, SCALE, group=groups[1] if rank in (0, 2) else groups[0])


def _compiled(rank: int, world_size: int) -> None:
    batch = Batch(rank, world_size)
    _, own = batch.leaves([SCALE])

    def step(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        return contrastive_loss(images * 1.0, texts, scale)

    eager = torch.autograd.grad(step(*own), own)
    compiled = torch.autograd.grad(torch.compile(step, backend="eager")(*own), own)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def _gradients_that_travel_in_bf16(rank: int, world_size: int) -> None:
    """They cost no more than their rounding."""
    rows, d = 128, 32
    os.environ["HF_INFCL_GATHER_BELOW"] = "0"
    x, y = (side.bfloat16() for side in oracles.pairs("trained", rows * world_size, d))
    exact = [side.double().requires_grad_() for side in (x, y)]
    oracles.contrastive(*exact, torch.tensor(SCALE)).backward()
    own = slice(rank * rows, (rank + 1) * rows)
    errors = []
    for switch in ("0", "1"):
        os.environ["HF_INFCL_BF16_GRADIENTS"] = switch
        texts = y[own].clone().requires_grad_()
        contrastive_loss(x[own], texts, SCALE).backward()
        reference = world_size * exact[1].grad[own]
        errors.append(((texts.grad.double() - reference).norm() / reference.norm()).item())
    del os.environ["HF_INFCL_BF16_GRADIENTS"]
    exact_travel, rounded = errors
    # bf16 keeps 8 bits: the result itself is rounded to 2^-9 at worst, and so is the sum on each of three hops.
    assert exact_travel < 2**-8.5
    assert exact_travel < rounded < 2 * 2**-8.5


def _everything_else(rank: int, world_size: int) -> None:
    for case in (
        _other_dtypes,
        _views_and_blocks,
        _only_wanted_gradients,
        _same_bits_again,
        _gradients_that_travel_in_bf16,
        _groups,
        _compiled,
    ):
        torch.manual_seed(0)
        case(rank, world_size)


def test_dtypes_views_gradients_groups_and_compile():
    run_processes(_everything_else, 4)
