"""Where queries and points stand, and what a kernel of positions adds to their scores.

A point of a pooled head stands at the mean position of its tokens. Positions are float32 at least: in 16 bits those of
late tokens would be the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..dual.form import form_of, pooling_of
from ..primal import Points, TrainingSet
from .pooling import CausalPool, causal_pool, pool_tokens
from .problem import Problem, UnsupportedError


def refusal(problem: Problem) -> str | None:
    """Why the positions of points cannot be had here; None where they can, or no kernel of positions asks for them."""
    training_set, form = problem.primal.training_set, form_of(problem.primal)
    pooled = pooling_of(training_set)
    clusters = pooled is not None and pooled.how == "kmeans" and max(problem.scales) > 1
    if form.distance and (clusters or form.points == "own"):
        return f"only the reference knows where the points of {training_set!r} stand"
    return None


def of_queries(p: Problem) -> Tensor:
    """[L, 1]"""
    return torch.arange(p.q.shape[2], device=p.q.device, dtype=_wide(p)).unsqueeze(-1) + p.query_offset


def added(p: Problem, points: Tensor, take: Tensor | None) -> Tensor:
    """What positions add to the scores, [B or 1, H, L, W], for points at [B or 1, 1, 1 or L, W].

    Under softmax the largest of what `take` leaves of each row is 0: that cancels, and where all keys are far away,
    their differences keep their digits.
    """
    found = p.primal.features.log_positions(of_queries(p), points, p.parameters)
    assert found is not None
    if not form_of(p.primal).cancels:
        return found
    seen = found if take is None else found.masked_fill(~take, -torch.inf)
    largest = seen.amax(-1, keepdim=True)
    return found - largest.masked_fill(largest == -torch.inf, 0.0)


def of_points(p: Problem) -> Tensor:
    """Of the points that all queries share: [B or 1, 1, 1, W]."""
    tokens, pooled = _tokens(p), pooling_of(p.primal.training_set)
    if pooled is None or p.scale == 1:
        return tokens.squeeze(-1).unsqueeze(2)
    seen = None if p.key_hidden is None else ~p.key_hidden
    return pool_tokens(tokens, seen, replace(pooled, how="mean"), p.scale, {})[0].squeeze(-1).unsqueeze(2)


def of_windows(p: Problem) -> CausalPool:
    """The causal form: running mean positions as keys [B or 1, 1, W, s, 1]."""
    tokens = _tokens(p)
    return causal_pool(replace(p, k=tokens, v=tokens, key_bias=None))


def of_definition(
    training_set: TrainingSet, points: Points, keys: Tensor, values: Tensor, seen: Tensor, scale: int
) -> Tensor:
    """The same by the definition, [B or 1, H or 1, R, W], of the points that `reduce` made of these tokens."""
    share, pooled = points.share, pooling_of(training_set)
    if share is None and pooled is not None:
        share = replace(pooled, how="mean").reduce(keys, values, seen, scale, {}).share
    if share is None:
        raise UnsupportedError(
            f"{training_set!r} does not say of which tokens its points are made (the `share` of its Points), so a "
            f"kernel of positions cannot tell where they stand"
        )
    total = share.sum(-1)
    mean = share @ torch.arange(share.shape[-1], device=share.device, dtype=share.dtype)
    return mean / total.where(total != 0, 1.0)


def _tokens(p: Problem) -> Tensor:
    """[B or 1, 1, S, 1], zero where there is none."""
    places = torch.arange(p.k.shape[2], device=p.k.device, dtype=_wide(p))[None, None, :, None]
    return places if p.key_hidden is None else places.masked_fill(p.key_hidden.unsqueeze(-1), 0.0)


def _wide(p: Problem) -> torch.dtype:
    return torch.promote_types(p.q.dtype, torch.float32)
