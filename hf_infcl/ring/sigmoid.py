"""SigLIP's loss over the ring: no statistics to keep, so one traversal gives the value and one the gradients.

    L = -sum_ij log sigmoid(z_ij (s u_ij + b)) / n        z: +1 on pairs, -1 elsewhere
    G_ij = -z_ij sigmoid(-z_ij (s u_ij + b))
    dX = s G Y / n,  dY = s G'X / n,  ds = sum G u / n,  db = sum G / n

(SigLIP, arXiv 2303.15343, section 3.2.)
"""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops import Engine, Weights, chunks
from hf_infcl.ring.derivatives import first_derivative_only
from hf_infcl.ring.layout import Layout
from hf_infcl.ring.rounds import Yield, around
from hf_infcl.ring.shards import Block, Shard, blocks
from hf_infcl.ring.spec import Spec, agreement
from hf_infcl.ring.traversal import add_, gradient_traversal, shards
from hf_infcl.ring.world import World

Needs = tuple[bool, bool, bool, bool]  # gradient of images, texts, scale, bias


def sigmoid_forward(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec, layout: Layout
) -> Tensor:
    """The loss, a scalar."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    s, b = (value.detach().reshape(()).to(engine.accumulator) for value in (scale, bias))
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
    """Gradients of the image embeddings, the text embeddings, the scale and the bias, None where not needed.

    At the embeddings it is the mean's times the number of processes, which DDP's averaging takes back.
    """
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    s, b = (value.detach().reshape(()).to(engine.accumulator) for value in (scale, bias))
    share = grad.to(engine.accumulator) / (layout.rows * engine.gain)
    sum_g = torch.zeros((), device=engine.device, dtype=torch.float64)

    def weights_of(block: Block, _: tuple[Tensor, ...]) -> Weights:
        related = engine.relate(block.rows, block.cols, spec.rule)

        def weights(r: slice, c: slice, want_sum: bool) -> tuple[Tensor, Tensor | None]:
            g, gu, chunk_sum = engine.tiles.sigmoid_weights(
                block.rows[r], block.cols[c], s, b, spec.rule, engine.precision, want_sum, related(r, c)
            )
            sum_g.add_(chunk_sum)
            return g, gu

        return weights

    mine, travelling = shards(layout, images, texts, ids)
    factor = s * share * layout.world.size
    d_images, d_texts, sum_gu = gradient_traversal(engine, layout, mine, travelling, (), weights_of, factor, needs[:3])
    d_scale = d_bias = None
    if needs[2]:
        d_scale = (share * layout.world.sum_(sum_gu)).to(scale.dtype).reshape(scale.shape)
    if needs[3]:
        d_bias = (share * layout.world.sum_(sum_g)).to(bias.dtype).reshape(bias.shape)
    return d_images, d_texts, d_scale, d_bias


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
    ) -> Tensor:
        ctx.save_for_backward(images, texts, scale, bias, ids)
        ctx.spec, ctx.layout = spec, layout
        with torch.autocast(images.device.type, enabled=False):
            return sigmoid_forward(images, texts, scale, bias, ids, spec, layout)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, scale, bias, ids = ctx.saved_tensors
        with torch.autocast(images.device.type, enabled=False):
            gradients = sigmoid_backward(
                grad, images, texts, scale, bias, ids, ctx.spec, ctx.layout, ctx.needs_input_grad[:4]
            )
        return *gradients, None, None, None


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
    return _SigmoidLoss.apply(images, texts, scale, bias, ids, spec, layout)
