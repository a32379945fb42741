"""Embedding a data set with a model or an adapter: what `evaluate` and `mine` begin with."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_infcl.cli.arguments import EmbeddingArguments
from hf_infcl.cli.building import first_rows, load_split

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


class ModelAndPairs(NamedTuple):
    """A model on the device, and the data set it is to embed.

    Attributes:
        model: the dual encoder.
        pairs: the data set, with a row for each caption.
        loader: its batches.
        device: of the model.
    """

    model: Any
    pairs: "ImageTextDataset"
    loader: Any
    device: Any


def load_pairs(args: EmbeddingArguments, *, split: str, max_samples: int | None) -> ModelAndPairs:
    """Loads data and model: what can go wrong here is the command line's.

    Args:
        args: the data set and the model.
        split: of the data set.
        max_samples: take the first so many rows only; None: all.

    Raises:
        ValueError, OSError: model or data are not there, or cannot be used.
    """
    import torch
    from torch.utils.data import DataLoader

    from hf_infcl import load_dual_encoder
    from hf_infcl.data import ImageTextCollator, ImageTextDataset
    from hf_infcl.models import family_of, prepare_dual_encoder

    # The data first: a model takes longer to come.
    columns: dict[str, Any] = {"image_column": args.image_column, "caption_column": args.caption_column}
    table = first_rows(load_split(args, split, **columns, on_bad_image=args.on_bad_image), max_samples)
    pairs = ImageTextDataset(
        table, **columns, captions="expand", empty_captions=args.empty_captions, on_bad_image=args.on_bad_image
    )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model, processor = load_dual_encoder(
        args.model_name_or_path, adapter=args.adapter, revision=args.model_revision, dtype=args.dtype
    )
    model = prepare_dual_encoder(model.to(device), processor)  # embeddings are all that is wanted of a batch
    loader: Any = DataLoader(
        pairs,
        batch_size=args.per_device_eval_batch_size,
        num_workers=args.dataloader_num_workers,
        collate_fn=ImageTextCollator(processor, family_of(model).text_padding(model, processor)),
    )
    return ModelAndPairs(model, pairs, loader, device)


def embed_pairs(args: Any, *, split: str, max_samples: int | None) -> EmbeddedPairs:
    """`embed` of what `load_pairs` loads.

    Args:
        args: has fields of `EmbeddingArguments`; those with a default may be lacking.
        split, max_samples: see `load_pairs`.
    """
    given = {entry.name: getattr(args, entry.name) for entry in fields(EmbeddingArguments) if hasattr(args, entry.name)}
    return embed(load_pairs(EmbeddingArguments(**given), split=split, max_samples=max_samples))


def embed(loaded: ModelAndPairs) -> EmbeddedPairs:
    """Embeds every pair, several captions of a picture included."""
    import torch
    from tqdm.auto import tqdm

    model, pairs, loader, device = loaded
    images, texts, ids = [], [], []
    with torch.inference_mode():
        for batch in tqdm(loader, desc="embedding", unit="batch"):
            ids.append(batch.pop("ids"))
            output = model(**{name: value.to(device) for name, value in batch.items()})
            images.append(output.image_embeds.float())
            texts.append(output.text_embeds.float())
    return EmbeddedPairs(pairs, torch.cat(images), torch.cat(texts), torch.cat(ids).to(device))
