"""The implementations that `benchmarks/loss.py` measures in one run: this project's, and its alternatives.

Each maker returns a function (images, texts, scale) -> scalar loss, or raises `Unavailable` with the reason.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
BIAS = -10.0  # where SigLIP starts


class Unavailable(Exception):
    """An implementation that cannot run here: not installed, or not made for this device or shape."""


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")


def ours(**options: object) -> Loss:
    """This project's loss with options of `hf_infcl.contrastive_loss`."""
    from hf_infcl import contrastive_loss

    return lambda x, y, s: contrastive_loss(x, y, s, group=False, **options)  # type: ignore[arg-type]


def dense(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    """The textbook loss: all logits in float32."""
    logits = (x @ y.T).float() * s
    labels = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def open_clip() -> Loss:
    _need("open_clip")
    from open_clip.loss import ClipLoss

    module = ClipLoss()
    return lambda x, y, s: module(x, y, s)


def memeff() -> Loss:
    _need("memeff")
    if not torch.cuda.is_available():
        raise Unavailable("memeff needs a CUDA device")
    from memeff import MemoryEfficientCLIPLoss

    made: dict[float, torch.nn.Module] = {}

    def loss(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        # Its temperature is a Python number, read here once per value and not per call.
        if not made:
            made[0] = MemoryEfficientCLIPLoss(temperature=1 / float(s), normalized_inputs=True, stable=False)
        return made[0](x, y)

    return loss


def inf_cl() -> Loss:
    _need("inf_cl")
    if not torch.cuda.is_available():
        raise Unavailable("inf-cl needs a CUDA device")
    from inf_cl import cal_flash_loss  # its ring needs a process group; for one process it has this

    return lambda x, y, s: (cal_flash_loss(x, y, scale=s) + cal_flash_loss(y, x, scale=s)).mean() / 2


def contrastive(name: str) -> Loss:
    """The InfoNCE implementation of a name."""
    if name == "hf_infcl":
        return ours()
    if name == "dense":
        return dense
    if name == "torch.compile":
        torch.compiler.reset()  # every shape is compiled anew; after eight it would silently run eagerly
        return torch.compile(dense, dynamic=False)
    makers = {"open_clip": open_clip, "memeff": memeff, "inf-cl": inf_cl}
    return makers[name]()


CONTRASTIVE = ("hf_infcl", "dense", "torch.compile", "open_clip", "memeff", "inf-cl")


def sigmoid(name: str) -> Loss:
    """The SigLIP implementation of a name; all start from the bias `BIAS`."""
    if name == "hf_infcl":
        from hf_infcl import sigmoid_loss

        return lambda x, y, s: sigmoid_loss(
            x, y, s, torch.full((), BIAS, device=x.device, requires_grad=True), group=False
        )
    if name in ("dense", "torch.compile"):

        def loss(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
            logits = (x @ y.T).float() * s + BIAS
            z = 2 * torch.eye(len(x), device=x.device) - 1
            return -F.logsigmoid(z * logits).sum() / len(x)

        if name == "dense":
            return loss
        torch.compiler.reset()
        return torch.compile(loss, dynamic=False)
    _need("siglip_kernel")
    if not torch.cuda.is_available():
        raise Unavailable("siglip-kernel needs a CUDA device")
    from siglip_kernel import fused_siglip_loss

    mode = name.partition(":")[2]
    return lambda x, y, s: fused_siglip_loss(
        x, y, s.log(), torch.full((), BIAS, device=x.device, requires_grad=True), backend=mode
    )


SIGMOID = (
    "hf_infcl",
    "dense",
    "torch.compile",
    "siglip-kernel:chunked_bf16",
    "siglip-kernel:chunked_bf16_pipelined",
    "siglip-kernel:chunked_epilogue",
    "siglip-kernel:hopper",
    "siglip-kernel:fused",
)
