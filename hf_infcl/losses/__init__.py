"""What is minimised: one file an objective, a function and its module."""

from hf_infcl.losses.contrastive import ContrastiveLoss, contrastive_loss
from hf_infcl.losses.memory_bank import MemoryBank
from hf_infcl.losses.sigmoid import SigmoidLoss, sigmoid_loss

__all__ = ["ContrastiveLoss", "MemoryBank", "SigmoidLoss", "contrastive_loss", "sigmoid_loss"]
