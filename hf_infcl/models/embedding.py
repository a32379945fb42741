"""The forward of a dual encoder as this project needs it: embeddings of either or both modalities.

For training, logits are left out: the loss makes its own. For inference, both modalities go through the model's own
forward, so that whoever knows the model finds all he expects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from hf_infcl.models.access import unwrap
from hf_infcl.models.families import Family, family_of
from hf_infcl.models.images import normalize_images, set_image_normalization
from hf_infcl.models.tokens import correct_eos_token, lower_case_as_trained

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class DualEncoderOutput(ModelOutput):
    """Unit-length embeddings.

    Attributes:
        image_embeds: (images, D), or None where no images were given.
        text_embeds: (texts, D), or None where no texts were given.
    """

    image_embeds: Tensor | None = None
    text_embeds: Tensor | None = None


def prepare_dual_encoder(model: Model, processor: Any = None, *, logits: bool = False) -> Model:
    """Gives this instance a forward that takes images, texts or both and returns `DualEncoderOutput`.

    The class is left alone. Whatever wraps the instance afterwards (PEFT, DDP, autocast, compile) wraps this forward.

    Args:
        model: a dual encoder of a supported family, wrapped by PEFT or not. Preparing it again changes nothing but
            what `logits` says.
        processor: its processor, if at hand: then uint8 images are normalised on the device, the end-of-text id is
            checked against the tokenizer, and a tokenizer that should lower its letters does.
        logits: whether images and texts together go through the model's own forward, which returns `logits_per_image`,
            `logits_per_text` and, asked by `return_loss=True`, its dense loss beside the embeddings.

    Returns:
        The same object.

    Raises:
        ValueError: for a family that is not supported.

    Example:
        >>> model = prepare_dual_encoder(CLIPModel.from_pretrained("openai/clip-vit-base-patch32"))
        >>> model(pixel_values=pixels).image_embeds.shape
        torch.Size([8, 512])
    """
    base = unwrap(model)
    family_of(base)
    correct_eos_token(base, processor)
    if processor is not None:
        lower_case_as_trained(processor)
        set_image_normalization(base, processor)
    if getattr(base, "_infcl_logits", None) is not logits:  # if it is, accelerate may have wrapped our forward since
        base.forward = _BoundForward(_forward_with_logits if logits else _forward, base)
        base._infcl_logits = logits
    return model


class _BoundForward(partial[ModelOutput]):
    """A method of one instance. Python's own kind cannot be unpickled before the instance is there as a whole."""

    @property
    def __func__(self) -> Callable[..., ModelOutput]:
        """What accelerate wraps and binds again."""
        return self.func


def _forward(
    self: Any,
    input_ids: Tensor | None = None,
    pixel_values: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> DualEncoderOutput:
    """Embeds images (`pixel_values`), texts (`input_ids`) or both; the other inputs go to the side that takes them."""
    family = family_of(self.config)
    given = {"input_ids": input_ids, "pixel_values": pixel_values, "attention_mask": attention_mask, **inputs}
    image_inputs, text_inputs = _by_side(family, given)
    if pixel_values is None and input_ids is None:
        raise ValueError("a dual encoder needs pixel_values, input_ids or both; got neither")
    image_embeds = text_embeds = None
    if pixel_values is not None:
        image_inputs["pixel_values"] = normalize_images(self, pixel_values)
        try:
            image_embeds = normalize(self.get_image_features(**image_inputs, return_dict=True).pooler_output)
        except ValueError as error:
            if "image size" not in str(error):
                raise
            raise ValueError(
                f"{error} Let the model's own processor resize the images, or pass interpolate_pos_encoding=True"
            ) from error
    if input_ids is not None:
        text_embeds = normalize(self.get_text_features(**text_inputs, return_dict=True).pooler_output)
    return DualEncoderOutput(image_embeds=image_embeds, text_embeds=text_embeds)


def _forward_with_logits(
    self: Any,
    input_ids: Tensor | None = None,
    pixel_values: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> ModelOutput:
    """Embeds one side as `_forward` does; both go through the forward of the model's class."""
    if input_ids is None or pixel_values is None:
        return _forward(self, input_ids, pixel_values, attention_mask, **inputs)
    images = normalize_images(self, pixel_values)
    return type(self).forward(self, input_ids=input_ids, pixel_values=images, attention_mask=attention_mask, **inputs)


def _by_side(family: Family, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the forward's inputs by the side that takes them."""
    image_inputs, text_inputs = {}, {}
    for name, value in given.items():
        if value is None:
            continue
        if name in family.image_inputs or name == "interpolate_pos_encoding":
            image_inputs[name] = value
        elif name in family.text_inputs:
            text_inputs[name] = value
        elif name not in _OF_THE_STOCK_FORWARD:
            raise TypeError(
                f"a {family.name} dual encoder takes no input {name!r}; "
                f"it takes {', '.join(family.image_inputs + family.text_inputs)}"
            )
    return image_inputs, text_inputs


# What callers of the stock forward may send along; it changes no embedding.
_OF_THE_STOCK_FORWARD = ("return_loss", "return_dict", "token_type_ids")


def normalize(features: Tensor) -> Tensor:
    """Scales every row of (n, D) to length 1, in float32 at least, and returns the features' own dtype.

    A row of zeros stays zeros and its gradient finite. In float16 the squares of 512 features of 12 would sum to more
    than its largest number, hence the detour.
    """
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / length.masked_fill(length == 0, 1.0)).to(features.dtype)
