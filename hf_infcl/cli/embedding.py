"""Embedding a data set with a model or an adapter: what `evaluate` and `mine` begin with."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from hf_infcl.data import ImageTextDataset


class EmbeddedPairs(NamedTuple):
    """A data set with a row for each caption, and its embeddings on the device.

    Attributes:
        pairs: the data set.
        image_embeds: (n, d) float32.
        text_embeds: (n, d) float32.
        ids: (n, 2) int64, picture and caption of each pair.
    """

    pairs: "ImageTextDataset"
    image_embeds: "Tensor"
    text_embeds: "Tensor"
    ids: "Tensor"


def embed_pairs(args: Any, *, split: str, max_samples: int | None) -> EmbeddedPairs:
    """Embeds every pair of a split, several captions of a picture included.

    Args:
        args: the fields that `EvaluateArguments` and `MineArguments` share.
        split: of the data set.
        max_samples: embed the first so many rows only; None: all.
    """
    import torch
    from torch.utils.data import DataLoader
    from tqdm.auto import tqdm

    from hf_infcl import load_dual_encoder
    from hf_infcl.data import ImageTextCollator, ImageTextDataset, load_image_text_dataset
    from hf_infcl.models import family_of

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model, processor = load_dual_encoder(
        args.model_name_or_path, adapter=args.adapter, revision=args.model_revision, dtype=args.dtype
    )
    model = model.to(device)
    table = load_image_text_dataset(
        args.dataset_name,
        config=args.dataset_config,
        split=split,
        revision=args.dataset_revision,
        image_column=args.image_column,
        caption_column=args.caption_column,
        image_root=args.image_root,
    )
    if max_samples is not None:
        table = table.select(range(min(max_samples, len(table))))
    pairs = ImageTextDataset(table, args.image_column, args.caption_column, captions="expand")
    loader: Any = DataLoader(
        pairs,
        batch_size=args.per_device_eval_batch_size,
        num_workers=args.dataloader_num_workers,
        collate_fn=ImageTextCollator(processor, family_of(model).text_padding(model, processor)),
    )
    images, texts, ids = [], [], []
    with torch.inference_mode():
        for batch in tqdm(loader, desc="embedding", unit="batch"):
            ids.append(batch.pop("ids"))
            output = model(**{name: value.to(device) for name, value in batch.items()})
            images.append(output.image_embeds.float())
            texts.append(output.text_embeds.float())
    return EmbeddedPairs(pairs, torch.cat(images), torch.cat(texts), torch.cat(ids).to(device))
