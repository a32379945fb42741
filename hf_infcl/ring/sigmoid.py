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
from hf_infcl.ring.shards import Block, blocks
from hf_infcl.ring.spec import Spec
from hf_infcl.ring.traversal import gradient_traversal, shards

Needs = tuple[bool, bool, bool, bool]  # gradient of images, texts, scale, bias


def sigmoid_forward(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec
) -> Tensor:
    """The loss, a scalar."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    s, b = (value.detach().reshape(()).to(engine.accumulator) for value in (scale, bias))
    total = torch.zeros((), device=engine.device, dtype=torch.float64)  # of up to N^2 terms, chunk by chunk
    for block in blocks(*shards(images, texts, ids)):
        for r, c in chunks(block.rows, block.cols, engine.chunk_shape()):
            total += engine.tiles.sigmoid_loss(block.rows[r], block.cols[c], s, b, spec.rule, engine.precision)
    return (total / len(images)).to(engine.accumulator)


def sigmoid_backward(
    grad: Tensor,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids: Tensor | None,
    spec: Spec,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Gradients of the image embeddings, the text embeddings, the scale and the bias, None where not needed."""
    engine = Engine.of(images, spec.backend, spec.precision, spec.block_size)
    s, b = (value.detach().reshape(()).to(engine.accumulator) for value in (scale, bias))
    share = grad.to(engine.accumulator) / (len(images) * engine.gain)
    sum_g = torch.zeros((), device=engine.device, dtype=torch.float64)

    def weights_of(block: Block) -> Weights:
        def weights(r: slice, c: slice, want_sum: bool) -> tuple[Tensor, Tensor | None]:
            g, gu, chunk_sum = engine.tiles.sigmoid_weights(
                block.rows[r], block.cols[c], s, b, spec.rule, engine.precision, want_sum
            )
            sum_g.add_(chunk_sum)
            return g, gu

        return weights

    mine, travelling = shards(images, texts, ids)
    d_images, d_texts, sum_gu = gradient_traversal(engine, mine, travelling, weights_of, s * share, needs[:3])
    d_scale = (share * sum_gu).to(scale.dtype).reshape(scale.shape) if needs[2] else None
    d_bias = (share * sum_g).to(bias.dtype).reshape(bias.shape) if needs[3] else None
    return d_images, d_texts, d_scale, d_bias


class _SigmoidLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec
    ) -> Tensor:
        ctx.save_for_backward(images, texts, scale, bias, ids)
        ctx.spec = spec
        with torch.autocast(images.device.type, enabled=False):
            return sigmoid_forward(images, texts, scale, bias, ids, spec)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, texts, scale, bias, ids = ctx.saved_tensors
        with torch.autocast(images.device.type, enabled=False):
            gradients = sigmoid_backward(grad, images, texts, scale, bias, ids, ctx.spec, ctx.needs_input_grad[:4])
        return *gradients, None, None


def sigmoid_loss(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, spec: Spec) -> Tensor:
    """SigLIP's loss of the global batch, differentiable in both embeddings, the scale and the bias."""
    if torch.compiler.is_compiling():
        from hf_infcl.ring.compiled import compiled_sigmoid_loss

        return compiled_sigmoid_loss(images, texts, scale, bias, ids, spec)
    return _SigmoidLoss.apply(images, texts, scale, bias, ids, spec)
