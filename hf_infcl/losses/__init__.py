"""What is minimised: one file an objective, a function and its module."""

from hf_infcl.losses.contrastive import ContrastiveLoss, contrastive_loss
from hf_infcl.losses.memory_bank import MemoryBank

__all__ = ["ContrastiveLoss", "MemoryBank", "contrastive_loss"]
