"""Padding and truncating text, and where a text's embedding is read."""

import logging
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

from hf_infcl.models import family_of, prepare_dual_encoder
from hf_infcl.models.tokens import lower_case_as_trained
from tests.tiny import MODELS, clip_tokenizer, tiny_clip, tiny_processor, tiny_siglip

CAPTIONS = ["a dog", "a photo of two red birds"]


@pytest.mark.parametrize("family", sorted(MODELS))
def test_an_embedding_does_not_depend_on_the_other_texts(family: str) -> None:
    model, processor = prepare_dual_encoder(MODELS[family]()), tiny_processor(family)
    padding = family_of(model).text_padding(model, processor)
    together = model(**processor.tokenizer(CAPTIONS, return_tensors="pt", **padding)).text_embeds
    for caption, expected in zip(CAPTIONS, together, strict=True):
        alone = model(**processor.tokenizer([caption], return_tensors="pt", **padding)).text_embeds[0]
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)


def test_siglip_pads_and_cuts_to_64() -> None:
    model, processor = tiny_siglip(), tiny_processor("siglip")
    padding = family_of(model).text_padding(model, processor)
    for captions in (["a dog"], CAPTIONS, ["dog " * 70]):
        ids = processor.tokenizer(captions, return_tensors="pt", **padding).input_ids
        assert ids.shape == (len(captions), 64)


def test_siglip_ignores_a_shorter_limit_of_the_tokenizer() -> None:
    model, processor = tiny_siglip(), tiny_processor("siglip")
    processor.tokenizer.model_max_length = 20
    assert family_of(model).text_padding(model, processor)["max_length"] == 64


def test_clip_cuts_at_77_and_keeps_the_end_of_text() -> None:
    model, processor = prepare_dual_encoder(tiny_clip()), tiny_processor("clip")
    assert processor.tokenizer.model_max_length > 1e6
    padding = family_of(model).text_padding(model, processor)
    ids = processor.tokenizer(["dog " * 300, "", "a dog 🐶"], return_tensors="pt", **padding)
    assert ids.input_ids.shape == (3, 77)
    assert ids.input_ids[0, -1] == processor.tokenizer.eos_token_id
    assert ids.input_ids[1, :2].tolist() == [processor.tokenizer.bos_token_id, processor.tokenizer.eos_token_id]
    assert model(**ids).text_embeds.isfinite().all()


def test_the_shorter_of_the_limits_of_tokenizer_and_model_holds() -> None:
    model, tokenizer = tiny_clip(), clip_tokenizer()
    tokenizer.model_max_length = 30
    assert family_of(model).text_padding(model, tokenizer)["max_length"] == 30


def test_an_old_clip_configuration_with_added_words_is_corrected(caplog: pytest.LogCaptureFixture) -> None:
    """The feature of a text that holds an added word equals that of the same weights with the true end-of-text id."""
    ids = torch.tensor([[49406, 320, 49408, 1929, 49407]])
    special = {"vocab_size": 49410, "bos_token_id": 49406, "pad_token_id": 49407}
    new = prepare_dual_encoder(tiny_clip(**special, eos_token_id=49407))
    wrong = tiny_clip(**special, eos_token_id=2)
    with caplog.at_level(logging.WARNING):
        old = prepare_dual_encoder(tiny_clip(**special, eos_token_id=2))
    assert "eos_token_id=2" in caplog.text
    expected = new(input_ids=ids).text_embeds
    torch.testing.assert_close(old(input_ids=ids).text_embeds, expected)
    uncorrected = torch.nn.functional.normalize(wrong.get_text_features(input_ids=ids).pooler_output, dim=-1)
    assert not torch.allclose(uncorrected, expected, atol=1e-2)


def test_the_tokenizer_tells_the_end_of_text_of_a_small_vocabulary() -> None:
    processor = tiny_processor("clip")
    eos = processor.tokenizer.eos_token_id
    model = prepare_dual_encoder(tiny_clip(vocab_size=eos + 3, eos_token_id=2), processor)
    reference = prepare_dual_encoder(tiny_clip(vocab_size=eos + 3))
    ids = torch.tensor([[eos - 1, 5, eos + 1, 6, eos]])
    torch.testing.assert_close(model(input_ids=ids).text_embeds, reference(input_ids=ids).text_embeds)


def test_an_old_clip_configuration_without_added_words_embeds_the_same() -> None:
    processor = tiny_processor("clip")
    texts = processor.tokenizer(CAPTIONS, padding=True, return_tensors="pt")
    old = prepare_dual_encoder(tiny_clip(eos_token_id=2))
    new = prepare_dual_encoder(tiny_clip())
    torch.testing.assert_close(old(**texts).text_embeds, new(**texts).text_embeds)


def test_a_tokenizer_published_with_do_lower_case_lowers_its_letters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "dog": 2, "Dog": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", do_lower_case=True)
    assert tokenizer("a Dog").input_ids == [1, 3]
    with caplog.at_level(logging.WARNING):
        lower_case_as_trained(tokenizer)
    assert "do_lower_case" in caplog.text
    assert tokenizer("a Dog").input_ids == [1, 2]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("a Dog").input_ids == [1, 2]
    caplog.clear()
    lower_case_as_trained(again)
    assert not caplog.records


@pytest.mark.parametrize("family", sorted(MODELS))
def test_the_tiny_tokenizers_load_back_as_they_were(family: str, tmp_path: Path) -> None:
    processor = tiny_processor(family)
    processor.save_pretrained(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path)
    padding = family_of(MODELS[family]()).text_padding(MODELS[family](), processor)
    assert dict(again.tokenizer(CAPTIONS, **padding)) == dict(processor.tokenizer(CAPTIONS, **padding))
