"""What is trained: whether the loss reaches it, in which precision, and without a batch's own statistics."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from hf_infcl.models.access import logit_bias_parameter, logit_scale_parameter, unwrap
from hf_infcl.models.embedding import prepare_dual_encoder
from hf_infcl.models.families import family_of

logger = logging.getLogger(__name__)


def unreachable_parameters(model: nn.Module, loss_type: str) -> list[str]:
    """Returns the names of the trainable parameters that get no gradient from the loss.

    DistributedDataParallel waits for the gradient of each, so one of these ends a run at its second step with a message
    about something else. They are found by embedding one blank pair and walking the autograd graph: names would not
    tell that an nn.MultiheadAttention reads its `out_proj.weight` past the adapter around it.

    Args:
        model: a dual encoder, with or without adapters, not yet sharded.
        loss_type: "contrastive", "hard_negative" or "sigmoid"; only the last uses the bias.
    """
    base = unwrap(prepare_dual_encoder(model))
    modes = [(module, module.training) for module in base.modules()]
    base.eval()  # neither dropout nor batch statistics are to notice
    try:
        with torch.enable_grad():
            output = base(**_blank_pair(base))
    finally:
        for module, training in modes:
            module.training = training
    reached = _leaves([output.image_embeds, output.text_embeds])
    reached.add(id(logit_scale_parameter(base)))
    if loss_type == "sigmoid":
        reached.add(id(logit_bias_parameter(base)))
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in reached]


def _blank_pair(base: Any) -> dict[str, Tensor]:
    """Returns the smallest inputs the model takes: one black image and a text of two tokens."""
    vision: Any = base.config.vision_config
    parameter = next(base.vision_model.parameters())
    device, dtype = parameter.device, parameter.dtype
    channels = getattr(vision, "num_channels", 3)
    ids = torch.ones((1, 2), dtype=torch.long, device=device)
    pair = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "spatial_shapes" in family_of(base).image_inputs:  # NaFlex: an image of 2 x 2 patches
        pair["pixel_values"] = torch.zeros((1, 4, channels * vision.patch_size**2), device=device, dtype=dtype)
        pair["pixel_attention_mask"] = torch.ones((1, 4), dtype=torch.long, device=device)
        pair["spatial_shapes"] = torch.full((1, 2), 2, device=device)
    else:
        size = getattr(vision, "image_size", 224)
        if vision.model_type.startswith("dino"):  # takes any size, and its own is 518
            size = 2 * vision.patch_size
        height, width = (size, size) if isinstance(size, int) else size
        pair["pixel_values"] = torch.zeros((1, channels, height, width), device=device, dtype=dtype)
    return pair


def _leaves(outputs: list[Tensor]) -> set[int]:
    """Returns the ids of the parameters in these outputs' autograd graph."""
    pending: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, leaves = set(pending), set()
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return leaves


def raise_trainable_to_float32(model: nn.Module) -> list[str]:
    """Raises float16 weights that are to be trained to float32, in place, with a notice.

    An update of 1e-4 of a weight is below float16's resolution, and Adam's squared gradients underflow to zero there.
    Where layers of the model itself are trained, the whole model is raised, since a float32 layer refuses a float16
    neighbour's output; adapters convert by themselves.

    Returns:
        The names of the trainable parameters that were float16.
    """
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if not half:
        return half
    alone = all("lora_" in name or name.rsplit(".", 1)[-1] in ("logit_scale", "logit_bias") for name in half)
    raised = set(half) if alone else {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if name in raised and parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()
    if not alone:
        for buffer in model.buffers():
            if buffer.dtype == torch.float16:
                buffer.data = buffer.data.float()
    logger.warning(
        "%d trainable weights are float16 and cannot be trained as such: %s raised to float32 (dtype='float32' or "
        "'bfloat16' loads them so; fp16=True computes in float16)",
        len(half),
        "they are" if alone else "the model is",
    )
    return half


def set_batch_statistics_eval(model: nn.Module) -> None:
    """Puts batch normalisation into eval mode, for its outcome depends on how a batch is cut into micro-batches."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
