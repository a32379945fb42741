"""The loss that a configuration asks for."""

import logging
from typing import Any

from torch import nn

from hf_infcl import losses
from hf_infcl.losses import MemoryBank
from hf_infcl.models import Family
from hf_infcl.trainer.config import InfCLConfig

logger = logging.getLogger(__name__)

# A softmax over one candidate has nothing to learn from; the sigmoid loss does.
SOFTMAX_LOSS_TYPES = ("contrastive", "hard_negative")


def resolve_loss_type(args: InfCLConfig, family: Family) -> str:
    """The configured loss, or the one that the family was pretrained with."""
    return args.loss_type or family.default_loss_type


def build_loss(args: InfCLConfig, loss_type: str, *, bank: MemoryBank | None = None) -> nn.Module:
    """Returns the module of a loss type with the configuration's options.

    Raises:
        ValueError: an option of a value that the loss refuses.
    """
    shared: dict[str, Any] = {"backend": args.loss_backend, "precision": args.loss_precision}
    if loss_type == "contrastive":
        return losses.ContrastiveLoss(
            duplicates=args.duplicates,
            label_smoothing=args.label_smoothing_factor,
            bank=bank,
            block_size=args.loss_block_size,
            **shared,
        )
    if loss_type == "hard_negative":
        block_size = args.hard_negative_block_size or args.loss_block_size
        return losses.HardNegativeLoss(
            args.num_hard_negatives,
            bank=bank,
            block_size=block_size,
            absolute_margin=args.absolute_margin,
            relative_margin=args.relative_margin,
            max_score=args.max_score,
            **shared,
        )
    return losses.SigmoidLoss(block_size=args.loss_block_size, **shared)


def check_loss_options(args: InfCLConfig, loss_type: str) -> None:
    """Refuses options that the loss type has no use for: they would be ignored without a word.

    Raises:
        ValueError: names the option.
    """
    if loss_type == "sigmoid" and args.memory_bank_size:
        raise ValueError("memory_bank_size has no effect with loss_type='sigmoid'; set it to 0")
    # Plain InfoNCE before hard_negative_start does use label smoothing and "positive", but a run must not change its
    # target half-way.
    if loss_type != "contrastive" and args.label_smoothing_factor:
        raise ValueError(f"label_smoothing_factor has no effect with loss_type={loss_type!r}; set it to 0")
    if loss_type != "contrastive" and args.duplicates != "mask":
        raise ValueError(f"duplicates={args.duplicates!r} needs loss_type='contrastive'; {loss_type!r} masks them")
    for name in ("hard_negative_start", "absolute_margin", "relative_margin", "max_score"):
        unset = 0 if name == "hard_negative_start" else None
        if loss_type != "hard_negative" and getattr(args, name) != unset:
            raise ValueError(f"{name} has no effect with loss_type={loss_type!r}; leave it out")


def warn_of_all_negatives(args: InfCLConfig, loss_type: str | None) -> None:
    """Says where the hardest negatives are all there are, so that the search changes nothing."""
    negatives = args.contrastive_batch_size - 1 + args.memory_bank_size
    if loss_type != "hard_negative" or args.num_hard_negatives < negatives or args.process_index != 0:
        return
    banked = f" and a memory bank of {args.memory_bank_size}" if args.memory_bank_size else ""
    limited = any(value is not None for value in (args.absolute_margin, args.relative_margin, args.max_score))
    logger.warning(
        "num_hard_negatives=%d, but a contrastive batch of %d%s has %d negatives for each pair: all are kept, and the "
        "loss equals %s",
        args.num_hard_negatives,
        args.contrastive_batch_size,
        banked,
        negatives,
        "the contrastive loss within the margins" if limited else "loss_type='contrastive'",
    )
