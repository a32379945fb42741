"""SigLIP's pairwise sigmoid loss over the whole contrastive batch, exact, in linear memory."""

from typing import Any

from torch import Tensor, nn

from hf_infcl.losses import checks
from hf_infcl.losses.options import shown
from hf_infcl.ring import Spec
from hf_infcl.ring import sigmoid_loss as ring_sigmoid_loss

_CITATION = """
@inproceedings{zhai2023sigmoid,
  title = {Sigmoid Loss for Language Image Pre-Training},
  author = {Zhai, Xiaohua and Mustafa, Basil and Kolesnikov, Alexander and Beyer, Lucas},
  booktitle = {International Conference on Computer Vision},
  year = {2023}
}
"""


def sigmoid_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    block_size: int | None = None,
    group: Any = None,
    backend: str = "auto",
    precision: str = "auto",
) -> Tensor:
    """SigLIP's loss, -sum_ij log sigmoid(z_ij (s x_i.y_j + b)) / n, without the N x N similarity matrix.

    Args:
        image_embeds: (n, d) image embeddings, used as given. Any n, d >= 1, any stride; float32, float16, bfloat16, or
            float64 (PyTorch backend).
        text_embeds: (n, d), same dtype and device; row i is the pair of image i.
        logit_scale: the multiplier s itself, already exponentiated, finite and > 0: a number or a one-element tensor.
        logit_bias: b, finite: a number or a one-element tensor. Tensors get their gradients.
        ids: (n,) or (n, m) integers; other rows that agree in any column are left out.
        block_size, group, backend, precision: as in `hf_infcl.contrastive_loss`.

    Returns:
        The loss, a float32 scalar (float64 for float64 embeddings). z is +1 on pairs and -1 elsewhere.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or value, named in the message.

    Example:
        >>> import torch
        >>> from hf_infcl import sigmoid_loss
        >>> round(float(sigmoid_loss(torch.zeros(4, 8), torch.zeros(4, 8), 10.0, 0.0)), 6)  # 4 ln 2
        2.772589

    Source: SigLIP (arXiv 2303.15343), equation 1.
    """
    checks.check_pairs(image_embeds, text_embeds)
    checks.check_options(block_size=block_size, backend=backend, precision=precision)
    scale = checks.scalar("logit_scale", logit_scale, image_embeds, positive=True)
    bias = checks.scalar("logit_bias", logit_bias, image_embeds, positive=False)
    spec = Spec(block_size=block_size, group=group, backend=backend, precision=precision)
    known = checks.check_ids("ids", ids, image_embeds)
    return ring_sigmoid_loss(image_embeds, text_embeds, scale, bias, known, spec)


class SigmoidLoss(nn.Module):
    """`sigmoid_loss` as a module: every pair of the batch judged on its own, as SigLIP does.

    It needs a bias besides the scale, works from a batch of one on, and gains less from large batches than
    `ContrastiveLoss`. Use it to go on training a SigLIP model.

    Args:
        block_size, group, backend, precision: as in `hf_infcl.contrastive_loss`.

    Inputs:
        ==============  ==========  ======================================
        image_embeds    (n, d)      normalised image embeddings
        text_embeds     (n, d)      normalised text embeddings, row by row
        logit_scale     () or (1,)  multiplier, already exponentiated
        logit_bias      () or (1,)  bias; required
        ids             (n[, m])    optional
        ==============  ==========  ======================================

    Raises:
        ValueError: an option of the wrong value, when the module is made; ``logit_bias`` missing, when it is called.

    Example:
        >>> import torch
        >>> from hf_infcl import SigmoidLoss
        >>> embeds = torch.nn.functional.normalize(torch.randn(4, 8), dim=-1)
        >>> SigmoidLoss()(embeds, embeds, 10.0, -10.0).shape
        torch.Size([])

    Source: SigLIP (arXiv 2303.15343).
    """

    citation = _CITATION

    def __init__(
        self, *, block_size: int | None = None, group: Any = None, backend: str = "auto", precision: str = "auto"
    ):
        super().__init__()
        checks.check_options(block_size=block_size, backend=backend, precision=precision)
        self.block_size, self.group, self.backend, self.precision = block_size, group, backend, precision

    def forward(
        self,
        image_embeds: Tensor,
        text_embeds: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        *,
        ids: Tensor | None = None,
    ) -> Tensor:
        if logit_bias is None:
            raise ValueError(
                "logit_bias must be given to SigmoidLoss, got None; a model without one needs ContrastiveLoss"
            )
        return sigmoid_loss(
            image_embeds, text_embeds, logit_scale, logit_bias, ids=ids, group=self.group, **self.get_config_dict()
        )

    def extra_repr(self) -> str:
        return shown(self.get_config_dict())

    def get_config_dict(self) -> dict[str, Any]:
        """The options that shape the loss, for a model card."""
        return {"block_size": self.block_size, "backend": self.backend, "precision": self.precision}
