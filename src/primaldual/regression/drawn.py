"""Problems at random: keys, targets and what is learned, at a length that the mechanism takes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..dual.form import pooling_of
from ..primal import DepthwiseConv2d, Primal, TrainingSet

LENGTH = 24
"""Keys of a problem, where nothing else is said."""


class Drawn(NamedTuple):
    """A problem: keys [1, H, N, D], queries [1, r·H, N, D], targets and values [1, H, N, Dv], and what is learned.

    A group of r query heads shares a head of keys, and asks one regression.
    """

    primal: Primal
    keys: Tensor
    queries: Tensor
    targets: Tensor
    values: Tensor
    parameters: dict[str, Tensor]


def length_that_hides(training_set: TrainingSet) -> int:
    """A length at which some query is not fitted to every key, where the training set is a subset per query."""
    for length in (LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH):
        subset = training_set.visible(1, length, length, torch.device("cpu"))
        if subset is None or not bool(subset.all()):
            return length
    return LENGTH


def fitting_length(primal: Primal, length: int) -> int:
    """The nearest length that a convolution or a pooling over a grid takes."""
    for spec in (*primal.token_maps, pooling_of(primal.training_set)):
        grid = getattr(spec, "grid", None)
        if grid is not None:
            return int(grid[0] * grid[1] + getattr(spec, "prefix", 0))
        if isinstance(spec, DepthwiseConv2d):
            return max(1, round(math.sqrt(max(1, length - spec.prefix)))) ** 2 + spec.prefix
    return length


def draw(primal: Primal, length: int, head_dim: int, heads: int, outputs: int, seed: int, group: int = 1) -> Drawn:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys, queries = normal(1, heads, length, head_dim), normal(1, group * heads, length, head_dim)
    targets, values = normal(1, heads, length, outputs), normal(1, heads, length, outputs)
    # away from the start, where convolutions are the identity
    learned = {name: x.double() + 0.3 * normal(*x.shape) for name, x in primal.learned(heads, head_dim).items()}
    return Drawn(primal, keys, queries, targets, values, learned)
