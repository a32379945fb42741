"""InfoNCE over the ring: its forward and backward traversals, and their place in autograd.

With l_ij = s x_i.y_j, r_i and c_j the log-sum-exp of row i and column j over their candidates:

    L = sum_i (r_i - t_i) / 2N + sum_j (c_j - t_j) / 2N            t: the target's share of the logits
    G_ij = exp(l_ij - r_i) + exp(l_ij - c_j) - target_ij           dX = s G Y / 2N,  dY = s G'X / 2N,  ds = sum G u / 2N

(Inf-CL, arXiv 2410.17243, sections 3.2 and 3.3.)
"""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops import Engine, Statistics, Weights, block_statistics
from hf_infcl.ring.shards import Block, blocks
from hf_infcl.ring.spec import Spec
from hf_infcl.ring.traversal import Banks, gradient_traversal, shards

Needs = tuple[bool, bool, bool]  # gradient of images, texts, scale
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _wanted(block: Block, rows: Statistics | None, cols: Statistics | None) -> tuple[Statistics | None, ...]:
    return rows if block.for_rows else None, cols if block.for_cols else None


def softmax_forward(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the statistics of rows and of columns (empty where a direction is not wanted)."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    mine, travelling = shards(images, texts, ids, banks)
    s = scale.detach().reshape(()).to(engine.accumulator)
    row_stats, col_stats = (
        Statistics.empty(len(images), spec.rule, device=engine.device, dtype=engine.accumulator) if wanted else None
        for wanted in (spec.for_rows, spec.for_cols)
    )
    for block in blocks(mine, travelling):
        rows, cols = _wanted(block, row_stats, col_stats)
        if rows is not None or cols is not None:
            block_statistics(engine, block.rows, block.cols, s, spec.rule, rows, cols)
    total = torch.zeros((), device=engine.device, dtype=engine.accumulator)
    for stats in (row_stats, col_stats):
        if stats is not None:
            total += stats.losses(s, spec.rule).sum()
    row_data, col_data = (s.new_empty(0) if stats is None else stats.data for stats in (row_stats, col_stats))
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
    needs: Needs,
) -> Gradients:
    """Gradients of the image embeddings, the text embeddings and the scale, None where not needed."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    mine, travelling = shards(images, texts, ids, banks)
    s = scale.detach().reshape(()).to(engine.accumulator)
    share = grad.to(engine.accumulator) / (spec.directions * len(images) * engine.gain)
    all_rows = Statistics(row_data) if spec.for_rows else None
    all_cols = Statistics(col_data) if spec.for_cols else None

    def weights_of(block: Block) -> Weights | None:
        rows, cols = _wanted(block, all_rows, all_cols)
        if rows is None and cols is None:
            return None

        def weights(r: slice, c: slice, want_sum: bool) -> tuple[Tensor, Tensor | None]:
            return engine.tiles.softmax_weights(
                block.rows[r],
                block.cols[c],
                s,
                spec.rule,
                None if rows is None else rows[r],
                None if cols is None else cols[c],
                engine.precision,
                want_sum,
            )

        return weights

    d_images, d_texts, sum_gu = gradient_traversal(engine, mine, travelling, weights_of, s * share, needs)
    return d_images, d_texts, (share * sum_gu).to(scale.dtype).reshape(scale.shape) if needs[2] else None


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
        banks = bank_images, bank_texts, bank_ids
        with torch.autocast(images.device.type, enabled=False):
            gradients = softmax_backward(
                grad, images, texts, scale, ids, banks, rows, cols, ctx.spec, ctx.needs_input_grad[:3]
            )
        return *gradients, None, None, None, None, None


def softmax_loss(images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: Spec) -> Tensor:
    """The InfoNCE loss of the global batch, differentiable in both embeddings and the scale."""
    if torch.compiler.is_compiling():
        from hf_infcl.ring.compiled import compiled_softmax_loss

        return compiled_softmax_loss(images, texts, scale, ids, banks, spec)
    return _SoftmaxLoss.apply(images, texts, scale, ids, *banks, spec)
