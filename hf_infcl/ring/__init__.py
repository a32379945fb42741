"""Who holds which block when: traversals of the similarity matrix over processes, and their place in autograd."""

from hf_infcl.ring.hard_negatives import HardNegativeCounts, HardNegativeSpec, hard_negative_loss, hardest
from hf_infcl.ring.sigmoid import sigmoid_loss
from hf_infcl.ring.softmax import softmax_loss
from hf_infcl.ring.spec import DIRECTIONS, Spec
from hf_infcl.ring.world import World

__all__ = [
    "DIRECTIONS",
    "HardNegativeCounts",
    "HardNegativeSpec",
    "Spec",
    "World",
    "hard_negative_loss",
    "hardest",
    "sigmoid_loss",
    "softmax_loss",
]
