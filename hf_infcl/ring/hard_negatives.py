"""InfoNCE over the positive and the k hardest negatives of every anchor, over the ring.

With T_i the k largest l_ij = s x_i.y_j over the valid candidates of anchor i:

    L_i = log(exp l_ii + sum_{j in T_i} exp l_ij) - l_ii        p_ij = exp(l_ij - r_i) on {i} and T_i, 0 elsewhere
    dx_i += s (sum_{j in T_i} p_ij y_j + (p_ii - 1) y_i)        dy_j += s p_ij x_i

and likewise with texts as anchors. The forward is one search through all blocks; the backward touches n x k entries.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_infcl.ops import Engine, Side, Statistics
from hf_infcl.ops.statistics import LOG_SUM, MAX
from hf_infcl.ops.topk import (
    Limits,
    Links,
    TopK,
    best_of,
    block_link_gradient,
    block_topk,
    pair_scores,
    probabilities,
    selected_statistics,
)
from hf_infcl.ring.derivatives import first_derivative_only, without_autocast
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.rounds import Yield, around
from hf_infcl.ring.shards import Shard, blocks
from hf_infcl.ring.spec import Spec, agreement
from hf_infcl.ring.traversal import Banks, add_, shards
from hf_infcl.ring.world import World

Needs = tuple[bool, bool, bool]  # gradient of images, texts, scale


@dataclass(frozen=True)
class HardNegativeSpec(Spec):
    """What the hard-negative loss asks of a sweep."""

    k: int = 1
    limits: Limits = field(default_factory=Limits)


class HardNegativeCounts(NamedTuple):
    """What is counted besides the loss, over all anchors of all ranks: float64 scalars.

    Attributes:
        skipped, met: (anchor, block) pairs that were skipped, and all of them.
        hardest_sum, with_negatives: sum of the hardest negatives' scores, and how many anchors have one.
        beaten: anchors whose hardest negative scores above their pair.
        anchors: all of them.
    """

    skipped: Tensor
    met: Tensor
    hardest_sum: Tensor
    with_negatives: Tensor
    beaten: Tensor
    anchors: Tensor


def hard_negative_forward(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    banks: Banks,
    spec: HardNegativeSpec,
    layout: Layout,
) -> tuple[Tensor, ...]:
    """The loss; what was counted; and per direction the selected scores and indices and the statistics.

    Returns:
        loss (), counts (those of `HardNegativeCounts`), row scores (n, k), row indices (n, k), row statistics (4, n),
        and the same three of columns (empty where a direction is not wanted).
    """
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    mine, travelling = shards(layout, images, texts, ids, banks)
    s = scale.detach().reshape(()).to(engine.accumulator)
    positive = pair_scores(images, texts, engine.accumulator)
    ceiling = spec.limits.ceiling(positive)
    row_best = _empty(engine, len(images), spec.k) if spec.for_rows else None
    col_counts = torch.zeros(2, device=engine.device, dtype=torch.int64)

    def visit(visitors: Shard, extra: tuple[Tensor, ...]) -> Yield:
        col_best = None
        if spec.for_cols:
            empty = _empty(engine, len(visitors.batch), spec.k)
            col_best = TopK(empty.scores, empty.indices, col_counts)
        for block in blocks(mine, visitors):
            rows = row_best if block.for_rows else None
            cols = col_best if block.for_cols else None
            if rows is not None or cols is not None:
                block_topk(
                    engine,
                    block.rows,
                    block.cols,
                    rows,
                    cols,
                    row_ceiling=ceiling if rows is not None else None,
                    col_ceiling=extra[0] if extra and cols is not None else None,
                )
        return () if col_best is None else (col_best.scores, col_best.indices)

    extra = [ceiling] if ceiling is not None and spec.for_cols else []
    home = around(layout, travelling, extra, visit, _merge_best)
    col_best = TopK(home[0], home[1], col_counts) if home else None

    # The loss and all that is counted, in one reduction.
    sums = torch.zeros(1 + len(HardNegativeCounts._fields), device=engine.device, dtype=torch.float64)
    found: list[Tensor] = []
    for best in (row_best, col_best):
        if best is None:
            found += [s.new_empty(0) for _ in range(3)]  # an operator's outputs must not be each other
            continue
        stats = selected_statistics(positive, best, s, spec.rule)
        sums += torch.stack([stats.losses(s, spec.rule).sum().double(), *_counts(best, positive)])
        found += [best.scores, best.indices, stats.data]
    layout.world.sum_(sums)
    loss = (sums[0] / (spec.directions * layout.rows)).to(engine.accumulator)
    return loss, sums[1:], *found


def _counts(best: TopK, positive: Tensor) -> HardNegativeCounts:
    hardest = best.hardest
    exists = hardest != -torch.inf
    skipped, met = best.counts
    counted = (
        skipped,
        met,
        torch.where(exists, hardest, 0.0).double().sum(),
        exists.sum(),
        (hardest > positive).sum(),
        torch.full_like(best.counts[0], len(best)),
    )
    return HardNegativeCounts(*(value.double() for value in counted))


def _empty(engine: Engine, n: int, k: int) -> TopK:
    return TopK.empty(n, k, device=engine.device, dtype=engine.accumulator)


def _merge_best(into: Yield, other: Yield) -> None:
    k = into[0].shape[1]
    scores, indices = best_of(torch.cat([into[0], other[0]], 1), torch.cat([into[1], other[1]], 1), k)
    into[0].copy_(scores)
    into[1].copy_(indices)


def _links(
    own: Tensor | None, own_index: int, scores: Tensor, indices: Tensor, stats: Statistics | None, s: Tensor
) -> Links | None:
    """The entries of G of one side's anchors: their negatives', after the pairs' where `own` is given."""
    if stats is None and own is None:
        return None
    weights, columns = [], []
    if own is not None:
        weights.append(own[:, None])
        columns.append(torch.arange(own_index, own_index + len(own), device=own.device)[:, None])
    if stats is not None:
        weights.append(probabilities(scores, stats, s))
        columns.append(indices)
    return Links(torch.cat(weights, 1), torch.cat(columns, 1))


def hard_negative_backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    banks: Banks,
    found: tuple[Tensor, ...],
    spec: HardNegativeSpec,
    layout: Layout,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the image embeddings, the text embeddings and the scale, None where not needed.

    Args:
        found: what `hard_negative_forward` returns after the counts.
    """
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    mine, travelling = shards(layout, images, texts, ids, banks)
    s = scale.detach().reshape(()).to(engine.accumulator)
    share = grad.to(engine.accumulator) / (spec.directions * layout.rows)
    factor = s * share * layout.world.size  # the towers' gradients are averaged over the ranks
    row_scores, row_indices, row_data, col_scores, col_indices, col_data = found
    row_stats = Statistics(row_data) if spec.for_rows else None
    col_stats = Statistics(col_data) if spec.for_cols else None

    positive = pair_scores(images, texts, engine.accumulator)
    own = torch.zeros_like(positive)
    for stats in (row_stats, col_stats):
        if stats is not None:
            own += torch.expm1(s * (positive - stats.data[MAX]) - stats.data[LOG_SUM])
    row_links = _links(own, mine.batch.offset, row_scores, row_indices, row_stats, s)
    col_links = _links(None, 0, col_scores, col_indices, col_stats, s)
    d_scale = None
    if needs[2]:
        total = (own * positive).sum()
        for links, scores in ((row_links, row_scores), (col_links, col_scores)):
            if links is not None and scores.numel():
                total += (links.weights[:, -scores.shape[1] :] * scores.clamp(min=_LOWEST)).sum()
        total = layout.world.sum_(total)
        d_scale = (share * total).to(scale.dtype).reshape(scale.shape)
    if not (needs[0] or needs[1]):
        return None, None, d_scale

    # Rounded once where one block is all that a row meets; else gathered in the accumulator dtype.
    meets_one_block = sum(layout.bank_sizes) == 0 and (layout.world.is_alone or layout.gathers)
    x, x_bank = mine.batch, mine.bank
    d_images = None
    if needs[0]:
        dtype = images.dtype if meets_one_block else engine.accumulator
        d_images = torch.zeros(images.shape, device=engine.device, dtype=dtype)
    text_dtype = texts.dtype if meets_one_block and layout.world.is_alone else engine.accumulator

    def visit(visitors: Shard, extra: tuple[Tensor, ...]) -> Yield:
        selected = Links(*extra) if extra else None
        y, y_bank = visitors.batch, visitors.bank
        if d_images is not None:
            block_link_gradient(engine, x, y, row_links, selected, factor, d_images)
            if y_bank is not None:
                block_link_gradient(engine, x, y_bank, row_links, None, factor, d_images)
        if not needs[1]:
            return ()
        d_texts = torch.zeros(y.embeds.shape, device=engine.device, dtype=text_dtype)
        block_link_gradient(engine, y, x, selected, row_links, factor, d_texts)
        if x_bank is not None and selected is not None:
            block_link_gradient(engine, y, x_bank, selected, None, factor, d_texts)
        return (d_texts,)

    extra = () if col_links is None else (col_links.weights, col_links.indices)
    home = around(layout, travelling, extra, visit, add_)
    return (
        None if d_images is None else d_images.to(images.dtype),
        home[0].to(texts.dtype) if home else None,
        d_scale,
    )


# A slot without a candidate has score -inf and weight 0; their product would be NaN.
_LOWEST = torch.finfo(torch.float32).min


class _HardNegativeLoss(torch.autograd.Function):
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
        spec: HardNegativeSpec,
        layout: Layout,
    ) -> tuple[Tensor, Tensor]:
        banks = bank_images, bank_texts, bank_ids
        with without_autocast(images.device):
            loss, counts, *found = hard_negative_forward(images, texts, scale, ids, banks, spec, layout)
        ctx.save_for_backward(images, texts, scale, ids, *banks, *found)
        ctx.spec, ctx.layout = spec, layout
        ctx.mark_non_differentiable(counts)
        return loss, counts

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, scale, ids, bank_images, bank_texts, bank_ids, *found = ctx.saved_tensors
        banks, needs = (bank_images, bank_texts, bank_ids), ctx.needs_input_grad[:3]
        with without_autocast(images.device):
            gradients = hard_negative_backward(
                grad, images, texts, scale, ids, banks, tuple(found), ctx.spec, ctx.layout, needs
            )
        return *gradients, *[None] * 6


def hard_negative_loss(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: HardNegativeSpec
) -> tuple[Tensor, Tensor]:
    """The loss over positives and hardest negatives of the global batch, differentiable, and what was counted.

    Returns:
        The loss, and the values of `HardNegativeCounts`, (6,) float64.
    """
    if not torch.compiler.is_compiling():
        return _hard_negative_loss(images, texts, scale, ids, banks, spec)
    if World.of(spec.group).is_alone:
        from hf_infcl.ring.compiled import compiled_hard_negative_loss

        return compiled_hard_negative_loss(images, texts, scale, ids, banks, spec)
    # Messages between processes are no part of a graph.
    return torch.compiler.disable(_hard_negative_loss)(images, texts, scale, ids, banks, spec)


def _hard_negative_loss(
    images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, banks: Banks, spec: HardNegativeSpec
) -> tuple[Tensor, Tensor]:
    options = agreement("hard_negative_loss", spec, images, ids, images=images, texts=texts, logit_scale=scale)
    options |= {"k": spec.k, **vars(spec.limits)}
    bank_rows = 0 if banks[0] is None else len(banks[0])
    layout = Layout.of(spec.group, len(images), bank_rows, images.device, options)
    # An anchor has every row but its own for a candidate, and no more room is needed than for these.
    spec = replace(spec, k=max(1, min(spec.k, layout.rows - 1 + sum(layout.bank_sizes))))
    return _HardNegativeLoss.apply(images, texts, scale, ids, *banks, spec, layout)


def hardest(
    queries: Side, keys: Side, spec: HardNegativeSpec, ceiling: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The k best keys of every query, over all ranks' keys.

    Args:
        queries: this rank's queries; their offset is not used.
        keys: this rank's keys; likewise.
        ceiling: (n,) in the accumulator dtype: the highest score that a query's key may have; None: any.

    Returns:
        scores (n, k), global indices (n, k), skip counts (2,) summed over the ranks.
    """
    engine = Engine.of(queries.embeds, spec.backend, spec.precision, spec.block_size)
    options = agreement("hardest_negatives", spec, queries.embeds, queries.ids) | {"k": spec.k}
    layout = Layout.of(spec.group, len(keys), 0, engine.device, options)
    best = _empty(engine, len(queries), spec.k)

    def visit(visitors: Shard, _: tuple[Tensor, ...]) -> Yield:
        block_topk(engine, queries, visitors.batch, best, None, exclude_pairs=False, row_ceiling=ceiling)
        return ()

    _, travelling = shards(layout, keys.embeds, keys.embeds, keys.ids)
    around(layout, travelling, (), visit, _merge_best)
    return *best.in_order(), layout.world.sum_(best.counts)
