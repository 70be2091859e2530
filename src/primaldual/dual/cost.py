"""What an expansion costs: floating-point operations of one layer's forward pass, as written and as rewritten."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..primal import Primal
from .rewrites import GroupHeadsByScale, PoolBeforeProjection, Reassociate, RowConstantsCancel


class Cost(NamedTuple):
    """FLOPs (a multiply-add is two) per sequence: the key and value projections, the input maps, the sum itself."""

    projection: int
    maps: int
    attention: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.projection + self.maps + self.attention


def count(primal: Primal, *, queries: int, keys: int, heads: int, head_dim: int, rewritten: bool) -> Cost:
    """The cost of a layer with heads × head_dim channels; `rewritten` applies the exact identities that hold.

    The query and output projections are the same for every mechanism and are left out.
    """
    L, N, D, E = queries, keys, head_dim, heads * head_dim
    early = rewritten and PoolBeforeProjection.refusal(primal) is None
    one_sided = rewritten and RowConstantsCancel.refusal(primal) is None
    linear = rewritten and Reassociate.refusal(primal) is None
    projection = maps = attention = 0
    scales = primal.training_set.head_scales(heads)
    for scale, members in GroupHeadsByScale.groups(scales):
        H, points = len(members), primal.training_set.points(scale, N)
        projection += H * 2 * 2 * (points if early else N) * E * D
        if scale > 1 and not early:
            maps += H * 2 * D * N  # pooling, of this head's keys and values
        for map_ in primal.point_maps:
            both = not (one_sided and map_ is primal.point_maps[-1])
            maps += H * 2 * D * (L + points if both else L)
            maps += H * {"nothing": 0, "mean": 1, "variance": 3}[map_.needs] * points * D
        for token_map in primal.token_maps:
            taps = sum(kernel.numel() for kernel in token_map.learned(1, D).values())
            maps += H * 2 * taps * (L + N) * D
        if linear:
            F = primal.features.dim(D)
            attention += H * 2 * (L + points) * F * (D + 1)
        else:
            attention += H * 2 * 2 * D * _pairs(primal, scale, L, N, rewritten)
    if early:
        maps += E * N * sum(s > 1 for s in set(scales))  # pooling, of the layer's input, once per scale
    return Cost(projection, maps, attention)


def _pairs(primal: Primal, scale: int, queries: int, keys: int, rewritten: bool) -> int:
    """Query–point pairs that are scored: all of them as written, those of the pattern where it is exploited."""
    visible = primal.training_set.visible(scale, queries, keys, torch.device("cpu")) if rewritten else None
    return int(visible.sum()) if visible is not None else queries * primal.training_set.points(scale, keys)
