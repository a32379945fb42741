"""The backward traversal that every objective shares: its weights G in, both sides' gradients out."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_infcl.ops import Engine, Side, Weights, block_gradient
from hf_infcl.ring.shards import Block, Shard, blocks

Banks = tuple[Tensor | None, Tensor | None, Tensor | None]  # images, texts, ids


def shards(images: Tensor, texts: Tensor, ids: Tensor | None, banks: Banks = (None, None, None)) -> tuple[Shard, Shard]:
    """The two modalities' shards of a process alone; the bank's global rows come after the batch's."""
    bank_images, bank_texts, bank_ids = banks
    n = len(images)
    return (
        Shard(Side(images, 0, ids), None if bank_images is None else Side(bank_images, n, bank_ids)),
        Shard(Side(texts, 0, ids), None if bank_texts is None else Side(bank_texts, n, bank_ids)),
    )


def gradient_traversal(
    engine: Engine,
    images: Shard,
    texts: Shard,
    weights_of: Callable[[Block], Weights | None],
    factor: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Gradients of the batch's embeddings, and sum G u.

    Args:
        weights_of: makes a block's chunks of G; None where the block has no gradient.
        factor: scalar, what all of G is multiplied by.
        needs: whether the gradient of the images, of the texts and the sum of G u are wanted.

    Returns:
        (n, d) factor G Y and factor G'X in the embeddings' dtypes, None where not needed; sum G u without the factor.
    """
    x, y = images.batch.embeds, texts.batch.embeds
    # Rows that meet more than one block of columns need an accumulator; else each is rounded once, on its way out.
    row_dtype = x.dtype if texts.bank is None else engine.accumulator
    d_images = torch.zeros(x.shape, device=x.device, dtype=row_dtype) if needs[0] else None
    d_texts = torch.zeros(y.shape, device=y.device, dtype=engine.accumulator) if needs[1] else None
    sum_gu = torch.zeros((), device=engine.device, dtype=engine.accumulator)
    for block in blocks(images, texts):
        weights = weights_of(block)
        if weights is not None:
            d_rows = d_images if block.rows is images.batch else None
            d_cols = d_texts if block.cols is texts.batch else None
            sum_gu += block_gradient(engine, block.rows, block.cols, weights, factor, d_rows, d_cols, needs[2])
    return (
        None if d_images is None else d_images.to(x.dtype),
        None if d_texts is None else d_texts.mul_(factor).to(y.dtype),
        sum_gu,
    )
