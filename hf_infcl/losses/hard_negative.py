"""InfoNCE over the positive and the k hardest negatives of every anchor, exactly selected, in linear memory."""

import logging
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from hf_infcl.losses import checks
from hf_infcl.losses.memory_bank import MemoryBank, check_bank
from hf_infcl.losses.options import shown
from hf_infcl.ring import HardNegativeCounts, HardNegativeSpec, World
from hf_infcl.ring import hard_negative_loss as ring_hard_negative_loss

logger = logging.getLogger(__name__)

_CITATION = """
@inproceedings{robinson2021contrastive,
  title = {Contrastive Learning with Hard Negative Samples},
  author = {Robinson, Joshua and Chuang, Ching-Yao and Sra, Suvrit and Jegelka, Stefanie},
  booktitle = {International Conference on Learning Representations},
  year = {2021}
}
@inproceedings{xiong2021approximate,
  title = {Approximate Nearest Neighbor Negative Contrastive Learning for Dense Text Retrieval},
  author = {Xiong, Lee and Xiong, Chenyan and Li, Ye and Tang, Kwok-Fung and Liu, Jialin and Bennett, Paul and
            Ahmed, Junaid and Overwijk, Arnold},
  booktitle = {International Conference on Learning Representations},
  year = {2021}
}
"""


@overload
def hard_negative_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    *,
    k: int,
    ids: Tensor | None = ...,
    bank: MemoryBank | None = ...,
    direction: str = ...,
    block_size: int | None = ...,
    group: Any = ...,
    backend: str = ...,
    precision: str = ...,
    return_stats: Literal[False] = ...,
    absolute_margin: float | None = ...,
    relative_margin: float | None = ...,
    max_score: float | None = ...,
) -> Tensor: ...


@overload
def hard_negative_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    *,
    k: int,
    ids: Tensor | None = ...,
    bank: MemoryBank | None = ...,
    direction: str = ...,
    block_size: int | None = ...,
    group: Any = ...,
    backend: str = ...,
    precision: str = ...,
    return_stats: Literal[True],
    absolute_margin: float | None = ...,
    relative_margin: float | None = ...,
    max_score: float | None = ...,
) -> tuple[Tensor, dict[str, Tensor]]: ...


def hard_negative_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    *,
    k: int,
    ids: Tensor | None = None,
    bank: MemoryBank | None = None,
    direction: str = "both",
    block_size: int | None = None,
    group: Any = None,
    backend: str = "auto",
    precision: str = "auto",
    return_stats: bool = False,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    max_score: float | None = None,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """InfoNCE whose softmax runs over each anchor's positive and its k hardest negatives only.

    The hardest negatives are the k highest scores over the whole global batch and the bank, less the anchor's pair and
    the rows that are the same by ``ids``; ties go to the lower global index (the bank comes after the batch, oldest
    entries first). They are exactly those that a top-k of the whole similarity matrix takes, which is never built.
    Only the pairs and the selected negatives get gradient. A ``k`` that covers every valid candidate gives
    `contrastive_loss`.

    Args:
        image_embeds: (n, d) image embeddings, used as given: normalise them first. Any n, d >= 1, any stride; float32,
            float16, bfloat16, or float64 (PyTorch backend).
        text_embeds: (n, d), same dtype and device; row i is the pair of image i.
        logit_scale: the multiplier s itself, already exponentiated, finite and > 0: a number or a one-element tensor,
            which gets its gradient.
        k: hardest negatives of each anchor, >= 1. Where an anchor has fewer valid candidates, it takes all of them.
        ids: (n,) or (n, m) integers. Two rows are the same if they agree in any column (say caption and image).
        bank: further negatives from earlier batches.
        direction: ``"both"``, ``"image_to_text"`` (images are anchors) or ``"text_to_image"``.
        block_size: columns that are searched at once; by default chosen for the device. Changes speed, memory and the
            skip ratio, never the selection.
        group, backend, precision: as in `hf_infcl.contrastive_loss`.
        return_stats: whether to return a dictionary of statistics besides.
        absolute_margin: candidates that score above pos - absolute_margin are held to be false negatives and left out;
            pos is the score x.y of the anchor's own pair, before the scale. None: off.
        relative_margin: likewise above pos - |pos| relative_margin.
        max_score: likewise above max_score.

    Returns:
        The loss, a float32 scalar (float64 for float64 embeddings); with ``return_stats`` also a dictionary of float32
        scalars over all anchors of the global batch:

        ===========================  ==================================================================
        row_skip_ratio               share of (anchor, block) pairs whose block could not hold one of the
                                     anchor's k hardest, so that it was not searched
        hardest_similarity           mean score x.y of the hardest negative (NaN if no anchor has one)
        hardest_beats_positive       share of anchors whose hardest negative scores above their pair
        bank_fill                    share of the bank that is filled (only with a bank)
        ===========================  ==================================================================

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or value, named in the message.

    Example:
        >>> import torch
        >>> from hf_infcl import hard_negative_loss
        >>> images = torch.nn.functional.normalize(torch.randn(8, 16), dim=-1).requires_grad_()
        >>> texts = torch.nn.functional.normalize(torch.randn(8, 16), dim=-1)
        >>> loss, stats = hard_negative_loss(images, texts, 14.3, k=3, return_stats=True)
        >>> loss.backward()
        >>> sorted(stats)
        ['hardest_beats_positive', 'hardest_similarity', 'row_skip_ratio']

    Source: hardest negatives of a large pool as in ANCE (arXiv 2007.00808); the margins as in NV-Retriever
    (arXiv 2407.15831), section 4.
    """
    checks.check_pairs(image_embeds, text_embeds)
    checks.check_options(direction=direction, block_size=block_size, backend=backend, precision=precision)
    checks.check_count("k", k)
    limits = checks.limits(absolute_margin, relative_margin, max_score)
    scale = checks.scalar("logit_scale", logit_scale, image_embeds, positive=True)
    known = checks.check_ids("ids", ids, image_embeds)
    check_bank(bank, image_embeds, known)
    filled = bank is not None and len(bank) > 0
    if not torch.compiler.is_compiling() and World.of(group).is_alone:
        most = len(image_embeds) - 1 + (0 if bank is None else bank.size)
        if k > most:
            _say_all_are_used(k, most)
    banks = (bank.image_embeds, bank.text_embeds, bank.ids) if filled and bank is not None else (None, None, None)
    spec = HardNegativeSpec("mask", 0.0, direction, block_size, group, backend, precision, k, limits)
    loss, counts = ring_hard_negative_loss(image_embeds, text_embeds, scale, known, banks, spec)
    if not return_stats:
        return loss
    return loss, _named(HardNegativeCounts(*counts.unbind()), bank)


_said: set[int] = set()


def _say_all_are_used(k: int, most: int) -> None:
    if k not in _said:
        _said.add(k)
        logger.info("k = %d is more than the %d negatives that an anchor can have: all of them are used", k, most)


def _named(counts: HardNegativeCounts, bank: MemoryBank | None) -> dict[str, Tensor]:
    stats = {
        "row_skip_ratio": counts.skipped / counts.met,
        "hardest_similarity": counts.hardest_sum / counts.with_negatives,
        "hardest_beats_positive": counts.beaten / counts.anchors,
    }
    if bank is not None:
        stats["bank_fill"] = counts.anchors.new_full((), bank.filled / bank.size)
    return {name: value.float() for name, value in stats.items()}


class HardNegativeLoss(nn.Module):
    """`hard_negative_loss` as a module: the positive against the k hardest negatives of the whole contrastive batch.

    With a large batch most negatives are easy and their gradients vanish; this spends the softmax on the hard ones. Use
    it late in training (see ``hard_negative_start`` of `InfCLConfig`): with an untrained model the hardest negatives
    are noise, and unlabelled copies of the positive are the hardest of all. Give ``ids`` or margins against those.

    Args:
        k: hardest negatives of each anchor.
        bank, direction, block_size, group, backend, precision, absolute_margin, relative_margin, max_score: as in
            `hard_negative_loss`.

    Attributes:
        last_stats: the statistics of the last call, as `hard_negative_loss` returns them; empty before the first.

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
        >>> from hf_infcl import HardNegativeLoss
        >>> loss = HardNegativeLoss(2)
        >>> embeds = torch.nn.functional.normalize(torch.randn(4, 8), dim=-1)
        >>> loss(embeds, embeds, torch.tensor(100.0)).shape
        torch.Size([])

    Source: as for `hard_negative_loss`.
    """

    citation = _CITATION

    def __init__(
        self,
        k: int,
        *,
        bank: MemoryBank | None = None,
        direction: str = "both",
        block_size: int | None = None,
        group: Any = None,
        backend: str = "auto",
        precision: str = "auto",
        absolute_margin: float | None = None,
        relative_margin: float | None = None,
        max_score: float | None = None,
    ):
        super().__init__()
        checks.check_count("k", k)
        checks.check_options(direction=direction, block_size=block_size, backend=backend, precision=precision)
        checks.limits(absolute_margin, relative_margin, max_score)
        self.k, self.bank, self.direction, self.block_size = k, bank, direction, block_size
        self.group, self.backend, self.precision = group, backend, precision
        self.absolute_margin, self.relative_margin, self.max_score = absolute_margin, relative_margin, max_score
        self.last_stats: dict[str, Tensor] = {}

    def forward(
        self,
        image_embeds: Tensor,
        text_embeds: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        *,
        ids: Tensor | None = None,
    ) -> Tensor:
        loss, self.last_stats = hard_negative_loss(
            image_embeds,
            text_embeds,
            logit_scale,
            ids=ids,
            bank=self.bank,
            group=self.group,
            return_stats=True,
            **self.get_config_dict(),
        )
        return loss

    def extra_repr(self) -> str:
        return shown(self.get_config_dict())

    def get_config_dict(self) -> dict[str, Any]:
        """The options that shape the loss, for a model card."""
        return {
            "k": self.k,
            "direction": self.direction,
            "block_size": self.block_size,
            "backend": self.backend,
            "precision": self.precision,
            "absolute_margin": self.absolute_margin,
            "relative_margin": self.relative_margin,
            "max_score": self.max_score,
        }
