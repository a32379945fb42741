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
from hf_infcl.models.lora import check_lora_targets, complete_lora_config, lora_target_modules, modules_to_save
from hf_infcl.models.trainable import raise_trainable_to_float32, set_batch_statistics_eval, unreachable_parameters

__all__ = [
    "FAMILIES",
    "DualEncoderOutput",
    "Family",
    "check_lora_targets",
    "complete_lora_config",
    "family_of",
    "logit_bias_parameter",
    "logit_scale",
    "logit_scale_parameter",
    "lora_target_modules",
    "modules_to_save",
    "prepare_dual_encoder",
    "raise_trainable_to_float32",
    "set_batch_statistics_eval",
    "set_image_normalization",
    "text_tower",
    "unreachable_parameters",
    "unwrap",
    "vision_tower",
]
