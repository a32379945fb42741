"""Parameters without gradient, half-precision weights, batch statistics."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_infcl.models import (
    logit_bias_parameter,
    logit_scale_parameter,
    prepare_dual_encoder,
    raise_trainable_to_float32,
    set_batch_statistics_eval,
    unreachable_parameters,
)
from tests.tiny import MODELS, tiny_batch, tiny_clip, tiny_siglip, tiny_vision_text_dual_encoder


@pytest.mark.parametrize("family", sorted(MODELS))
@pytest.mark.parametrize("loss_type", ["contrastive", "sigmoid"])
def test_unreachable_parameters_are_those_without_a_gradient(family: str, loss_type: str) -> None:
    model = prepare_dual_encoder(MODELS[family]())
    found = unreachable_parameters(model, loss_type)
    output = model(**tiny_batch(family))
    loss = (output.image_embeds @ output.text_embeds.T).sum() * logit_scale_parameter(model).exp()
    if loss_type == "sigmoid" and (bias := logit_bias_parameter(model)) is not None:
        loss = loss + bias
    loss.sum().backward()
    assert found == [name for name, p in model.named_parameters() if p.grad is None]


def test_the_bias_is_out_of_reach_of_a_softmax_loss_only() -> None:
    assert unreachable_parameters(tiny_siglip(), "contrastive") == ["logit_bias"]
    assert unreachable_parameters(tiny_siglip(), "hard_negative") == ["logit_bias"]
    assert unreachable_parameters(tiny_siglip(), "sigmoid") == []


def test_an_adapter_inside_a_multihead_attention_is_found() -> None:
    model = get_peft_model(tiny_siglip(), LoraConfig(target_modules=["q_proj", "out_proj"]))
    found = unreachable_parameters(model, "sigmoid")
    assert len(found) == 2
    assert all("head.attention.out_proj.lora_" in name for name in found)


def test_a_mask_token_that_no_embedding_uses_is_found() -> None:
    model = tiny_vision_text_dual_encoder(vision="dinov2")
    assert unreachable_parameters(model, "contrastive") == ["vision_model.embeddings.mask_token"]


def test_looking_for_them_changes_nothing() -> None:
    model = tiny_vision_text_dual_encoder(vision="efficientnet").train()
    model.text_model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    unreachable_parameters(model, "contrastive")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.vision_model.training
    assert not model.text_model.training
    assert all(p.grad is None for p in model.parameters())


def test_frozen_towers_are_no_concern() -> None:
    model = tiny_clip().requires_grad_(False)
    model.visual_projection.requires_grad_(True)
    assert unreachable_parameters(model, "contrastive") == []


def test_half_precision_weights_to_be_trained_are_raised_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    model = prepare_dual_encoder(tiny_clip().half())
    model.vision_model.requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        raised = raise_trainable_to_float32(model)
    assert "float16" in caplog.text
    assert "text_projection.weight" in raised
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    output = model(**tiny_batch("clip"))
    output.image_embeds.sum().backward()
    assert output.image_embeds.dtype == torch.float32


def test_a_trained_scale_alone_is_raised_and_the_frozen_base_kept_half() -> None:
    model = prepare_dual_encoder(tiny_clip().half())
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    logit_scale_parameter(model).requires_grad_(True)
    assert raise_trainable_to_float32(model) == ["base_model.model.logit_scale"]
    assert logit_scale_parameter(model).dtype == torch.float32
    assert model.get_base_model().text_projection.weight.dtype == torch.float16


def test_other_weights_are_left_alone() -> None:
    assert raise_trainable_to_float32(tiny_clip()) == []
    assert raise_trainable_to_float32(tiny_clip().bfloat16()) == []
    assert raise_trainable_to_float32(tiny_clip().half().requires_grad_(False)) == []


def test_batch_normalisation_alone_is_put_into_eval_mode() -> None:
    model = tiny_vision_text_dual_encoder(vision="efficientnet").train()
    set_batch_statistics_eval(model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any(module.training for module in norms)
    assert model.text_model.training
