"""The losses held against their dense float64 oracles: value and every gradient."""

import pytest
import torch

from hf_infcl import MemoryBank, contrastive_loss
from tests import oracles

SCALES = (1.0, 14.3, 50.0, 100.0)
KINDS = ("random", "trained", "identical", "opposite")
# Relative error of a gradient, in `oracles.gradient_error`'s measure.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-7}


def compare(
    x, y, scale, *, dtype=torch.float32, tolerance=None, value_tolerance=1e-5, bank=None, device="cpu", **options
):
    """`contrastive_loss` against the oracle, at embeddings rounded to `dtype` for both."""
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    x, y = x.to(dtype).double(), y.to(dtype).double()
    ids = options.get("ids")
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_(), torch.tensor(scale).double().requires_grad_()]
    oracle_options = {k: v for k, v in options.items() if k in ("ids", "duplicates", "direction", "label_smoothing")}
    expected = oracles.contrastive(*leaves, bank=bank, **oracle_options)
    expected.backward()
    mine = [x.to(device, dtype).requires_grad_(), y.to(device, dtype).requires_grad_()]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mine += [torch.tensor([scale]).to(device, wide).requires_grad_()]
    if bank is not None:
        options["bank"] = MemoryBank(len(bank[0]), x.shape[1], dtype=dtype, device=device)
        options["bank"].push(
            *(None if e is None else e.to(device) for e in (*bank[:2], bank[2] if ids is not None else None))
        )
    if ids is not None:
        options["ids"] = ids.to(device)
    loss = contrastive_loss(*mine, **options)
    loss.backward()
    assert loss.dtype == wide
    assert loss.item() == pytest.approx(expected.item(), rel=value_tolerance, abs=value_tolerance)
    for leaf, reference in zip(mine[:2], leaves[:2], strict=True):
        assert leaf.grad.dtype == dtype
        assert oracles.gradient_error(leaf.grad.cpu(), reference.grad, scale) < tolerance
    assert mine[2].grad.shape == (1,)
    assert mine[2].grad.item() == pytest.approx(leaves[2].grad.item(), rel=tolerance, abs=tolerance)
