"""The end-of-text id of old CLIP checkpoints."""

import logging
from typing import Any

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
