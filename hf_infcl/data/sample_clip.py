"""A small CLIP processor for the sample data, built on the spot; its tokenizer is learnt from the captions."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from hf_infcl.data.sample import SAMPLE_IMAGE_SIZE, SPLITS, sample_captions

if TYPE_CHECKING:
    from transformers import CLIPProcessor

# The longest caption takes 25 tokens with its two ends; 32 leaves room for a user's own wording.
SAMPLE_TEXT_LENGTH = 32
_BOS, _EOS = "<|startoftext|>", "<|endoftext|>"
_TRAINING_CAPTIONS = 2000  # every word of the grammar occurs dozens of times


def sample_processor(image_size: int = SAMPLE_IMAGE_SIZE) -> CLIPProcessor:
    """A `CLIPProcessor` for a small model of one's own, without a download.

    Its tokenizer is a real CLIP tokenizer (byte-level BPE, lower case) in which every word of the sample captions is
    one token and any other text still has a spelling. The end token is also the padding token and has the highest id,
    so that CLIP pools at the first one. Saved with `save_pretrained`, it is loaded by `AutoProcessor`.

    Args:
        image_size: width and height that pictures are resized and cropped to.

    Returns:
        The processor. `len(processor.tokenizer)` is the vocabulary's size, `processor.tokenizer.model_max_length` the
        text length; a config takes `bos_token_id`, `eos_token_id` and `pad_token_id` from the tokenizer.

    Example:
        >>> processor = sample_processor(32)
        >>> len(processor.tokenizer("a small red star").input_ids)
        6
    """
    from transformers import CLIPImageProcessorPil, CLIPProcessor, CLIPTokenizer

    vocab, merges = _vocabulary()
    tokenizer = CLIPTokenizer(vocab=dict(vocab), merges=list(merges), model_max_length=SAMPLE_TEXT_LENGTH)
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": image_size}, crop_size={"height": image_size, "width": image_size}
    )
    return CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer)


@lru_cache(maxsize=1)
def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer = normalizers.Lowercase()
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    captions = [text for split in SPLITS for text in sample_captions(split, _TRAINING_CAPTIONS)]
    learner.train_from_iterator(
        (caption.replace(",", " ,") for caption in captions),
        trainers.BpeTrainer(vocab_size=100_000, min_frequency=2, end_of_word_suffix="</w>", show_progress=False),
    )
    merges = [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # CLIP's own order: bytes, bytes that end a word, merges, the two marks.
    tokens = [*alphabet, *(byte + "</w>" for byte in alphabet), *("".join(merge) for merge in merges), _BOS, _EOS]
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}, merges
