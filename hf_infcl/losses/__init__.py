"""What is minimised: one file an objective, a function and its module."""

from hf_infcl.losses.contrastive import ContrastiveLoss, contrastive_loss
from hf_infcl.losses.hard_negative import HardNegativeLoss, hard_negative_loss
from hf_infcl.losses.memory_bank import MemoryBank
from hf_infcl.losses.mining import hardest_negatives
from hf_infcl.losses.sigmoid import SigmoidLoss, sigmoid_loss

__all__ = [
    "ContrastiveLoss",
    "HardNegativeLoss",
    "MemoryBank",
    "SigmoidLoss",
    "contrastive_loss",
    "hard_negative_loss",
    "hardest_negatives",
    "sigmoid_loss",
]
