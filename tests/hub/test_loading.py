"""Adapters written, published and loaded back."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoProcessor, BertConfig, BertModel, CLIPModel, SiglipProcessor, pipeline

from hf_infcl import load_dual_encoder
from hf_infcl.hub import adapters, save_adapter
from hf_infcl.models import complete_lora_config, family_of, logit_scale_parameter, prepare_dual_encoder
from tests.tiny import MODELS, save_tiny, siglip2_tokenizer, tiny_batch, tiny_clip, tiny_processor

FAMILIES = sorted(MODELS)


def _adapted(base: str, scale: float | None = None, name: str = "default", **lora: Any) -> nn.Module:
    """A base with random adapters (standard deviation 0.3), and the scale trained to a value."""
    model = AutoModel.from_pretrained(base)
    model = get_peft_model(model, complete_lora_config(model, LoraConfig(**lora)), adapter_name=name)
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.normal_(std=0.3)
        if scale is not None:
            logit_scale_parameter(model).requires_grad_(True).fill_(scale)
    return model.eval()


def _assert_equal(a: Any, b: Any, atol: float = 0) -> None:
    torch.testing.assert_close(a.image_embeds, b.image_embeds, atol=atol, rtol=0)
    torch.testing.assert_close(a.text_embeds, b.text_embeds, atol=atol, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_loads_ready_to_embed(family: str, tmp_path: Path) -> None:
    model, processor = load_dual_encoder(save_tiny(family, tmp_path))
    stock = MODELS[family](seed=0)(**tiny_batch(family))
    _assert_equal(model(**tiny_batch(family)), stock, atol=1e-6)
    assert not model.training
    assert type(processor) is type(tiny_processor(family))


def test_a_siglip_2_of_fixed_resolution_is_a_siglip(tmp_path: Path) -> None:
    """These checkpoints say `siglip` and bring SigLIP 2's tokenizer."""
    stock = MODELS["siglip"](seed=0)
    stock.save_pretrained(tmp_path)
    SiglipProcessor(tiny_processor("siglip").image_processor, siglip2_tokenizer()).save_pretrained(tmp_path)
    model, processor = load_dual_encoder(tmp_path)
    padding = family_of(model).text_padding(model, processor)
    assert (padding["padding"], padding["max_length"]) == ("max_length", 64)
    images = tiny_batch("siglip")["pixel_values"]
    texts = processor(text=["a cat", "two dogs", "a"], return_tensors="pt", **padding)
    found = model(pixel_values=images, input_ids=texts["input_ids"])
    wanted = stock(pixel_values=images, input_ids=texts["input_ids"])
    _assert_equal(found, wanted, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_loads_back_equal(family: str, merge: bool, tmp_path: Path) -> None:
    base, batch = save_tiny(family, tmp_path / "base"), tiny_batch(family)
    trained = _adapted(base)
    save_adapter(trained, tmp_path / "adapter", tiny_processor(family))
    loaded, _ = load_dual_encoder(base, adapter=tmp_path / "adapter", merge=merge)
    _assert_equal(loaded(**batch), trained(**batch), atol=1e-4 if merge else 0)
    assert isinstance(loaded, PeftModel) is not merge
    assert {parameter.requires_grad for parameter in loaded.parameters()} == {merge}
    plain, _ = load_dual_encoder(base)
    assert not torch.allclose(plain(**batch).image_embeds, loaded(**batch).image_embeds, atol=1e-2)
    assert not torch.allclose(plain(**batch).text_embeds, loaded(**batch).text_embeds, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merge", [False, True])
def test_images_and_texts_together_go_through_the_models_own_forward(family: str, merge: bool, tmp_path: Path) -> None:
    base, batch = save_tiny(family, tmp_path / "base"), tiny_batch(family)
    save_adapter(_adapted(base, scale=3.0), tmp_path / "adapter", tiny_processor(family))
    plain = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter").eval()
    wanted = plain(**batch, return_loss=True)
    loaded, _ = load_dual_encoder(base, adapter=tmp_path / "adapter", merge=merge)
    found = loaded(**batch, return_loss=True)
    for name in ("logits_per_image", "logits_per_text", "loss"):
        torch.testing.assert_close(found[name], wanted[name], atol=1e-3 if merge else 0, rtol=0)
    assert found.logits_per_image.shape == (3, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_side_alone_embeds_as_both_do(family: str, tmp_path: Path) -> None:
    model, _ = load_dual_encoder(save_tiny(family, tmp_path))
    batch = tiny_batch(family)
    images = {name: batch.pop(name) for name in family_of(model).image_inputs}
    both = model(**images, **batch)
    torch.testing.assert_close(model(**images).image_embeds, both.image_embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(model(**batch).text_embeds, both.text_embeds, atol=1e-6, rtol=0)


def test_bytes_are_normalised_for_both_sides_too(tmp_path: Path) -> None:
    model, processor = load_dual_encoder(save_tiny("clip", tmp_path))
    picture = torch.arange(32 * 32 * 3).remainder(256).to(torch.uint8).view(32, 32, 3).numpy()
    texts = processor.tokenizer(["a dog", "a cat"], padding=True, return_tensors="pt")
    floats = processor.image_processor(picture, return_tensors="pt")
    as_bytes = processor.image_processor(picture, do_rescale=False, do_normalize=False, return_tensors="pt")
    assert as_bytes["pixel_values"].dtype == torch.uint8
    torch.testing.assert_close(
        model(**texts, **as_bytes).logits_per_image, model(**texts, **floats).logits_per_image, atol=1e-5, rtol=0
    )


def test_the_zero_shot_pipeline_takes_a_merged_model(tmp_path: Path) -> None:
    base = save_tiny("clip", tmp_path / "base")
    trained = _adapted(base)
    save_adapter(trained, tmp_path / "adapter", tiny_processor("clip"))
    model, processor = load_dual_encoder(base, adapter=tmp_path / "adapter", merge=True)
    classify = pipeline(
        "zero-shot-image-classification",
        model=model,
        tokenizer=processor.tokenizer,
        image_processor=processor.image_processor,
    )
    picture, names = Image.new("RGB", (40, 40), "red"), ["a red circle", "a blue star"]
    found = {entry["label"]: entry["score"] for entry in classify(picture, names, hypothesis_template="{}")}
    inputs = processor(images=picture, text=names, padding=True, return_tensors="pt")
    wanted = trained(**inputs).logits_per_image.softmax(dim=-1)[0].tolist()
    assert found == pytest.approx(dict(zip(names, wanted, strict=True)), abs=1e-4)


VARIANTS = {
    "dora": dict(use_dora=True),
    "rslora": dict(r=16, use_rslora=True),
    "patterns": dict(
        r=4,
        target_modules=["q_proj", "visual_projection", "text_projection"],
        rank_pattern={"visual_projection": 8},
        alpha_pattern={"visual_projection": 32},
    ),
    "convolution": dict(use_dora=True, target_modules=["q_proj", "patch_embedding"]),
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_variants_of_lora_load_back_equal(variant: str, tmp_path: Path) -> None:
    base, batch = save_tiny("clip", tmp_path / "base"), tiny_batch("clip")
    trained = _adapted(base, **VARIANTS[variant])
    save_adapter(trained, tmp_path / "adapter")
    loaded, _ = load_dual_encoder(base, adapter=tmp_path / "adapter")
    _assert_equal(loaded(**batch), trained(**batch))
    merged, _ = load_dual_encoder(base, adapter=tmp_path / "adapter", merge=True)
    _assert_equal(merged(**batch), trained(**batch), atol=1e-4)


def test_a_trained_scale_is_in_the_adapter_and_plain_peft_restores_it(tmp_path: Path) -> None:
    base = save_tiny("siglip", tmp_path / "base")
    trained = _adapted(base, scale=3.5)
    trained.get_base_model().logit_bias.requires_grad_(True)
    save_adapter(trained, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.logit_scale"].item() == 3.5
    assert tensors["base_model.model.logit_bias"].item() == -10
    plain = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter")
    assert plain.get_base_model().logit_scale.item() == 3.5


def test_a_frozen_scale_is_not_saved(tmp_path: Path) -> None:
    save_adapter(_adapted(save_tiny("clip", tmp_path / "base")), tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not [name for name in tensors if "logit" in name]


def test_the_scale_follows_the_adapter_in_use(tmp_path: Path) -> None:
    base = save_tiny("clip", tmp_path / "base")
    save_adapter(_adapted(base, scale=3.0), tmp_path / "a")
    save_adapter(_adapted(base, scale=4.0, r=2), tmp_path / "b")
    save_adapter(_adapted(base), tmp_path / "c")
    original = logit_scale_parameter(load_dual_encoder(base)[0]).item()
    model, _ = load_dual_encoder(base, adapter={"a": tmp_path / "a", "b": tmp_path / "b", "c": tmp_path / "c"})
    scale = logit_scale_parameter(model)
    assert scale.item() == 3.0
    for name, expected in (("b", 4.0), ("c", original), ("a", 3.0)):
        model.set_adapter(name)
        assert scale.item() == expected
    with model.disable_adapter():
        assert scale.item() == original
    assert scale.item() == 3.0
    save_adapter(model, tmp_path / "again")
    assert logit_scale_parameter(load_dual_encoder(base, adapter=tmp_path / "again")[0]).item() == 3.0


def test_merging_keeps_the_adapters_scale(tmp_path: Path) -> None:
    base = save_tiny("clip", tmp_path / "base")
    save_adapter(_adapted(base, scale=3.0), tmp_path / "a")
    model, _ = load_dual_encoder(base, adapter=tmp_path / "a", merge=True)
    assert isinstance(model, CLIPModel)
    assert logit_scale_parameter(model).item() == 3.0


def test_no_path_of_this_machine_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = save_tiny("clip", tmp_path / "base")
    adapters._say_that_base_is_local.cache_clear()
    with caplog.at_level(logging.WARNING, "hf_infcl"):
        for _ in range(2):
            save_adapter(_adapted(base), tmp_path / "adapter", AutoProcessor.from_pretrained(base))
    assert caplog.text.count("base_model_id") == 1
    for file in (tmp_path / "adapter").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None
    with pytest.raises(ValueError, match=r"load_dual_encoder\(BASE, adapter=.*--model_name_or_path BASE --adapter "):
        load_dual_encoder(tmp_path / "adapter")
    assert AutoProcessor.from_pretrained(tmp_path / "adapter").tokenizer is not None


def test_the_base_is_found_by_the_id_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny("clip", tmp_path / "base")
    trained = _adapted(base, scale=3.0)
    save_adapter(trained, tmp_path / "adapter", AutoProcessor.from_pretrained(base), base_model_id="someone/base")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/base"
    with pytest.raises(OSError, match=r"'someone/base'.*load_dual_encoder\(BASE, adapter="):
        load_dual_encoder(tmp_path / "adapter")
    (tmp_path / "someone").mkdir()
    (tmp_path / "base").rename(tmp_path / "someone" / "base")
    monkeypatch.chdir(tmp_path)  # now the id resolves, as a reachable one would on the Hub
    loaded, processor = load_dual_encoder(tmp_path / "adapter")
    _assert_equal(loaded(**tiny_batch("clip")), trained(**tiny_batch("clip")))
    assert processor.tokenizer("a dog").input_ids
    plain = AutoModel.from_pretrained(tmp_path / "adapter")  # transformers alone
    _assert_equal(plain(**tiny_batch("clip")), trained(**tiny_batch("clip")), atol=1e-6)
    assert plain.logit_scale.item() == 3.0


def test_a_base_made_from_a_configuration_has_no_name(tmp_path: Path) -> None:
    model = prepare_dual_encoder(tiny_clip())
    save_adapter(get_peft_model(model, complete_lora_config(model, LoraConfig())), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_a_path_is_refused_as_the_bases_id(tmp_path: Path) -> None:
    model = _adapted(save_tiny("clip", tmp_path / "base"))
    with pytest.raises(ValueError, match="base_model_id"):
        save_adapter(model, tmp_path / "adapter", base_model_id=str(tmp_path / "base"))


def test_an_adapter_of_a_feature_extraction_task_embeds(tmp_path: Path) -> None:
    base, batch = save_tiny("clip", tmp_path / "base"), tiny_batch("clip")
    config = LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["q_proj"], init_lora_weights=False)
    trained = get_peft_model(AutoModel.from_pretrained(base), config)
    trained.save_pretrained(tmp_path / "adapter")
    loaded, _ = load_dual_encoder(tmp_path / "adapter")
    _assert_equal(loaded(**batch), trained.get_base_model()(**batch), atol=1e-6)
    again, _ = load_dual_encoder(base, adapter={"x": tmp_path / "adapter", "y": tmp_path / "adapter"})
    again.set_adapter("y")
    _assert_equal(again(**batch), loaded(**batch))


def test_a_named_adapter_is_saved_where_it_is_looked_for(tmp_path: Path) -> None:
    base, batch = save_tiny("clip", tmp_path / "base"), tiny_batch("clip")
    trained = _adapted(base, name="colours")
    save_adapter(trained, tmp_path / "adapter")
    loaded, _ = load_dual_encoder(base, adapter=tmp_path / "adapter")
    _assert_equal(loaded(**batch), trained(**batch))


def test_the_name_lora_is_refused(tmp_path: Path) -> None:
    base = save_tiny("clip", tmp_path / "base")
    with pytest.warns(UserWarning, match="lora"):
        model = _adapted(base, name="lora")
    with pytest.raises(ValueError, match="cannot be named 'lora'"):
        save_adapter(model, tmp_path / "adapter")


def test_dtype_and_device_are_those_asked_for(tmp_path: Path) -> None:
    base = save_tiny("clip", tmp_path / "base")
    save_adapter(_adapted(base), tmp_path / "adapter")
    model, _ = load_dual_encoder(base, adapter=tmp_path / "adapter", dtype=torch.bfloat16, device_map="cpu")
    assert model.get_base_model().visual_projection.weight.dtype == torch.bfloat16
    assert model(**tiny_batch("clip")).image_embeds.dtype == torch.bfloat16


def test_unsupported_and_absent_things_are_refused(tmp_path: Path) -> None:
    bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    bert.save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"'bert'.*supported.*clip"):
        load_dual_encoder(tmp_path / "bert")
    with pytest.raises(OSError, match="nowhere"):
        load_dual_encoder(tmp_path / "nowhere")
    base = save_tiny("clip", tmp_path / "base")
    with pytest.raises(OSError, match="no adapter in"):
        load_dual_encoder(base, adapter=tmp_path / "bert")


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("missing", r"it lacks 1 tensors \(base_model.model.text_model.*lora_A.weight\)$"),
        ("renamed", r"it lacks 1 tensors \(.*it has besides 1 tensors \(.*lora_X"),
        ("shape", r"1 tensors have another shape \(.*: \(8, 3\) instead of \(8, 32\)"),
    ],
)
@pytest.mark.parametrize("second", [False, True])
def test_an_adapter_whose_tensors_do_not_fit_is_refused(
    case: str, complaint: str, second: bool, tmp_path: Path
) -> None:
    base, good, bad = save_tiny("clip", tmp_path / "base"), tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        save_adapter(_adapted(base, scale=3.0), folder)
    tensors = load_file(bad / "adapter_model.safetensors")
    name = next(name for name in sorted(tensors) if "text_model" in name and "lora_A" in name)
    value = tensors.pop(name)
    if case == "renamed":
        tensors[name.replace("lora_A", "lora_X")] = value
    if case == "shape":
        tensors[name] = value[:, :3].contiguous()
    save_file(tensors, bad / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"adapter '.*bad' does not belong to the base '.*base': .*{complaint}"):
        load_dual_encoder(base, adapter={"a": good, "b": bad} if second else bad)


@pytest.mark.parametrize("layers", [1, 3])
def test_an_adapter_of_a_base_of_another_depth_is_refused(layers: int, tmp_path: Path) -> None:
    base = save_tiny("clip", tmp_path / "base")
    save_adapter(_adapted(base, target_modules=["q_proj"]), tmp_path / "adapter")
    other = save_tiny(tiny_clip(num_hidden_layers=layers), tmp_path / "other")
    with pytest.raises(ValueError, match=r"does not belong to the base .*text_model\.encoder\.layers"):
        load_dual_encoder(other, adapter=tmp_path / "adapter")


def test_listed_layers_on_a_deeper_base_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = save_tiny(tiny_clip(num_hidden_layers=1), tmp_path / "base")
    deeper = save_tiny("clip", tmp_path / "deeper")
    save_adapter(_adapted(base), tmp_path / "adapter")  # fewer than 20 layers, which PEFT lists by their full names
    load_dual_encoder(base, adapter=tmp_path / "adapter")
    assert not [record for record in caplog.records if record.name == "hf_infcl.hub.loading"]
    load_dual_encoder(deeper, adapter=tmp_path / "adapter")
    said = [record.getMessage() for record in caplog.records if record.name == "hf_infcl.hub.loading"]
    assert len(said) == 1
    assert "the first 1 of the 2 layers in text_model.encoder.layers" in said[0]


@pytest.mark.parametrize(
    "targets", [["vision_model.encoder.layers.1.self_attn.q_proj"], "vision_model.*[.]0[.].*q_proj"]
)
def test_layers_that_were_chosen_are_none(targets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = save_tiny("clip", tmp_path / "base")
    save_adapter(_adapted(base, target_modules=targets), tmp_path / "adapter")
    load_dual_encoder(base, adapter=tmp_path / "adapter")
    assert not [record for record in caplog.records if record.name == "hf_infcl.hub.loading"]


@pytest.mark.parametrize("other", sorted({*FAMILIES} - {"clip"}))
@pytest.mark.parametrize("targets", [None, ["q_proj", "query"]])
def test_an_adapter_of_another_family_is_refused(other: str, targets: list[str] | None, tmp_path: Path) -> None:
    mine, base = save_tiny("clip", tmp_path / "mine"), save_tiny(other, tmp_path / "base")
    save_adapter(_adapted(mine, target_modules=targets), tmp_path / "adapter", tiny_processor("clip"))
    with pytest.raises(ValueError, match="adapter '.*' does not belong to the base"):
        load_dual_encoder(base, adapter=tmp_path / "adapter")


def test_a_truncated_adapter_is_named(tmp_path: Path) -> None:
    base = save_tiny("clip", tmp_path / "base")
    save_adapter(_adapted(base), tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors' is damaged or incomplete"):
        load_dual_encoder(base, adapter=tmp_path / "adapter")


@pytest.mark.parametrize("place", ["demo-output/bse", "/nope", "./nope/none", "~/nope/none", "a/b/c"])
@pytest.mark.parametrize("what", ["model", "base", "adapter"])
def test_a_misspelt_folder_is_said_to_be_no_folder(
    place: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model, adapter = (place, None) if what == "model" else (save_tiny("clip", tmp_path / "base"), place)
    if what == "base":
        save_adapter(_adapted(model), tmp_path / "adapter")
        model, adapter = place, str(tmp_path / "adapter")
    said = "is no file or folder here" if place == "demo-output/bse" else "no such file or folder"
    with pytest.raises(OSError, match=said) as caught:
        load_dual_encoder(model, adapter=adapter)
    assert str(Path(place.replace("~", str(tmp_path))).absolute()) in str(caught.value)
    assert "load_dual_encoder(BASE" not in str(caught.value)


def test_a_folder_of_something_else_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"the folder '{tmp_path}' has no config.json; expected a model that"):
        load_dual_encoder(tmp_path)


def test_the_home_folder_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_adapter(_adapted(save_tiny("clip", tmp_path / "base")), tmp_path / "adapter")
    load_dual_encoder("~/base", adapter="~/adapter")


def test_only_safetensors_are_loaded(tmp_path: Path) -> None:
    base = save_tiny("clip", tmp_path / "base")
    save_adapter(_adapted(base), tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(weights), tmp_path / "adapter" / "adapter_model.bin")
    weights.unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        load_dual_encoder(base, adapter=tmp_path / "adapter")
    weights = tmp_path / "base" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "base" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(OSError, match="safetensors"):
        load_dual_encoder(base)
    save_file({}, weights)


def test_an_adapter_is_made_and_loaded_without_a_notice_of_deprecation(tmp_path: Path, recwarn: Any) -> None:
    base = save_tiny("clip", tmp_path / "base")
    save_adapter(_adapted(base), tmp_path / "adapter")
    model = tiny_clip()
    recwarn.clear()
    adapters.DualEncoderPeftModel(model, complete_lora_config(model, LoraConfig(r=2)))
    load_dual_encoder(base, adapter=str(tmp_path / "adapter"))
    assert not [warning for warning in recwarn if issubclass(warning.category, FutureWarning)]
