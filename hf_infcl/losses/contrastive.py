"""Symmetric InfoNCE over the whole contrastive batch, exact, in linear memory."""

from typing import Any

from torch import Tensor, nn

from hf_infcl.losses import checks
from hf_infcl.losses.memory_bank import MemoryBank, check_bank
from hf_infcl.losses.options import shown
from hf_infcl.ring import Spec, softmax_loss

_CITATION = """
@article{cheng2024breaking,
  title = {Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss},
  author = {Cheng, Zesen and Zhang, Hang and Li, Kehan and Leng, Sicong and Hu, Zhiqiang and Wu, Fei and Zhao, Deli
            and Li, Xin and Bing, Lidong},
  journal = {arXiv preprint arXiv:2410.17243},
  year = {2024}
}
"""


def contrastive_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    *,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    bank: MemoryBank | None = None,
    direction: str = "both",
    label_smoothing: float = 0.0,
    block_size: int | None = None,
    group: Any = None,
    backend: str = "auto",
    precision: str = "auto",
) -> Tensor:
    """Symmetric InfoNCE, CLIP's loss, without the N x N similarity matrix.

    Row i's loss is the cross-entropy of the softmax over its candidates to its positives; the value is the mean over
    the rows of both directions. It equals the dense computation within 1e-6 relative in float32, in memory that grows
    with n d instead of n^2.

    Args:
        image_embeds: (n, d) image embeddings, used as given: normalise them first. Any n, d >= 1, any stride; float32,
            float16, bfloat16, or float64 (PyTorch backend).
        text_embeds: (n, d), same dtype and device; row i is the pair of image i.
        logit_scale: the multiplier s itself, already exponentiated, finite and > 0: a number or a one-element tensor,
            which gets its gradient.
        ids: (n,) or (n, m) integers. Two rows are the same if they agree in any column (say caption and image).
        duplicates: what becomes of the other rows that are the same as a row: ``"mask"`` leaves them out,
            ``"positive"`` shares the target among them, ``"keep"`` ignores ids.
        bank: further negatives from earlier batches.
        direction: ``"both"``, ``"image_to_text"`` (images are anchors) or ``"text_to_image"``.
        label_smoothing: e in [0, 1): the target is (1 - e) uniform(positives) + e uniform(candidates).
        block_size: rows and columns of a chunk; by default chosen for the device. Changes memory and speed only.
        group: the process group whose ranks share the batch; None: the default group where one is initialised;
            False: this process alone.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
        precision: of float32 products: ``"auto"`` (ieee), ``"ieee"``, ``"tf32"`` or ``"tf32x3"``.

    Returns:
        The loss, a float32 scalar (float64 for float64 embeddings). Gradients come back in the inputs' dtype.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or value, named in the message.

    Example:
        >>> import torch
        >>> from hf_infcl import contrastive_loss
        >>> images = torch.nn.functional.normalize(torch.randn(8, 16), dim=-1).requires_grad_()
        >>> texts = torch.nn.functional.normalize(torch.randn(8, 16), dim=-1)
        >>> contrastive_loss(images, texts, 14.3).backward()
        >>> images.grad.shape
        torch.Size([8, 16])

    Source: CLIP (arXiv 2103.00020), figure 3; Inf-CL (arXiv 2410.17243), equations 1 to 5.
    """
    checks.check_pairs(image_embeds, text_embeds)
    checks.check_options(
        direction=direction, duplicates=duplicates, block_size=block_size, backend=backend, precision=precision
    )
    checks.check_label_smoothing(label_smoothing)
    scale = checks.scalar("logit_scale", logit_scale, image_embeds, positive=True)
    known = None if duplicates == "keep" else checks.check_ids("ids", ids, image_embeds)
    check_bank(bank, image_embeds, checks.check_ids("ids", ids, image_embeds))
    filled = bank is not None and len(bank) > 0
    banks = (bank.image_embeds, bank.text_embeds, bank.ids) if filled and bank is not None else (None, None, None)
    spec = Spec(duplicates, float(label_smoothing), direction, block_size, group, backend, precision)
    return softmax_loss(image_embeds, text_embeds, scale, known, banks, spec)


class ContrastiveLoss(nn.Module):
    """`contrastive_loss` as a module: symmetric InfoNCE over the whole contrastive batch, exact, in linear memory.

    Every other pair of the batch is a negative, so quality rises with the batch; memory does not, since the similarity
    matrix is never built. For a budget of the hardest negatives only, see `HardNegativeLoss`; for pairwise sigmoid
    scores, which need no large batch, see `SigmoidLoss`.

    Args:
        duplicates, bank, direction, label_smoothing, block_size, group, backend, precision: as in `contrastive_loss`.
            Raise ``label_smoothing`` (0.1) where captions are noisy; use ``duplicates="positive"`` where many rows
            share a caption and copies should attract each other, ``"mask"`` where they should merely not repel.

    Inputs:
        ==============  ==========  ======================================
        image_embeds    (n, d)      normalised image embeddings
        text_embeds     (n, d)      normalised text embeddings, row by row
        logit_scale     () or (1,)  multiplier, already exponentiated
        logit_bias      ignored     softmax does not depend on it
        ids             (n[, m])    optional
        ==============  ==========  ======================================

    Raises:
        ValueError: an option of the wrong value, when the module is made.

    Example:
        >>> import torch
        >>> from hf_infcl import ContrastiveLoss
        >>> loss = ContrastiveLoss(label_smoothing=0.1)
        >>> embeds = torch.nn.functional.normalize(torch.randn(4, 8), dim=-1)
        >>> loss(embeds, embeds, torch.tensor(100.0)).shape
        torch.Size([])

    Source: CLIP (arXiv 2103.00020); Inf-CL (arXiv 2410.17243).
    """

    citation = _CITATION

    def __init__(
        self,
        *,
        duplicates: str = "mask",
        bank: MemoryBank | None = None,
        direction: str = "both",
        label_smoothing: float = 0.0,
        block_size: int | None = None,
        group: Any = None,
        backend: str = "auto",
        precision: str = "auto",
    ):
        super().__init__()
        checks.check_options(
            direction=direction, duplicates=duplicates, block_size=block_size, backend=backend, precision=precision
        )
        checks.check_label_smoothing(label_smoothing)
        self.duplicates, self.bank, self.direction, self.label_smoothing = duplicates, bank, direction, label_smoothing
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
        return contrastive_loss(
            image_embeds, text_embeds, logit_scale, ids=ids, bank=self.bank, group=self.group, **self.get_config_dict()
        )

    def extra_repr(self) -> str:
        return shown(self.get_config_dict())

    def get_config_dict(self) -> dict[str, Any]:
        """The options that shape the loss, for a model card."""
        return {
            "duplicates": self.duplicates,
            "direction": self.direction,
            "label_smoothing": self.label_smoothing,
            "block_size": self.block_size,
            "backend": self.backend,
            "precision": self.precision,
        }
