"""InfoNCE over the ring: its forward and backward traversals, and their place in autograd.

With l_ij = s x_i.y_j, r_i and c_j the log-sum-exp of row i and column j over their candidates:

    L = sum_i (r_i - t_i) / 2N + sum_j (c_j - t_j) / 2N            t: the target's share of the logits
    G_ij = exp(l_ij - r_i) + exp(l_ij - c_j) - target_ij           dX = s G Y / 2N,  dY = s G'X / 2N,  ds = sum G u / 2N

(Inf-CL, arXiv 2410.17243, sections 3.2 and 3.3.)
"""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops import Engine, Side, Statistics, block_gradient, block_statistics
from hf_infcl.ring.shards import Block, Shard, blocks
from hf_infcl.ring.spec import Spec

Banks = tuple[Tensor | None, Tensor | None, Tensor | None]  # images, texts, ids


def _shards(images: Tensor, texts: Tensor, ids: Tensor | None, banks: Banks) -> tuple[Shard, Shard]:
    bank_images, bank_texts, bank_ids = banks
    n = len(images)
    return (
        Shard(Side(images, 0, ids), None if bank_images is None else Side(bank_images, n, bank_ids)),
        Shard(Side(texts, 0, ids), None if bank_texts is None else Side(bank_texts, n, bank_ids)),
    )


def _pick(block: Block, rows: Statistics | None, cols: Statistics | None) -> tuple[Statistics | None, Statistics | None]:
    return rows if block.for_rows else None, cols if block.for_cols else None


def softmax_forward(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the statistics of rows and of columns ((0,) where a direction is not wanted)."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    mine, travelling = _shards(images, texts, ids, banks)
    s = scale.detach().reshape(()).to(engine.accumulator)
    row_stats, col_stats = (
        Statistics.empty(len(side), spec.rule, device=engine.device, dtype=engine.accumulator) if wanted else None
        for side, wanted in ((images, spec.for_rows), (texts, spec.for_cols))
    )
    for block in blocks(mine, travelling):
        wanted = _pick(block, row_stats, col_stats)
        if wanted != (None, None):
            block_statistics(engine, block.rows, block.cols, s, spec.rule, *wanted)
    total = torch.zeros((), device=engine.device, dtype=engine.accumulator)
    for stats in (row_stats, col_stats):
        if stats is not None:
            total += stats.losses(s, spec.rule).sum()
    none = torch.empty(0, device=engine.device, dtype=engine.accumulator)
    row_data, col_data = (none.clone() if stats is None else stats.data for stats in (row_stats, col_stats))
    return total / (spec.directions * len(images)), row_data, col_data


def softmax_backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    banks: Banks,
    row_data: Tensor,
    col_data: Tensor,
    spec: Spec,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the image embeddings, the text embeddings (where needed) and the scale."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    mine, travelling = _shards(images, texts, ids, banks)
    s = scale.reshape(()).to(engine.accumulator)
    share = grad.to(engine.accumulator) / (spec.directions * len(images) * engine.gain)
    all_rows = Statistics(row_data) if spec.for_rows else None
    all_cols = Statistics(col_data) if spec.for_cols else None
    # Rows that meet more than one block of columns need an accumulator; else each is rounded once, on its way out.
    row_dtype = engine.accumulator if banks[1] is not None else images.dtype
    d_images = torch.zeros(images.shape, device=images.device, dtype=row_dtype) if needs[0] else None
    d_texts = torch.zeros(texts.shape, device=texts.device, dtype=engine.accumulator) if needs[1] else None
    sum_gu = torch.zeros((), device=engine.device, dtype=engine.accumulator)

    for block in blocks(mine, travelling):
        row_stats, col_stats = _pick(block, all_rows, all_cols)
        if row_stats is None and col_stats is None:
            continue

        def weights(r: slice, c: slice, want_sum: bool, block=block, row_stats=row_stats, col_stats=col_stats):
            return engine.tiles.softmax_weights(
                block.rows[r],
                block.cols[c],
                s,
                spec.rule,
                None if row_stats is None else row_stats[r],
                None if col_stats is None else col_stats[c],
                engine.precision,
                want_sum,
            )

        d_rows = d_images if block.rows is mine.batch else None
        d_cols = d_texts if block.cols is travelling.batch else None
        sum_gu += block_gradient(engine, block.rows, block.cols, weights, s * share, d_rows, d_cols, needs[2])

    if d_texts is not None:
        d_texts = d_texts.mul_(s * share).to(texts.dtype)
    d_scale = (share * sum_gu).to(scale.dtype).reshape(scale.shape) if needs[2] else None
    return None if d_images is None else d_images.to(images.dtype), d_texts, d_scale


class _SoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        texts: Tensor,
        scale: Tensor,
        ids: Tensor | None,
        bank_images: Tensor | None,
        bank_texts: Tensor | None,
        bank_ids: Tensor | None,
        spec: Spec,
    ) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            loss, rows, cols = softmax_forward(images, texts, scale, ids, (bank_images, bank_texts, bank_ids), spec)
        ctx.save_for_backward(images, texts, scale, ids, bank_images, bank_texts, bank_ids, rows, cols)
        ctx.spec = spec
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, scale, ids, bank_images, bank_texts, bank_ids, rows, cols = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with torch.autocast(images.device.type, enabled=False):
            d_images, d_texts, d_scale = softmax_backward(
                grad, images, texts, scale, ids, (bank_images, bank_texts, bank_ids), rows, cols, ctx.spec, needs[:3]
            )
        return d_images, d_texts, d_scale, None, None, None, None, None


def softmax_loss(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec
) -> Tensor:
    """The InfoNCE loss of the global batch, differentiable in both embeddings and the scale."""
    return _SoftmaxLoss.apply(images, texts, scale, ids, *banks, spec)
