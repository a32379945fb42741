"""What published configurations and tokenizers say wrongly: CLIP's end-of-text id, SigLIP 2's letter case."""

import logging
from typing import Any

from tokenizers import normalizers
from torch import nn

logger = logging.getLogger(__name__)

# Old CLIP configurations say 2 here; transformers then pools at the largest id of the row, which is the end of the text
# only while that is the vocabulary's last word.
_LEGACY_EOS = 2
_CLIP_EOS = 49407
_CLIP_VOCABULARY = 49408


def correct_eos_token(model: nn.Module, processor: Any = None) -> None:
    """Corrects, with a notice, an old CLIP configuration whose end-of-text id would be mistaken for an added word.

    Args:
        model: the dual encoder; changed in place, configuration included.
        processor: its processor or tokenizer, asked for the true id; without it the id of CLIP's vocabulary is taken
            where words were added to that.
    """
    tower: Any
    for tower in model.modules():
        config: Any = getattr(tower, "config", None)
        if (
            getattr(config, "model_type", None) != "clip_text_model"
            or getattr(tower, "eos_token_id", None) != _LEGACY_EOS
        ):
            continue
        tokenizer = getattr(processor, "tokenizer", processor)
        eos = getattr(tokenizer, "eos_token_id", None)
        if eos is None and _words(tower) > _CLIP_VOCABULARY:
            eos = _CLIP_EOS
        if eos is None or eos == _LEGACY_EOS:
            continue
        if _words(tower) > eos + 1:
            logger.warning("eos_token_id=2 of an old CLIP configuration with added words: corrected to %d", eos)
        tower.eos_token_id = eos
        config.eos_token_id = eos


def _words(tower: Any) -> int:
    return int(tower.get_input_embeddings().num_embeddings)


def lower_case_as_trained(processor: Any) -> None:
    """Makes a tokenizer published with `do_lower_case` lower its letters, with a notice, where its class does not.

    The SigLIP 2 checkpoints of fixed resolution are trained on lower-case captions and say so, but come with Gemma's
    tokenizer, which has no such option.

    Args:
        processor: the processor or the tokenizer; changed in place, and so saved.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not getattr(tokenizer, "init_kwargs", {}).get("do_lower_case", False):
        return
    if tokenizer("A", add_special_tokens=False)["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]:
        return
    logger.warning("%s does not lower its letters although do_lower_case says so: corrected", type(tokenizer).__name__)
    lower = normalizers.Lowercase()
    backend.normalizer = lower if backend.normalizer is None else normalizers.Sequence([lower, backend.normalizer])
