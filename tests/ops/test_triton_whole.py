"""The short way of a batch that fits in one chunk: the whole loss against float64, with every option."""

import pytest
import torch

from hf_infcl.ops.dispatch import triton_installed
from tests.comparisons import compare
from tests.oracles import pairs

pytestmark = pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (1, {}),
        (33, {}),
        (40, {"direction": "image_to_text"}),
        (40, {"direction": "text_to_image", "label_smoothing": 0.1}),
        (33, {"ids": True}),
        (33, {"ids": True, "duplicates": "positive", "label_smoothing": 0.1}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_float64(n, options, dtype):
    options = dict(options)
    if options.pop("ids", False):
        options["ids"] = torch.randint(0, 20, (n, 2))
    compare(*pairs("trained", n, 20), 20.0, dtype=dtype, device=DEVICE, backend="triton", **options)


def test_a_loss_in_more_parts_than_are_added_up_at_a_time(monkeypatch):
    from hf_infcl.ops.triton import whole

    monkeypatch.setattr(whole, "_MERGE_ROWS", 2)
    compare(*pairs("trained", 290, 20), 20.0, dtype=torch.bfloat16, device=DEVICE, backend="triton")


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float64])
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("loss", ["contrastive", "bands", "sigmoid", "hard negatives"])
@pytest.mark.parametrize("wanted", [(True, True), (False, True)], ids=["", "frozen images"])
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_torchs_default_dtype_changes_nothing(monkeypatch, default_dtype, loss, wanted, block_size, backend):
    from functools import partial

    from hf_infcl import contrastive_loss, hard_negative_loss, sigmoid_loss
    from hf_infcl.ops.triton import whole

    if loss == "bands":
        monkeypatch.setattr(whole, "_LARGEST_FUSED", 0)
        monkeypatch.setattr(whole, "_BAND", 64)
    function = {
        "sigmoid": partial(sigmoid_loss, logit_bias=-3.0),
        "hard negatives": partial(hard_negative_loss, k=3),
    }.get(loss, contrastive_loss)
    dtype = torch.bfloat16 if loss == "bands" else torch.float32
    x, y = (side.to(DEVICE, dtype) for side in pairs("trained", 33, 16))

    def step():
        a, b = (t.clone().requires_grad_(want) for t, want in zip((x, y), wanted, strict=True))
        scale = torch.tensor(9.0, device=DEVICE, dtype=torch.float32, requires_grad=True)
        value = function(a, b, logit_scale=scale, block_size=block_size, backend=backend)
        value.backward()
        return [t for t in (value.detach(), a.grad, b.grad, scale.grad) if t is not None]

    found = step()
    torch.set_default_dtype(torch.float32)
    for one, expected in zip(found, step(), strict=True):
        assert one.dtype == expected.dtype
        assert torch.equal(one, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["identical", "opposite"])
def test_equal_rows_leave_no_gradient_behind(kind, dtype):
    """Where G's rows sum to nothing, rounding G once would leave errors that all point one way."""
    compare(*pairs(kind, 35, 7), 50.0, dtype=dtype, device=DEVICE, backend="triton")


@pytest.mark.parametrize(
    "options", [{}, {"direction": "text_to_image", "label_smoothing": 0.1}, {"direction": "image_to_text"}]
)
@pytest.mark.parametrize("band", [64, 2**26], ids=["bands", "one band"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bands_of_gradients_match_float64(monkeypatch, dtype, band, options):
    """As of more than 4,096 pairs: G in as many rows at a time as fit."""
    from hf_infcl.ops.triton import whole

    monkeypatch.setattr(whole, "_LARGEST_FUSED", 0)
    monkeypatch.setattr(whole, "_BAND", band)
    compare(*pairs("trained", 43, 20), 20.0, dtype=dtype, device=DEVICE, backend="triton", **options)


@pytest.mark.parametrize("scale", [20.0, 5000.0])
@pytest.mark.parametrize("direction", ["both", "image_to_text", "text_to_image"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_shared_exponential_matches_float64(monkeypatch, dtype, direction, scale):
    """As of more than 8,192 pairs. At the higher scale sums flush to nothing: their tiles go to the second launch."""
    from hf_infcl.ops.triton import whole

    monkeypatch.setattr(whole, "_LARGEST_EXACT", 0)
    compare(*pairs("trained", 143, 20), scale, dtype=dtype, device=DEVICE, backend="triton", direction=direction)


@pytest.mark.parametrize("kept", [64, 2**26], ids=["a band", "all"])
def test_gradients_from_exponentials_that_were_kept(monkeypatch, kept):
    """Also where tiles hold rows far apart, whose exponentials are of no use, and are made from the product again."""
    from hf_infcl.ops.triton import whole

    monkeypatch.setattr(whole, "_LARGEST_EXACT", 0)
    monkeypatch.setattr(whole, "_LARGEST_FUSED", 0)
    monkeypatch.setattr(whole, "_KEPT_BAND", kept)
    monkeypatch.setattr(whole, "_SHALLOW", 0)
    made = []
    reweigh = whole.Batch._reweigh
    monkeypatch.setattr(whole.Batch, "_reweigh", lambda *given: made.append(len(given[1])) or reweigh(*given))
    for kind, scale, direction, shrunk in (
        ("trained", 50.0, "both", 0), ("random", 100.0, "image_to_text", 0), ("opposite", 14.0, "text_to_image", 0),
        ("trained", 2000.0, "both", 0), ("trained", 100.0, "both", 32),
    ):  # fmt: skip
        options = {"dtype": torch.bfloat16, "device": DEVICE, "backend": "triton", "direction": direction}
        x, y = pairs(kind, 150, 20)
        x[:shrunk] *= 0.05  # tiles of some rows and not of others
        compare(x, y, scale, **options)
    assert len(made) == 5
    # On a GPU a band is 1,024 rows at least.
    assert (max(made) == 150) == (kept > 150**2 or DEVICE == "cuda")


@pytest.mark.parametrize("band", [64, 2**26], ids=["bands", "one band"])
def test_bands_of_a_frozen_side_give_the_scale_the_same_gradient(monkeypatch, band):
    from hf_infcl import contrastive_loss
    from hf_infcl.ops.triton import whole

    monkeypatch.setattr(whole, "_BAND", band)
    x, y = (side.to(DEVICE, torch.bfloat16) for side in pairs("trained", 43, 16))
    gradients = []
    for fused, wanted in ((2048, (True, True)), (0, (True, True)), (0, (False, True)), (0, (True, False))):
        monkeypatch.setattr(whole, "_LARGEST_FUSED", fused)
        a, b = (t.clone().requires_grad_(want) for t, want in zip((x, y), wanted, strict=True))
        s = torch.tensor(20.0, device=DEVICE, requires_grad=True)
        contrastive_loss(a, b, s, backend="triton").backward()
        gradients.append(s.grad)
        assert (a.grad is not None, b.grad is not None) == wanted
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_frozen_side_gets_the_scale_the_same_gradient(backend, block_size):
    from hf_infcl import contrastive_loss

    x, y = (side.to(DEVICE, torch.float32) for side in pairs("trained", 33, 16))
    gradients = []
    for wanted in ((True, True), (False, True), (True, False)):
        a, b = (t.clone().requires_grad_(want) for t, want in zip((x, y), wanted, strict=True))
        s = torch.tensor(20.0, device=DEVICE, requires_grad=True)
        contrastive_loss(a, b, s, backend=backend, block_size=block_size).backward()
        gradients.append(s.grad)
        assert (a.grad is not None, b.grad is not None) == wanted
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("precision", "block_size", "copies", "options"),
    [
        ("tf32", 64, "few", {}),
        ("tf32", 48, "few", {"label_smoothing": 0.1}),
        ("tf32", 64, "many", {}),
        ("tf32", 48, "many", {"duplicates": "positive", "label_smoothing": 0.1}),
        ("ieee", 48, "few", {}),
        ("ieee", 64, "many", {"duplicates": "positive", "label_smoothing": 0.1}),
    ],
)
def test_chunks_with_ids_match_float64(precision, block_size, copies, options):
    """Chunks that begin on the map's cells and such that do not; copies that the map lists, and that are compared."""
    n = 110
    tolerance = 5e-3 if precision == "tf32" and DEVICE == "cuda" else None
    ids = torch.randint(0, 120, (n, 2))
    if copies == "few":
        ids = torch.arange(2 * n).view(n, 2)
        ids[[3, n - 1, 70, 71], [0, 1, 0, 1]] = ids[[100, 5, 10, 20], [0, 1, 0, 1]]  # the last two meet in one cell
    compare(
        *pairs("trained", n, 16), 2.0, device=DEVICE, backend="triton", ids=ids, block_size=block_size,
        precision=precision, tolerance=tolerance, value_tolerance=tolerance or 1e-5, **options,
    )  # fmt: skip


def test_a_gradient_made_ahead_is_scaled_by_what_comes_in():
    from hf_infcl import contrastive_loss

    x, y = (side.to(DEVICE, torch.float32) for side in pairs("trained", 33, 16))
    found = []
    for factor in (1.0, 3.0):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        s = torch.tensor([20.0], device=DEVICE, requires_grad=True)
        loss = factor * contrastive_loss(a, b, s, backend="triton")
        first = torch.autograd.grad(loss, (a, b, s), retain_graph=True)
        for once, twice in zip(first, torch.autograd.grad(loss, (a, b, s)), strict=True):
            torch.testing.assert_close(once, twice, rtol=0, atol=0)
        found.append(first)
    for one, three in zip(*found, strict=True):
        torch.testing.assert_close(3 * one, three)


def test_without_autograd_no_gradient_is_made(monkeypatch):
    from hf_infcl import contrastive_loss
    from hf_infcl.ops.triton import whole

    def made(*_):
        raise AssertionError("a gradient was made")

    monkeypatch.setattr(whole.Batch, "gradients", made)
    x, y = (side.to(DEVICE, torch.float32).requires_grad_() for side in pairs("trained", 8, 16))
    with torch.no_grad():
        contrastive_loss(x, y, 20.0, backend="triton")
    contrastive_loss(x.detach(), y.detach(), 20.0, backend="triton")
    with pytest.raises(AssertionError, match="a gradient was made"):
        contrastive_loss(x, y, 20.0, backend="triton")


@pytest.mark.parametrize("kept", [2**7, 2**14], ids=["keeps a band", "keeps all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_looked_up_alike_are_compiled_alike(monkeypatch, dtype, kept):
    """What Triton specialises on has to follow from a launch's `kind`, over sizes that take other ways."""
    from hf_infcl import contrastive_loss
    from hf_infcl.ops.triton import launch as launching
    from hf_infcl.ops.triton import whole

    traits = {}

    def launch(kernel, device, programs, values, constants, warps, stages, kind=None):
        names = kernel.arg_names[: len(values)]
        options = getattr(kernel, "kwargs", None)  # an interpreted kernel's
        free = (kernel.do_not_specialize if options is None else options.get("do_not_specialize")) or ()
        seen = [launching._trait(value) for name, value in zip(names, values, strict=True) if name not in free]
        key = kernel, constants, warps, stages, kind
        assert kind is None or traits.setdefault(key, seen) == seen, names

    monkeypatch.setattr(whole, "launch", launch)
    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr(
        whole, "matmul", lambda a, b, *_, out=None, add=True: a.float() @ b.float() if out is None else out
    )
    monkeypatch.setattr(whole, "_LARGEST_EXACT", 110)
    monkeypatch.setattr(whole, "_LARGEST_FUSED", 110)
    monkeypatch.setattr(whole, "_KEPT_BAND", kept)
    monkeypatch.setattr(whole, "_SHALLOW", 0)
    monkeypatch.setattr(whole, "_LARGEST_SPLIT", 50)
    for n in (16, 24, 40, 49, 65, 104, 120, 128, 136, 137, 144, 152):
        x, y = (side.to(DEVICE, dtype).requires_grad_() for side in pairs("random", n, 16))
        contrastive_loss(x, y, torch.tensor(10.0, device=DEVICE, requires_grad=True), backend="triton")
    assert any(key[-1] is not None for key in traits)
