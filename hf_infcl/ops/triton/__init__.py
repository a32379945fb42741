"""The chunk functions on Triton, fused: one product and its epilogue per launch.

Needs the package triton; `hf_infcl.ops.dispatch` decides whether to come here.
"""

from hf_infcl.ops.triton import whole
from hf_infcl.ops.triton.products import chunk_shape, gain, matmul
from hf_infcl.ops.triton.related import relate
from hf_infcl.ops.triton.sigmoid import sigmoid_loss, sigmoid_weights
from hf_infcl.ops.triton.softmax import softmax_weights, statistics

__all__ = [
    "chunk_shape",
    "gain",
    "matmul",
    "relate",
    "sigmoid_loss",
    "sigmoid_weights",
    "softmax_weights",
    "statistics",
    "whole",
]
