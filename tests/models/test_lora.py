"""Which layers LoRA takes by default, and what is refused."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_infcl.models import (
    check_lora_targets,
    complete_lora_config,
    lora_target_modules,
    modules_to_save,
    prepare_dual_encoder,
)
from tests.tiny import MODELS, tiny_batch, tiny_clip, tiny_siglip, tiny_vision_text_dual_encoder


@pytest.mark.parametrize("family", sorted(MODELS))
def test_default_targets_are_found_in_both_towers(family: str) -> None:
    names = lora_target_modules(MODELS[family]())
    assert {name.split(".")[0] for name in names} == {"vision_model", "text_model"}


@pytest.mark.parametrize("family", sorted(MODELS))
def test_default_targets_are_all_reached_by_the_gradient(family: str) -> None:
    model = prepare_dual_encoder(MODELS[family]())
    model = get_peft_model(model, complete_lora_config(model, LoraConfig(r=2)))
    output = model(**tiny_batch(family))
    (output.image_embeds.sum() + output.text_embeds.sum()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_nothing_inside_a_multihead_attention_is_a_target() -> None:
    model = tiny_siglip()
    attentions = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    assert attentions
    assert not [name for name in lora_target_modules(model) if name.startswith(tuple(attentions))]


def test_convolutional_towers_are_adapted_at_their_one_by_one_convolutions() -> None:
    model = tiny_vision_text_dual_encoder(vision="efficientnet")
    layers = [model.get_submodule(name) for name in lora_target_modules(model, towers=("vision",))]
    assert layers
    assert all(layer.kernel_size == (1, 1) and layer.groups == 1 for layer in layers)
    wrapped = get_peft_model(prepare_dual_encoder(model), complete_lora_config(model, LoraConfig(r=2)))
    assert wrapped(**tiny_batch(model)).image_embeds.shape == (3, 16)


def test_new_projections_are_trained_whole_and_pretrained_ones_left() -> None:
    assert modules_to_save(tiny_clip()) == []
    model = tiny_vision_text_dual_encoder()
    config = complete_lora_config(model, LoraConfig())
    assert config.modules_to_save == ["text_projection", "visual_projection"]


def test_projections_named_as_targets_are_not_trained_whole() -> None:
    model = tiny_vision_text_dual_encoder()
    config = complete_lora_config(model, LoraConfig(target_modules=["query", "q_proj", "visual_projection"]))
    assert config.modules_to_save == ["text_projection"]


def test_the_given_configuration_is_left_alone() -> None:
    given = LoraConfig(r=3, lora_alpha=5, task_type="FEATURE_EXTRACTION")
    config = complete_lora_config(tiny_clip(), given)
    assert given.target_modules is None
    assert given.task_type == "FEATURE_EXTRACTION"
    assert (config.r, config.lora_alpha) == (3, 5)


def test_task_type_is_set_aside_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    model = prepare_dual_encoder(tiny_clip())
    given = LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["q_proj", "v_proj"])
    with caplog.at_level(logging.WARNING):
        config = complete_lora_config(model, given)
    assert "task_type" in caplog.text
    assert get_peft_model(model, config)(**tiny_batch("clip")).text_embeds.shape == (3, 16)


def test_all_linear_is_the_default_choice() -> None:
    model = tiny_siglip()
    config = complete_lora_config(model, LoraConfig(target_modules="all-linear"))
    assert config.target_modules == set(lora_target_modules(model))


def test_targets_that_match_nothing_in_a_tower_are_refused_by_its_name() -> None:
    model = tiny_vision_text_dual_encoder()
    with pytest.raises(ValueError, match=r"'q_proj' match nothing in the text tower \(BertModel\).*query"):
        check_lora_targets(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="vision tower"):
        check_lora_targets(model, LoraConfig(target_modules=["query"]))


@pytest.mark.parametrize("targets", [r"vision_model\..*q_proj", ["vision_model.encoder.layers.0.self_attn.q_proj"]])
def test_targets_that_name_one_tower_leave_the_other_one_as_it_is(targets: str | list[str]) -> None:
    base, batch = prepare_dual_encoder(tiny_clip()), tiny_batch("clip")
    before = base(**batch)
    config = complete_lora_config(base, LoraConfig(target_modules=targets, init_lora_weights=False))
    after = get_peft_model(base, config)(**batch)
    assert torch.equal(after.text_embeds, before.text_embeds)
    assert not torch.equal(after.image_embeds, before.image_embeds)


@pytest.mark.parametrize("family", ["clip", "vision-text-dual-encoder"])
def test_a_projection_stands_for_its_side(family: str) -> None:
    base, batch = prepare_dual_encoder(MODELS[family]()), tiny_batch(family)
    before = base(**batch)
    both = ["visual_projection", "text_projection"]
    given = LoraConfig(r=4, target_modules=both, rank_pattern={both[0]: 8}, alpha_pattern={both[0]: 32})
    assert complete_lora_config(base, given).target_modules == set(both)
    check_lora_targets(base, LoraConfig(target_modules=["q_proj", "text_projection"]))
    config = LoraConfig(target_modules=["visual_projection"], init_lora_weights=False)
    after = get_peft_model(base, complete_lora_config(base, config))(**batch)
    assert torch.equal(after.text_embeds, before.text_embeds)
    assert not torch.equal(after.image_embeds, before.image_embeds)


def test_targets_that_match_neither_side_are_refused() -> None:
    with pytest.raises(ValueError, match="vision tower"):
        check_lora_targets(tiny_siglip(), LoraConfig(target_modules=["text_model.nothing", "nothing"]))
    with pytest.raises(ValueError, match="vision tower"):  # SigLIP has no projections
        check_lora_targets(tiny_siglip(), LoraConfig(target_modules=["visual_projection", "text_projection"]))


def test_a_frozen_tower_needs_no_target() -> None:
    model = tiny_vision_text_dual_encoder()
    config = complete_lora_config(model, LoraConfig(target_modules=["q_proj"]), towers=("vision",))
    assert config.target_modules == {"q_proj"}
    only = complete_lora_config(model, LoraConfig(), towers=("text",))
    assert all(name.startswith("text_model.") for name in only.target_modules)


def test_a_module_to_save_that_is_not_there_is_refused() -> None:
    config = LoraConfig(modules_to_save=["text_projektion"])
    with pytest.raises(ValueError, match=r"'text_projektion', which no module .*; did you mean 'text_projection'\?"):
        complete_lora_config(tiny_clip(), config)
    assert complete_lora_config(tiny_clip(), LoraConfig(modules_to_save=["vision_model.post_layernorm"]))


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\(q_proj' is no regular expression"):
        complete_lora_config(tiny_clip(), LoraConfig(target_modules="(q_proj"))
