"""SigLIP's loss over the ring: its weights need no statistics, so one traversal gives the value and the gradients.

    L = -sum_ij log sigmoid(z_ij (s u_ij + b)) / n        z: +1 on pairs, -1 elsewhere
    G_ij = -z_ij sigmoid(-z_ij (s u_ij + b))
    dX = s G Y / n,  dY = s G'X / n,  ds = sum G u / n,  db = sum G / n

(SigLIP, arXiv 2303.15343, section 3.2.)
"""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops import Engine, Pieces, Weights, chunks
from hf_infcl.ring.derivatives import first_derivative_only, without_autocast
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.rounds import Yield, around
from hf_infcl.ring.shards import Block, Shard, blocks
from hf_infcl.ring.spec import Spec, agreement
from hf_infcl.ring.traversal import add_, gradient_traversal, shards
from hf_infcl.ring.world import World

Needs = tuple[bool, bool, bool, bool]  # gradient of images, texts, scale, bias


# Gradients of images, texts, scale and bias for an incoming one of 1, in the accumulator's dtype; None: not needed.
Made = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _engine(images: Tensor, scale: Tensor, bias: Tensor, spec: Spec) -> tuple[Engine, Tensor, Tensor]:
    """How the sweep is computed, the scale and the bias as scalars to compute with."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    s, b = (value.detach().reshape(()).to(engine.accumulator) for value in (scale, bias))
    return engine, s, b


def sigmoid_forward(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec, layout: Layout
) -> Tensor:
    """The loss alone, a scalar: one product."""
    engine, s, b = _engine(images, scale, bias, spec)
    total = torch.zeros((), device=engine.device, dtype=torch.float64)  # of up to N^2 terms, chunk by chunk
    mine, travelling = shards(layout, images, texts, ids)

    def visit(visitors: Shard, _: tuple[Tensor, ...]) -> Yield:
        for block in blocks(mine, visitors):
            related = engine.relate(block.rows, block.cols, spec.rule)
            for r, c in chunks(block.rows, block.cols, engine.chunk_shape(forward=True)):
                rows, cols = block.rows[r], block.cols[c]
                total.add_(engine.tiles.sigmoid_loss(rows, cols, s, b, spec.rule, engine.precision, related(r, c)))
        return ()

    around(layout, travelling, (), visit, add_)
    return (layout.world.sum_(total) / layout.rows).to(engine.accumulator)


def sigmoid_forward_and_gradients(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids: Tensor | None,
    spec: Spec,
    layout: Layout,
    needs: Needs,
) -> tuple[Tensor, Made]:
    """The loss and its gradients: three products, where a backward pass of its own would make the first of them again.

    The embeddings' gradients are the mean's times the number of processes, which DDP's averaging takes back.
    """
    engine, s, b = _engine(images, scale, bias, spec)
    sums = torch.zeros(3, device=engine.device, dtype=torch.float64)  # of the loss, G and G u, chunk by chunk
    total, sum_g, sum_gu = sums

    def weights_of(block: Block, _: tuple[Tensor, ...]) -> Weights:
        related, rule = engine.relate(block.rows, block.cols, spec.rule), spec.rule
        mine, theirs = Pieces(block.rows), Pieces(block.cols)

        def weights(r: slice, c: slice, want_sum: bool) -> tuple[Tensor, Tensor | None]:
            g, chunk_gu, chunk_g, chunk_loss = engine.tiles.sigmoid_weights(
                mine[r], theirs[c], s, b, rule, engine.precision, want_sum, related(r, c)
            )
            total.add_(chunk_loss)
            sum_g.add_(chunk_g)
            return g, chunk_gu

        return weights

    mine, travelling = shards(layout, images, texts, ids)
    share = 1.0 / (layout.rows * engine.gain)
    d_images, d_texts, my_gu = gradient_traversal(
        engine, layout, mine, travelling, (), weights_of, s * share * layout.world.size, needs[:3], rounded=False
    )
    sum_gu.add_(my_gu)
    layout.world.sum_(sums)
    d_scale, d_bias = ((value * share).to(engine.accumulator) for value in (sum_gu, sum_g))
    loss = (total / layout.rows).to(engine.accumulator)
    return loss, (d_images, d_texts, d_scale if needs[2] else None, d_bias if needs[3] else None)


def finished(made: Made, grad: Tensor, dtype: torch.dtype, scale: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients for an incoming one, a scalar: each times it, and then rounded, once."""

    def times(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if gradient is None else torch.mul(gradient, grad, out=torch.empty_like(gradient, dtype=dtype))

    d_images, d_texts, d_scale, d_bias = made
    scalars = (
        None if d is None else times(d.reshape(leaf.shape), leaf.dtype)
        for d, leaf in ((d_scale, scale), (d_bias, bias))
    )
    return times(d_images, dtype), times(d_texts, dtype), *scalars


def sigmoid_backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids: Tensor | None,
    spec: Spec,
    layout: Layout,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """The gradients where the forward pass made the loss alone."""
    _, made = sigmoid_forward_and_gradients(images, texts, scale, bias, ids, spec, layout, needs)
    return finished(made, grad, images.dtype, scale, bias)


class _SigmoidLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        texts: Tensor,
        scale: Tensor,
        bias: Tensor,
        ids: Tensor | None,
        spec: Spec,
        layout: Layout,
        differentiated: bool,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:4]
        with without_autocast(images.device):
            if not (differentiated and any(needs)):
                return sigmoid_forward(images, texts, scale, bias, ids, spec, layout)
            loss, made = sigmoid_forward_and_gradients(images, texts, scale, bias, ids, spec, layout, needs)
        ctx.dtype = images.dtype
        ctx.save_for_backward(scale, bias, *made)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, bias, *made = ctx.saved_tensors
        return *finished(tuple(made), grad, ctx.dtype, scale, bias), *[None] * 4


def sigmoid_loss(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec) -> Tensor:
    """SigLIP's loss of the global batch, differentiable in both embeddings, the scale and the bias."""
    if not torch.compiler.is_compiling():
        return _sigmoid_loss(images, texts, scale, bias, ids, spec)
    if World.of(spec.group).is_alone:
        from hf_infcl.ring.compiled import compiled_sigmoid_loss

        return compiled_sigmoid_loss(images, texts, scale, bias, ids, spec)
    # Messages between processes are no part of a graph.
    return torch.compiler.disable(_sigmoid_loss)(images, texts, scale, bias, ids, spec)


def _sigmoid_loss(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec) -> Tensor:
    leaves = dict(images=images, texts=texts, logit_scale=scale, logit_bias=bias)
    options = agreement("sigmoid_loss", spec, images, ids, **leaves)
    layout = Layout.of(spec.group, len(images), 0, images.device, options)
    return _SigmoidLoss.apply(images, texts, scale, bias, ids, spec, layout, torch.is_grad_enabled())
