"""The supported families of dual encoders: what each takes in and how its text is padded."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_infcl.models.access import text_tower, unwrap

# Tokenizers without a limit of their own say about 1e30.
_NO_LIMIT = 1_000_000


@dataclass(frozen=True)
class Family:
    """What one family of dual encoders takes in, and how it was trained.

    Attributes:
        name: the `model_type` of its configuration.
        image_inputs: the forward's arguments on the image side.
        text_inputs: the forward's arguments on the text side.
        pads_to_max_length: whether texts are padded to one fixed length. SigLIP's text tower has no attention mask and
            pools the last position, so any other padding gives other embeddings.
        context_length: the length its texts were cut to in pretraining, where the configuration does not say it.
        default_loss_type: "contrastive" or "sigmoid", what it was pretrained with.
        default_logit_scale_max: the cap of the multiplier, or None. CLIP was trained under a cap of 100 (Radford et al.
            2021, section 2.5); SigLIP without, and its published scales lie above 100.
        new_projections: the projections that a model assembled from two pretrained towers starts with untrained.
    """

    name: str
    image_inputs: tuple[str, ...] = ("pixel_values",)
    text_inputs: tuple[str, ...] = ("input_ids", "attention_mask", "position_ids")
    pads_to_max_length: bool = False
    context_length: int | None = None
    default_loss_type: str = "contrastive"
    default_logit_scale_max: float | None = 100.0
    new_projections: tuple[str, ...] = ()

    def text_padding(self, model: nn.Module, processor: Any) -> dict[str, Any]:
        """Returns the tokenizer's keyword arguments under which embeddings are the family's own.

        Args:
            model: the dual encoder; its text tower limits the length where the tokenizer does not.
            processor: the processor, or the tokenizer alone.

        Example:
            >>> family_of(model).text_padding(model, processor)  # a CLIP
            {'padding': True, 'truncation': True, 'max_length': 77}
        """
        tokenizer = getattr(processor, "tokenizer", processor)
        limits = [limit for limit in (self.context_length, _position_limit(text_tower(model))) if limit is not None]
        if (
            tokenizer_limit := getattr(tokenizer, "model_max_length", None)
        ) is not None and tokenizer_limit < _NO_LIMIT:
            limits.append(int(tokenizer_limit))
        if self.pads_to_max_length:
            # Here the tokenizer's own limit must not shorten the text: the tower pools its last position.
            position_limit = _position_limit(text_tower(model))
            return {"padding": "max_length", "truncation": True, "max_length": position_limit or min(limits)}
        if not limits:
            return {"padding": True, "truncation": False}
        return {"padding": True, "truncation": True, "max_length": min(limits)}


def _position_limit(tower: nn.Module) -> int | None:
    """Returns how many tokens the text tower has positions for, or None for relative positions."""
    positions = getattr(getattr(tower, "config", None), "max_position_embeddings", None)
    if positions is None:
        return None
    # RoBERTa's kind counts positions from behind the padding index, so its table has padding_idx + 1 unused rows.
    for name, module in tower.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return int(positions) - module.padding_idx - 1
    return int(positions)


_SIGLIP = Family("siglip", pads_to_max_length=True, default_loss_type="sigmoid", default_logit_scale_max=None)
_BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("clip"),
        Family("metaclip_2"),
        # Yang et al. 2022 cut captions at 52 tokens; the configuration tells the 512 positions of the BERT beneath.
        Family("chinese_clip", text_inputs=_BERT_INPUTS, context_length=52),
        Family("altclip", text_inputs=_BERT_INPUTS),
        _SIGLIP,  # and the SigLIP 2 checkpoints of fixed resolution
        replace(_SIGLIP, name="siglip2", image_inputs=("pixel_values", "pixel_attention_mask", "spatial_shapes")),
        Family(
            "vision-text-dual-encoder",
            text_inputs=_BERT_INPUTS,
            new_projections=("visual_projection", "text_projection"),
        ),
    )
}


def family_of(model_or_config: Any) -> Family:
    """Returns the family of a model (wrapped or not) or of a configuration.

    Raises:
        ValueError: for a family that is not supported; the message lists those that are.
    """
    model = unwrap(model_or_config)
    config = getattr(model, "config", None) if isinstance(model, nn.Module) else model
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"{type(model).__name__} (model_type {model_type!r}) is not a supported dual encoder; "
            f"supported model types: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
