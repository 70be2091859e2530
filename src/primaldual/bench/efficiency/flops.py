"""FLOPs of a step, in closed form and part by part.

With N tokens of d channels, a feed-forward part of f = 2d and heads h of D = d/2 channels over N_h = N/s_h points, a
document takes in each of two layers

    projections    4 N d²  for queries and output,  Σ_h 4 N_h d D  for keys and values
    attention      Σ_h 4 D · (pairs that head h scores),  which are N N_h
    feed-forward   4 N d f
    maps           what pools and re-centres: additions, no products

and a pair of documents 8 d f + 2 f · classes more. A multiply-add of a matrix product is two; norms, softmax, GELU and
dropout, some operations per number, are not counted. The projections, the attention and the maps are
`primaldual.dual.Expansion.cost`, of the expansion with the rewrites that this attention makes use of: inputs are pooled
before they are projected (but for sparse heads, whose layers project every token), and only a fused attention leaves
out the pairs that a sparse pattern hides; in a matrix of scores they are computed and masked.

The backward pass takes twice the forward pass, and for a fused attention 2.5 times, since it computes the scores again.
"""

from __future__ import annotations

from typing import NamedTuple

from ...dual import GroupHeadsByScale, KeepPattern, PoolBeforeProjection, Rewrite, RowConstantsCancel, derive
from ...ops.estimates import TRAINING
from ...ops.layer.costs import BACKWARD
from ...primal import Sparse, mechanism
from .setting import CLASSES, Setting


class Flops(NamedTuple):
    """Of a step, by part of the model."""

    projections: int
    attention: int
    feed_forward: int
    head: int
    maps: int

    @property
    def products(self) -> int:
        """Of all matrix products, which is what a counter of operators sees."""
        return self.projections + self.attention + self.feed_forward + self.head

    @property
    def total(self) -> int:
        """All parts together."""
        return self.products + self.maps


def flops(name: str, setting: Setting) -> Flops:
    """Of a step of the model with this mechanism.

    >>> count = flops("sh", Setting(64, 4096, step="inference"))
    >>> round(count.total / flops("softmax", Setting(64, 4096, step="inference")).total, 3)
    0.761
    """
    N, d, sizes = setting.length, setting.dimension, setting.sizes
    cost = derive(mechanism(name), rewrites(name, setting)).cost(
        queries=N, keys=N, heads=sizes.heads, head_dim=d // sizes.heads
    )
    documents = 2 * setting.pairs
    each = sizes.layers * documents
    times = BACKWARD if setting.trains else 1.0
    times_attention = times if not (setting.trains and setting.fused) else TRAINING
    return Flops(
        projections=round(times * each * (cost.projection + 4 * N * d * d)),
        attention=round(times_attention * each * cost.attention),
        feed_forward=round(times * each * 4 * N * d * sizes.feedforward),
        head=round(times * setting.pairs * 2 * sizes.feedforward * (4 * d + CLASSES)),
        maps=round(times * each * cost.maps),
    )


def rewrites(name: str, setting: Setting) -> tuple[type[Rewrite], ...]:
    """The identities that a layer makes use of."""
    found: tuple[type[Rewrite], ...] = (RowConstantsCancel, GroupHeadsByScale)
    if not isinstance(mechanism(name).training_set, Sparse):
        found = (*found, PoolBeforeProjection)
    return (*found, KeepPattern) if setting.fused else found
