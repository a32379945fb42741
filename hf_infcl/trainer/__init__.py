"""`InfCLTrainer`: transformers' Trainer with the exact contrastive loss over the whole effective batch."""

from hf_infcl.trainer.config import InfCLConfig
from hf_infcl.trainer.trainer import InfCLTrainer

__all__ = ["InfCLConfig", "InfCLTrainer"]
