"""Tiny dual encoders of each supported family with processors, made on the spot from a seed, without a network.

    model, processor = tiny_clip(), tiny_processor("clip")
    path = save_tiny("siglip", tmp_path)          # AutoModel and AutoProcessor load it

Images are 32 x 32 in patches of 16, towers have two layers of width 32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    AltCLIPConfig,
    AltCLIPModel,
    AltCLIPProcessor,
    BertConfig,
    BertTokenizer,
    ChineseCLIPConfig,
    ChineseCLIPImageProcessorPil,
    ChineseCLIPModel,
    ChineseCLIPProcessor,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    Dinov2Config,
    EfficientNetConfig,
    MetaClip2Config,
    MetaClip2Model,
    PreTrainedTokenizerFast,
    Siglip2Config,
    Siglip2ImageProcessorPil,
    Siglip2Model,
    Siglip2Processor,
    Siglip2Tokenizer,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipProcessor,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    VisionTextDualEncoderProcessor,
    ViTConfig,
)

IMAGE_SIZE = 32
_TOWER = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION = {**_TOWER, "image_size": IMAGE_SIZE, "patch_size": 16}
# Words that captions of tests use; all else is spelt out letter by letter.
_WORDS = """a an the of and on in with is to photo picture drawing dog cat bird two three four red green blue yellow
white black small large big circle square triangle star left right above below next striped dotted plain running
sleeping""".split()  # noqa: SIM905 - forty words on forty lines would hide them


def _merges(end: str = "") -> list[tuple[str, str]]:
    """Byte-pair merges that make each of the words one token."""
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS:
        pieces = [*word[:-1], word[-1] + end]
        while len(pieces) > 1:
            merges[pieces[0], pieces[1]] = None
            pieces = [pieces[0] + pieces[1], *pieces[2:]]
    return list(merges)


def _numbered(entries: list[str]) -> dict[str, int]:
    return {entry: index for index, entry in enumerate(dict.fromkeys(entries))}


def clip_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer over bytes and a few words; `model_max_length` is unset, as in some checkpoints."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(end="</w>")
    entries = [*letters, *(letter + "</w>" for letter in letters), *(first + second for first, second in merges)]
    return CLIPTokenizer(vocab=_numbered([*entries, "<|startoftext|>", "<|endoftext|>"]), merges=merges)


def siglip2_tokenizer() -> Siglip2Tokenizer:
    """The kind NaFlex checkpoints have, with the options they are published with."""
    merges = _merges()
    entries = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *(chr(code) for code in range(33, 127))]
    return Siglip2Tokenizer(
        vocab=_numbered([*entries, *(first + second for first, second in merges)]),
        merges=merges,
        add_bos_token=False,
        add_eos_token=True,
        padding_side="right",
        model_input_names=["input_ids"],
    )


def bert_tokenizer() -> BertTokenizer:
    letters = [chr(code) for code in range(33, 127)]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters), *_WORDS]
    return BertTokenizer(vocab=_numbered(entries))


def end_of_text_tokenizer(*, attention_mask: bool) -> PreTrainedTokenizerFast:
    """Pieces of words, then an end of text, as in SigLIP (no attention mask) and MetaCLIP 2."""
    letters = [chr(code) for code in range(33, 127)]
    entries = ["<unk>", "<pad>", "</s>", *letters, *("##" + letter for letter in letters), *_WORDS]
    tokenizer = Tokenizer(models.WordPiece(vocab=_numbered(entries), unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    names = ["input_ids", "attention_mask"] if attention_mask else ["input_ids"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", model_input_names=names
    )


def tiny_clip(seed: int = 0, **text: Any) -> CLIPModel:
    tokenizer = clip_tokenizer()
    special = {
        "bos_token_id": len(tokenizer) - 2,
        "eos_token_id": len(tokenizer) - 1,
        "pad_token_id": len(tokenizer) - 1,
    }
    text = {**_TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 77, **special, **text}
    torch.manual_seed(seed)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=16)).eval()


def tiny_metaclip_2(seed: int = 0) -> MetaClip2Model:
    text = {**_end_of_text_tower(), "max_position_embeddings": 77}
    torch.manual_seed(seed)
    return MetaClip2Model(MetaClip2Config(text_config=text, vision_config=_VISION, projection_dim=16)).eval()


def tiny_chinese_clip(seed: int = 0) -> ChineseCLIPModel:
    text = {**_TOWER, "vocab_size": len(bert_tokenizer()), "max_position_embeddings": 60}
    torch.manual_seed(seed)
    return ChineseCLIPModel(ChineseCLIPConfig(text_config=text, vision_config=_VISION, projection_dim=16)).eval()


def tiny_altclip(seed: int = 0) -> AltCLIPModel:
    text = {**_end_of_text_tower(), "max_position_embeddings": 60, "project_dim": 24, "initializer_factor": 1.0}
    torch.manual_seed(seed)
    return AltCLIPModel(AltCLIPConfig(text_config=text, vision_config=_VISION, projection_dim=16)).eval()


def _end_of_text_tower() -> dict[str, Any]:
    words = len(end_of_text_tokenizer(attention_mask=True))
    return {**_TOWER, "vocab_size": words, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}


def tiny_siglip(seed: int = 0) -> SiglipModel:
    text = {**_end_of_text_tower(), "max_position_embeddings": 64, "projection_size": 32}
    torch.manual_seed(seed)
    return _start_sigmoid(SiglipModel(SiglipConfig(text_config=text, vision_config=_VISION)))


def tiny_siglip2(seed: int = 0) -> Siglip2Model:
    """NaFlex: images of any shape as at most four patches of 16 x 16."""
    special = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": len(siglip2_tokenizer())}
    text = {**_TOWER, **special, "max_position_embeddings": 64, "projection_size": 32}
    vision = {**_TOWER, "num_patches": 4, "patch_size": 16}
    torch.manual_seed(seed)
    return _start_sigmoid(Siglip2Model(Siglip2Config(text_config=text, vision_config=vision)))


def _start_sigmoid(model: Any) -> Any:
    with torch.no_grad():  # near the published start, log(10) and -10; the class draws them at random
        model.logit_scale.fill_(2.3026)
        model.logit_bias.fill_(-10.0)
    return model.eval()


def tiny_vision_text_dual_encoder(seed: int = 0, vision: str = "vit") -> VisionTextDualEncoderModel:
    """BERT beside a "vit", a "dinov2" or an "efficientnet"."""
    text = BertConfig(**_TOWER, vocab_size=len(bert_tokenizer()), max_position_embeddings=48, pad_token_id=0)
    towers: dict[str, Callable[[], Any]] = {
        "vit": lambda: ViTConfig(**_VISION),
        "dinov2": lambda: Dinov2Config(**_VISION),
        "efficientnet": lambda: EfficientNetConfig(
            image_size=IMAGE_SIZE,
            width_coefficient=0.25,
            depth_coefficient=0.1,
            hidden_dim=320,
            hidden_size=320,
            dropout_rate=0.0,
            drop_connect_rate=0.0,
        ),
    }
    torch.manual_seed(seed)
    config = VisionTextDualEncoderConfig.from_vision_text_configs(towers[vision](), text, projection_dim=16)
    model = VisionTextDualEncoderModel(config)
    if vision == "efficientnet":
        _spread(model.vision_model)
    return model.eval()


def _spread(tower: nn.Module) -> None:
    """Keeps features away from zero in a tower whose published weights, unlike its random ones, do so."""
    for module in tower.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    with torch.no_grad():
        tower.train()(torch.randn(8, 3, IMAGE_SIZE, IMAGE_SIZE))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "altclip": tiny_altclip,
    "chinese_clip": tiny_chinese_clip,
    "clip": tiny_clip,
    "metaclip_2": tiny_metaclip_2,
    "siglip": tiny_siglip,
    "siglip2": tiny_siglip2,
    "vision-text-dual-encoder": tiny_vision_text_dual_encoder,
}


def _clip_images() -> CLIPImageProcessorPil:
    return CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )


def tiny_processor(family: str | nn.Module) -> Any:
    """The processor of a family, by `model_type` or by a model of it."""
    name = family if isinstance(family, str) else family.config.model_type
    if name == "clip":
        return CLIPProcessor(_clip_images(), clip_tokenizer())
    if name == "metaclip_2":
        return CLIPProcessor(_clip_images(), end_of_text_tokenizer(attention_mask=True))
    if name == "altclip":
        return AltCLIPProcessor(_clip_images(), end_of_text_tokenizer(attention_mask=True))
    if name == "chinese_clip":
        square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
        images = ChineseCLIPImageProcessorPil(size=square, crop_size=square)
        return ChineseCLIPProcessor(images, bert_tokenizer())
    if name == "siglip2":
        images = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=4)
        return Siglip2Processor(images, siglip2_tokenizer())
    if name == "siglip":
        images = SiglipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
        return SiglipProcessor(images, end_of_text_tokenizer(attention_mask=False))
    if name == "vision-text-dual-encoder":
        return VisionTextDualEncoderProcessor(_clip_images(), bert_tokenizer())
    raise ValueError(f"no tiny processor for {name!r}")


def save_tiny(family: str | nn.Module, path: str | Path, seed: int = 0) -> str:
    """Writes a tiny model (a family's, or the one given) and its processor into a folder, and returns the folder."""
    model = MODELS[family](seed=seed) if isinstance(family, str) else family
    model.save_pretrained(path)
    tiny_processor(model).save_pretrained(path)
    return str(path)


def tiny_batch(family: str | nn.Module, n: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """n random images and n captions of different lengths, as the family's own processor gives them."""
    name = family if isinstance(family, str) else family.config.model_type
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 40, 40, 3), dtype=torch.uint8, generator=generator)
    captions = [" ".join(_WORDS[(7 * i + j) % len(_WORDS)] for j in range(2 + i % 5)) for i in range(n)]
    padding = "max_length" if name.startswith("siglip") else True
    length = 64 if name.startswith("siglip") else 48
    batch = tiny_processor(name)(
        images=list(pixels.numpy()),
        text=captions,
        padding=padding,
        truncation=True,
        max_length=length,
        return_tensors="pt",
    )
    return dict(batch)
