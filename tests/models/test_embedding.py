"""The forward against each family's own."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertModel

from hf_infcl.models import complete_lora_config, logit_bias_parameter, logit_scale, prepare_dual_encoder, unwrap
from hf_infcl.models.embedding import normalize
from tests.tiny import MODELS, tiny_batch, tiny_clip, tiny_siglip, tiny_vision_text_dual_encoder

FAMILIES = sorted(MODELS)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_the_stock_forward(family: str) -> None:
    model, batch = MODELS[family](), tiny_batch(family)
    stock = model(**batch)
    ours = prepare_dual_encoder(model)(**batch)
    torch.testing.assert_close(ours.image_embeds, stock.image_embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.text_embeds, stock.text_embeds, atol=1e-6, rtol=0)


@pytest.mark.parametrize("vision", ["dinov2", "efficientnet"])
def test_embeddings_equal_the_stock_forward_with_other_vision_towers(vision: str) -> None:
    model = tiny_vision_text_dual_encoder(vision=vision)
    batch = tiny_batch(model)
    stock = model(**batch)
    ours = prepare_dual_encoder(model)(**batch)
    torch.testing.assert_close(ours.image_embeds, stock.image_embeds, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_side_alone_equals_both_together(family: str) -> None:
    model, batch = prepare_dual_encoder(MODELS[family]()), tiny_batch(family)
    both = model(**batch)
    images = model(**{name: value for name, value in batch.items() if name in IMAGE_INPUTS})
    texts = model(**{name: value for name, value in batch.items() if name not in IMAGE_INPUTS})
    assert images.text_embeds is None
    assert texts.image_embeds is None
    torch.testing.assert_close(images.image_embeds, both.image_embeds)
    torch.testing.assert_close(texts.text_embeds, both.text_embeds)


IMAGE_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_have_length_one_under_lora_and_autocast(family: str) -> None:
    model = prepare_dual_encoder(MODELS[family]())
    model = get_peft_model(model, complete_lora_config(model, LoraConfig(r=2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**tiny_batch(family))
    assert output.image_embeds.dtype == output.text_embeds.dtype == torch.bfloat16
    for embeds in (output.image_embeds, output.text_embeds):
        torch.testing.assert_close(embeds.float().norm(dim=-1), torch.ones(3), atol=1e-2, rtol=0)


def test_adapters_change_the_embeddings() -> None:
    model, batch = prepare_dual_encoder(tiny_clip()), tiny_batch("clip")
    before = model(**batch)
    model = get_peft_model(model, complete_lora_config(model, LoraConfig(r=2, init_lora_weights=False)))
    after = model(**batch)
    assert not torch.allclose(before.image_embeds, after.image_embeds)
    assert not torch.allclose(before.text_embeds, after.text_embeds)


def test_preparing_twice_or_through_peft_changes_nothing() -> None:
    model, batch = prepare_dual_encoder(tiny_clip()), tiny_batch("clip")
    once = model(**batch)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    twice = prepare_dual_encoder(prepare_dual_encoder(wrapped))
    assert twice is wrapped
    torch.testing.assert_close(twice(**batch).image_embeds, once.image_embeds)


def test_logits_come_and_go_with_preparing() -> None:
    model, batch = tiny_clip(), tiny_batch("clip")
    stock = model(**batch)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert torch.equal(prepare_dual_encoder(wrapped, logits=True)(**batch).logits_per_image, stock.logits_per_image)
    assert torch.equal(pickle.loads(pickle.dumps(wrapped))(**batch).logits_per_image, stock.logits_per_image)
    assert set(prepare_dual_encoder(wrapped)(**batch)) == {"image_embeds", "text_embeds"}  # as the Trainer wants it


def test_a_deep_copy_embeds_with_its_own_weights() -> None:
    model, batch = prepare_dual_encoder(tiny_clip()), tiny_batch("clip")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.visual_projection.weight.neg_()
    torch.testing.assert_close(other(**batch).image_embeds, -model(**batch).image_embeds)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_pickled_model_embeds_with_its_own_weights(adapted: bool) -> None:
    model, batch = prepare_dual_encoder(tiny_clip()), tiny_batch("clip")
    whole = get_peft_model(model, complete_lora_config(model, LoraConfig(r=2))) if adapted else model
    other = pickle.loads(pickle.dumps(whole))
    assert torch.equal(other(**batch).image_embeds, whole(**batch).image_embeds)
    with torch.no_grad():
        unwrap(other).visual_projection.weight.neg_()
    assert torch.equal(other(**batch).image_embeds, -whole(**batch).image_embeds)
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"


def test_compiled_forward_has_no_graph_break() -> None:
    model, batch = prepare_dual_encoder(tiny_clip()), tiny_batch("clip")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch).image_embeds, model(**batch).image_embeds)
    assert unwrap(compiled) is model


def test_other_instances_and_the_class_keep_their_forward() -> None:
    prepare_dual_encoder(tiny_clip())
    assert "logits_per_image" in tiny_clip()(**tiny_batch("clip"))


def test_the_state_dict_gains_nothing() -> None:
    before = set(tiny_clip().state_dict())
    model = prepare_dual_encoder(tiny_clip())
    assert set(model.state_dict()) == before


def test_accelerate_wraps_and_unwraps_the_forward() -> None:
    model, batch = prepare_dual_encoder(tiny_clip()), tiny_batch("clip")
    expected = model(**batch).image_embeds
    AcceleratorState._reset_state()  # whichever test came before has chosen a precision for the process
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    wrapped = accelerator.prepare_model(model)
    output = wrapped(**batch)
    assert output.text_embeds.dtype == torch.float32  # accelerate's own conversion
    assert not torch.equal(output.image_embeds, expected)
    torch.testing.assert_close(output.image_embeds, expected, atol=3e-2, rtol=0)
    prepare_dual_encoder(wrapped)
    plain = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    torch.testing.assert_close(plain(**batch).image_embeds, expected)


def test_an_unsupported_family_is_refused_by_name() -> None:
    bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    with pytest.raises(ValueError, match=r"BertModel.*'bert'.*clip, .*siglip.*vision-text-dual-encoder"):
        prepare_dual_encoder(bert)
    with pytest.raises(ValueError, match=r"Linear .*is not a supported dual encoder"):
        prepare_dual_encoder(torch.nn.Linear(2, 2))


def test_unknown_inputs_are_refused() -> None:
    model = prepare_dual_encoder(tiny_clip())
    with pytest.raises(TypeError, match="takes no input 'labels'"):
        model(**tiny_batch("clip"), labels=torch.zeros(3))
    with pytest.raises(ValueError, match="got neither"):
        model(attention_mask=torch.ones(1, 2))


def test_another_image_size_is_refused_by_the_model_and_taken_by_the_option() -> None:
    model = prepare_dual_encoder(tiny_clip())
    pixels = torch.zeros(1, 3, 64, 64)
    with pytest.raises(ValueError, match=r"64\*64.*interpolate_pos_encoding=True"):
        model(pixel_values=pixels)
    assert model(pixel_values=pixels, interpolate_pos_encoding=True).image_embeds.shape == (1, 16)


def test_a_zero_row_stays_zero_with_finite_gradients() -> None:
    features = torch.randn(4, 8)
    features[2] = 0
    features.requires_grad_()
    unit = normalize(features)
    unit.sum().backward()
    assert unit[2].eq(0).all()
    assert features.grad is not None
    assert features.grad.isfinite().all()
    assert features.grad.abs().max() < 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_do_not_overflow(dtype: torch.dtype) -> None:
    unit = normalize(torch.full((2, 512), 12.0, dtype=dtype))
    assert unit.dtype == dtype
    torch.testing.assert_close(unit.float().norm(dim=-1), torch.ones(2), atol=1e-2, rtol=0)


def test_normalising_matches_float64() -> None:
    features = torch.randn(5, 7)
    expected = nn.functional.normalize(features.double(), dim=-1).float()
    torch.testing.assert_close(normalize(features), expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("value", [4.6052, 7.0, 12.0])
def test_the_scale_is_finite_for_half_precision_parameters(value: float) -> None:
    model = tiny_clip().half()
    with torch.no_grad():
        model.logit_scale.fill_(value)
    assert logit_scale(model).isfinite()
    torch.testing.assert_close(logit_scale(model).item(), torch.tensor(value).exp().item(), rtol=1e-2, atol=0)


def test_scale_and_bias_are_found_through_wrappers() -> None:
    model: Any = tiny_siglip()
    wrapped = torch.compile(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    assert logit_bias_parameter(wrapped) is model.logit_bias
    assert logit_scale(wrapped).shape == (1,)
    assert logit_bias_parameter(tiny_clip()) is None
