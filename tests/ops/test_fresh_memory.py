"""What others left in memory that is only allocated reaches no result: NaN there changes no bit."""

import pytest
import torch

from hf_infcl import contrastive_loss, hard_negative_loss, hardest_negatives, sigmoid_loss
from hf_infcl.ops.dispatch import triton_installed
from tests.oracles import pairs

pytestmark = pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def poison(monkeypatch):
    def filled(allocate):
        def call(*args, **kwargs):
            made = allocate(*args, **kwargs)
            return made.fill_(torch.nan if made.is_floating_point() else 7)

        return call

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


def results(loss, dtype, wanted, options):
    n, d = 43, 16  # rows of G do not fill 16 bytes, those of the embeddings do
    x, y = (side.to(DEVICE, dtype) for side in pairs("trained", n, d))
    leaves = [t.clone().requires_grad_(want) for t, want in zip((x, y), wanted, strict=True)]
    leaves.append(torch.tensor(20.0, device=DEVICE, requires_grad=True))
    if loss is sigmoid_loss:
        leaves.append(torch.tensor(-5.0, device=DEVICE, requires_grad=True))
    if options.get("ids"):
        options = options | {"ids": torch.arange(n, device=DEVICE) % 30}
    value = loss(*leaves, backend="triton", **options)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


SIDES = [(True, True), (False, True), (True, False)]
CASES = [
    *((contrastive_loss, {}, wanted) for wanted in SIDES),
    *((contrastive_loss, {"fused": 0}, wanted) for wanted in SIDES),
    *((contrastive_loss, {"block_size": 27}, wanted) for wanted in SIDES),
    (contrastive_loss, {"block_size": 27, "ids": True, "label_smoothing": 0.1}, SIDES[0]),
    (contrastive_loss, {"direction": "image_to_text", "ids": True, "duplicates": "positive"}, SIDES[0]),
    *((sigmoid_loss, {"block_size": 27, "ids": True}, wanted) for wanted in SIDES),
    (hard_negative_loss, {"k": 4}, SIDES[0]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("loss", "options", "wanted"), CASES)
def test_nothing_is_read_before_it_is_written(monkeypatch, loss, options, dtype, wanted):
    from hf_infcl.ops.triton import whole

    options = dict(options)
    monkeypatch.setattr(whole, "_LARGEST_FUSED", options.pop("fused", whole._LARGEST_FUSED))
    expected = results(loss, dtype, wanted, options)
    poison(monkeypatch)
    found = results(loss, dtype, wanted, options)
    assert all(tensor.isfinite().all() for tensor in expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "sampled"), [(4, None), (66, None), (30, (3, 20)), (30, (3, 2)), (66, (2, 50))])
def test_a_search_reads_nothing_before_it_is_written(monkeypatch, k, sampled, dtype):
    """In registers, in buffers, and by a bound: one that is reached by enough, and one that is not."""
    from hf_infcl.ops.triton import topk

    monkeypatch.setattr(topk, "sampling", lambda k, n_cols: sampled)
    monkeypatch.setattr(topk, "_TILES_PER_SEGMENT", 1)
    queries, keys = (side.to(DEVICE, dtype) for side in (pairs("trained", 5, 16)[0], pairs("trained", 150, 16, 1)[1]))
    expected = hardest_negatives(queries, keys, k, backend="triton")
    poison(monkeypatch)
    found = hardest_negatives(queries, keys, k, backend="triton")
    assert expected[0].isfinite().all()
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(one, other)
