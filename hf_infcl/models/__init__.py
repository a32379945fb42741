"""Dual encoders: how each family yields embeddings, what LoRA targets in it, its scale and bias."""

from hf_infcl.models.access import (
    logit_bias_parameter,
    logit_scale,
    logit_scale_parameter,
    text_tower,
    unwrap,
    vision_tower,
)
from hf_infcl.models.embedding import DualEncoderOutput, prepare_dual_encoder
from hf_infcl.models.families import FAMILIES, Family, family_of
from hf_infcl.models.images import set_image_normalization

__all__ = [
    "FAMILIES",
    "DualEncoderOutput",
    "Family",
    "family_of",
    "logit_bias_parameter",
    "logit_scale",
    "logit_scale_parameter",
    "prepare_dual_encoder",
    "set_image_normalization",
    "text_tower",
    "unwrap",
    "vision_tower",
]
