"""Streaming evaluation: retrieval and zero-shot metrics that never build the score matrix."""

from hf_infcl.evaluation.mining import MinedNegatives, mine_hard_negatives
from hf_infcl.evaluation.retrieval import dataset_retrieval_metrics, retrieval_metrics
from hf_infcl.evaluation.zero_shot import zero_shot_metrics

__all__ = [
    "MinedNegatives",
    "dataset_retrieval_metrics",
    "mine_hard_negatives",
    "retrieval_metrics",
    "zero_shot_metrics",
]
