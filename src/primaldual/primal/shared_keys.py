"""Grouped queries: several query heads are regressions on one training set.

Query heads g·r … g·r + r − 1 are a group: they share the keys, values, points and statistics of key/value head g, and
so have one scale. What maps of points, features and normalizers learn for each head is each query head's own; what
a training set and the maps of its tokens learn belongs to its points, and is there once for each key/value head.
"""

from __future__ import annotations

from dataclasses import replace

from .pooled import Pooled
from .sparse import Sparse
from .training_sets import TrainingSet


def check_groups(heads: int, kv_heads: int) -> None:
    """Raise unless so many key/value heads divide the query heads."""
    if isinstance(kv_heads, bool) or not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of that of key/value heads, each of which a group of query "
            f"heads shares; got {heads} query heads and {kv_heads!r} key/value heads"
        )


def of_queries(stated: TrainingSet, heads: int, kv_heads: int) -> TrainingSet:
    """The same, with a scale for each query head; raises where a group has several."""
    return _having(stated, heads, kv_heads, heads // kv_heads)


def of_keys(stated: TrainingSet, heads: int, kv_heads: int) -> TrainingSet:
    """The same, with a scale for each key/value head."""
    return _having(stated, heads, kv_heads, 1)


def _having(stated: TrainingSet, heads: int, kv_heads: int, each: int) -> TrainingSet:
    """With each scale of the key/value heads so many times."""
    if heads == kv_heads:
        return stated
    if isinstance(stated, Sparse) and type(stated).head_scales is Sparse.head_scales:
        return replace(stated, over=_having(stated.over, heads, kv_heads, each))
    if not (isinstance(stated, Pooled) and type(stated).head_scales is Pooled.head_scales):
        _shared(stated, stated.head_scales(heads), heads, kv_heads)
        return stated
    scales = stated.head_scales(kv_heads) if stated.scales is None else stated.scales
    if len(scales) == heads:
        scales = _shared(stated, scales, heads, kv_heads)
    elif len(scales) != kv_heads:
        raise ValueError(
            f"Pooled: {len(scales)} scales {scales} for {heads} query heads in {kv_heads} groups; give one scale for "
            f"each key/value head, or for each query head"
        )
    return replace(stated, scales=tuple(scale for scale in scales for _ in range(each)))


def _shared(stated: TrainingSet, scales: tuple[int, ...], heads: int, kv_heads: int) -> tuple[int, ...]:
    """The scale of each group, from those of the query heads."""
    size = heads // kv_heads
    groups = [scales[first : first + size] for first in range(0, heads, size)]
    for number, group in enumerate(groups):
        if len(set(group)) > 1:
            raise ValueError(
                f"{type(stated).__name__}: query heads {number * size} to {number * size + size - 1} share key/value "
                f"head {number}, which is pooled once, but have the scales {group}; give each group of {size} heads "
                f"one scale, such as {tuple(min(g) for g in groups)} for the {kv_heads} key/value heads"
            )
    return tuple(group[0] for group in groups)
