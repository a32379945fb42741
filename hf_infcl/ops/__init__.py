"""Tile arithmetic on tensors: the sweep over blocks of the similarity matrix, on PyTorch and on Triton.

Nothing here knows of modules, processes or trainers, and nothing here imports the rest of the package.
"""

from hf_infcl.ops.blocks import Engine, Weights, block_gradient, block_statistics, inner_product
from hf_infcl.ops.chunks import Pieces, chunks
from hf_infcl.ops.dispatch import BACKENDS, PRECISIONS, resolve_backend, resolve_precision
from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.statistics import Statistics
from hf_infcl.ops.topk import Limits, TopK
from hf_infcl.ops.torch_tiles import accumulator_dtype

__all__ = [
    "BACKENDS",
    "PRECISIONS",
    "Engine",
    "Limits",
    "Pieces",
    "Rule",
    "Side",
    "Statistics",
    "TopK",
    "Weights",
    "accumulator_dtype",
    "block_gradient",
    "block_statistics",
    "chunks",
    "inner_product",
    "resolve_backend",
    "resolve_precision",
]
