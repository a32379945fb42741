"""SigLIP's chunk functions on Triton; the same meaning as `hf_infcl.ops.torch_tiles`."""

import torch
from torch import Tensor

from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton.kernels_sigmoid import sigmoid_loss_kernel, sigmoid_weights_kernel
from hf_infcl.ops.triton.launch import Tiles
from hf_infcl.ops.triton.products import empty_weights, gain


def sigmoid_loss(
    rows: Side, cols: Side, scale: Tensor, bias: Tensor, rule: Rule, precision: str, related: Tensor | None = None
) -> Tensor:
    """Sum over the chunk of -log sigmoid(z (s u + b)), z = +1 on pairs and -1 elsewhere."""
    tiles = Tiles.of("statistics", rows, cols, rule, precision, related=related)
    parts = torch.empty(tiles.tiles_m * tiles.tiles_n, device=rows.embeds.device, dtype=torch.float32)
    tiles.launch(sigmoid_loss_kernel, (scale, bias, parts), ())
    return parts.sum()


def sigmoid_weights(
    rows: Side,
    cols: Side,
    scale: Tensor,
    bias: Tensor,
    rule: Rule,
    precision: str,
    want_sum: bool,
    related: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The chunk of G = -z sigmoid(-z (s u + b)), times `gain`, and its share of the loss.

    Returns:
        G (n_rows, n_cols) in the embeddings' dtype; sum of G u if wanted (the scale's gradient); sum of G (the bias's);
        what `sigmoid_loss` returns.
    """
    tiles = Tiles.of("weights", rows, cols, rule, precision, related=related)
    g = empty_weights(rows, cols)
    parts = torch.empty(3, tiles.tiles_m * tiles.tiles_n, device=g.device, dtype=torch.float32)
    values = (scale, bias, tiles.weights(g), g.stride(0), parts, gain(rows.embeds.dtype))
    tiles.launch(sigmoid_weights_kernel, values, (want_sum,))
    return g, parts[2].sum() if want_sum else None, parts[1].sum(), parts[0].sum()
