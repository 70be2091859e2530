"""What lies between the matrix products of a training step, as functions with gradients: one pass over memory each.

Activations are [members, rows, width], contiguous; a member's parameters lie `…_member` elements after those of the one
before. A program of most kernels works on some columns of a run of `span` rows of one member; sums over rows come out
as one partial sum per run. Kernels are imported where they are launched: not everybody has Triton.
"""

from .classifier import head
from .division import usable
from .dropout import Dropout
from .embedding import embed
from .layers import (
    add_norm,
    add_norm_beside,
    feed_forward,
    feed_forward_beside,
    linear,
    linear_beside,
    norm_beside,
)
from .norms import Norm
from .update import clipped_update

__all__ = [
    "Dropout", "Norm", "add_norm", "add_norm_beside", "clipped_update", "embed", "feed_forward", "feed_forward_beside",
    "head", "linear", "linear_beside", "norm_beside", "usable",
]  # fmt: skip
