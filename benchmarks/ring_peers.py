"""The losses over several processes that `benchmarks/ring.py` measures beside this project's.

Each is a function (images, texts, scale) -> scalar that every process calls with its own rows.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from peers import Unavailable, _need
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

PEERS = ("gathered dense", "open_clip local", "memeff", "inf-cl")
NAMES = ("hf_infcl", "hf_infcl hop", "hf_infcl gather", *PEERS)


def gathered(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    """The textbook way: everybody gathers all embeddings, with gradient, and builds n x N logits in each direction."""
    all_x, all_y = (torch.cat(all_gather(side)) for side in (x, y))
    labels = torch.arange(len(x), device=x.device) + dist.get_rank() * len(x)
    return (F.cross_entropy((x @ all_y.T).float() * s, labels) + F.cross_entropy((y @ all_x.T).float() * s, labels)) / 2


def open_clip() -> Loss:
    _need("open_clip")
    from open_clip.loss import ClipLoss

    module = ClipLoss(True, True, rank=dist.get_rank(), world_size=dist.get_world_size())
    return lambda x, y, s: module(x, y, s)


def memeff(scale: float) -> Loss:
    _need("memeff")
    if not torch.cuda.is_available():
        raise Unavailable("memeff needs a CUDA device")
    from memeff import DistributedMemoryEfficientCLIPLoss

    module = DistributedMemoryEfficientCLIPLoss(temperature=1 / scale, normalized_inputs=True, stable=False)
    return lambda x, y, s: module(x, y)


def inf_cl() -> Loss:
    _need("inf_cl")
    if not torch.cuda.is_available():
        raise Unavailable("inf-cl needs a CUDA device")
    from inf_cl import cal_flash_loss, cal_inf_loss

    # Its ring sends to the next process even where that is itself; for one process it has this.
    loss = cal_inf_loss if dist.get_world_size() > 1 else cal_flash_loss
    # One value a row, or their mean.
    return lambda x, y, s: (loss(x, y, scale=s).mean() + loss(y, x, scale=s).mean()) / 2


def peer(name: str, scale: float) -> Loss:
    """The loss of a name."""
    if name == "gathered dense":
        return gathered
    if name == "memeff":
        return memeff(scale)
    return {"open_clip local": open_clip, "inf-cl": inf_cl}[name]()
