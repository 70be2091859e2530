"""What an expansion costs: floating-point operations of one layer's forward pass, as written and as rewritten."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..primal import Gated, Polynomial, TrainingSet
from .rewrites import GroupHeadsByScale

if TYPE_CHECKING:
    from .expansion import Expansion


class Cost(NamedTuple):
    """FLOPs (a multiply-add is two) per sequence: of the key and value projections, maps and gates, and the sum."""

    projection: int
    maps: int
    attention: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.projection + self.maps + self.attention


def count(expansion: Expansion, *, queries: int, keys: int, heads: int, head_dim: int) -> Cost:
    """The cost of a layer with heads × head_dim channels, computed as the expansion says.

    The query and output projections are the same for every mechanism and are left out.
    """
    L, N, D, E = queries, keys, head_dim, heads * head_dim
    primal, early = expansion.primal, expansion.inputs_pooled
    projection = maps = attention = 0
    scales = primal.training_set.head_scales(heads)
    for scale, members in GroupHeadsByScale.groups(scales):
        H, points = len(members), primal.training_set.points(scale, N)
        projection += H * 2 * 2 * (points if early else N) * E * D
        if scale > 1 and not early:
            maps += H * 2 * D * N  # pooling, of this head's keys and values
        for map_ in primal.point_maps:
            both = map_ is not expansion.query_map
            maps += H * 2 * D * (L + points if both else L)
            maps += H * {"nothing": 0, "mean": 1, "variance": 3}[map_.needs] * points * D
        for token_map in primal.token_maps:
            maps += H * 2 * token_map.taps(D) * (L + N) * D
        pairs = H * 2 * 2 * D * _pairs(expansion, scale, L, N)
        if not expansion.associated:
            attention += pairs
        elif isinstance(primal.features, Polynomial):  # whose kernel needs no features, where these are many
            attention += min(pairs, H * 2 * (L + points) * primal.features.dim(D) * (D + 1))
        else:
            attention += H * 2 * (L + points) * primal.features.dim(D) * (D + 1)
    for part in primal.made(heads, D).values():
        maps += 2 * (L if part.of == "query" else N) * E * part.start.numel()
    if isinstance(primal.normalizer, Gated):
        maps += L * E
    if early:
        maps += E * N * sum(s > 1 for s in set(scales))  # pooling, of the layer's input, once per scale
    return Cost(projection, maps, attention)


def _pairs(expansion: Expansion, scale: int, queries: int, keys: int) -> int:
    """Query–point pairs that are scored."""
    training_set = expansion.primal.training_set
    if expansion.pattern is None:
        return queries * training_set.points(scale, keys)
    return _visible_pairs(training_set, scale, queries, keys)


@lru_cache(maxsize=256)
def _visible_pairs(training_set: TrainingSet, scale: int, queries: int, keys: int) -> int:
    visible = training_set.visible(scale, queries, keys, torch.device("cpu"))
    assert visible is not None
    return int(visible.sum())
