"""The backward traversal that every objective shares: its weights G in, both sides' gradients out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_infcl.ops import Engine, Side, Weights, block_gradient, inner_product
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.rounds import Yield, around
from hf_infcl.ring.shards import Block, Shard, blocks

Banks = tuple[Tensor | None, Tensor | None, Tensor | None]  # images, texts, ids


def shards(
    layout: Layout, images: Tensor, texts: Tensor, ids: Tensor | None, banks: Banks = (None, None, None)
) -> tuple[Shard, Shard]:
    """This process's shards of the two modalities."""
    bank_images, bank_texts, bank_ids = banks
    rank = layout.world.rank
    offset, bank_offset = layout.offset(rank), layout.bank_offset(rank)
    return (
        Shard(Side(images, offset, ids), None if bank_images is None else Side(bank_images, bank_offset, bank_ids)),
        Shard(Side(texts, offset, ids), None if bank_texts is None else Side(bank_texts, bank_offset, bank_ids)),
    )


def gradient_traversal(
    engine: Engine,
    layout: Layout,
    images: Shard,
    texts: Shard,
    extra: Sequence[Tensor],
    weights_of: Callable[[Block, tuple[Tensor, ...]], Weights | None],
    factor: Tensor,
    needs: tuple[bool, bool, bool],
    rounded: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Gradients of this process's embeddings, and the sum of G u over its images' rows.

    Args:
        extra: what the weights need of the texts' rows besides their embeddings; travels with them.
        weights_of: makes a block's chunks of G, given the extra tensors of its columns; None where the block has no
            gradient.
        factor: scalar, what all of G is multiplied by.
        needs: whether the gradient of the images, of the texts and the sum of G u are wanted.
        rounded: to the embeddings' dtypes; else the gradients stay in the accumulator's.

    Returns:
        (n, d) factor G Y and factor G'X, None where not needed; sum G u without the factor.
    """
    x, y = images.batch.embeds, texts.batch.embeds
    # Rows that meet more than one block of columns need an accumulator; else each is rounded once, on its way out.
    meets_one_block = sum(layout.bank_sizes) == 0 and (layout.world.is_alone or layout.gathers)
    d_images = None
    if needs[0]:
        dtype = x.dtype if rounded and meets_one_block else engine.accumulator
        d_images = torch.zeros(x.shape, device=x.device, dtype=dtype)
    sum_gu = torch.zeros((), device=engine.device, dtype=engine.accumulator)
    # sum G u = sum_i x_i . (G Y)_i = sum_j y_j . (G'X)_j: where no gradient of the images is made, the texts' gives it.
    from_texts = needs[2] and needs[1] and not needs[0]

    def visit(visitors: Shard, extra: tuple[Tensor, ...]) -> Yield:
        columns = visitors.batch.embeds
        d_texts = torch.zeros(columns.shape, device=y.device, dtype=engine.accumulator) if needs[1] else None
        for block in blocks(images, visitors):
            weights = weights_of(block, extra)
            if weights is not None:
                d_rows = d_images if block.rows is images.batch else None
                d_cols = d_texts if block.cols is visitors.batch else None
                want_sum = needs[2] and not (from_texts and d_cols is not None)
                sum_gu.add_(block_gradient(engine, block.rows, block.cols, weights, factor, d_rows, d_cols, want_sum))
        if from_texts and d_texts is not None:
            sum_gu.add_(inner_product(columns, d_texts))
        return () if d_texts is None else (d_texts,)

    # On request half the bytes of what travels most; every hop rounds the sum so far.
    rounds = layout.rounds_gradients and engine.dtype in (torch.bfloat16, torch.float16)
    made = around(layout, texts, extra, visit, add_, wire=torch.bfloat16 if rounds else None)
    d_texts = made[0].mul_(factor) if made else None
    if rounded:
        d_images, d_texts = (None if d is None else d.to(x.dtype) for d in (d_images, d_texts))
    return d_images, d_texts, sum_gu


def add_(into: Yield, other: Yield) -> None:
    """Merges two yields by adding."""
    for mine, theirs in zip(into, other, strict=True):
        mine += theirs
