"""Fine-tune CLIP-like dual encoders with an exact contrastive loss that never builds the N x N similarity matrix."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it. Loaded on first use, so that `import hf_infcl` stays light.
_PUBLIC = {
    "InfCLConfig": "hf_infcl.trainer",
    "InfCLTrainer": "hf_infcl.trainer",
    "ContrastiveLoss": "hf_infcl.losses",
    "HardNegativeLoss": "hf_infcl.losses",
    "SigmoidLoss": "hf_infcl.losses",
    "contrastive_loss": "hf_infcl.losses",
    "hard_negative_loss": "hf_infcl.losses",
    "sigmoid_loss": "hf_infcl.losses",
    "hardest_negatives": "hf_infcl.losses",
    "MemoryBank": "hf_infcl.losses",
    "retrieval_metrics": "hf_infcl.evaluation",
    "zero_shot_metrics": "hf_infcl.evaluation",
    "load_dual_encoder": "hf_infcl.hub",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from hf_infcl.evaluation import retrieval_metrics, zero_shot_metrics
    from hf_infcl.hub import load_dual_encoder
    from hf_infcl.losses import (
        ContrastiveLoss,
        HardNegativeLoss,
        MemoryBank,
        SigmoidLoss,
        contrastive_loss,
        hard_negative_loss,
        hardest_negatives,
        sigmoid_loss,
    )
    from hf_infcl.trainer import InfCLConfig, InfCLTrainer


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'hf_infcl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
