"""Mean and variance of the keys that each query's head is fitted to, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..primal import Moments, PointMap
from .pooling import CausalPool


def moments(map_: PointMap, keys: Tensor, seen: Tensor | None) -> Moments:
    """Over the points [..., W, D] that are seen [..., W], the same for every query: [..., 1, D]."""
    if map_.needs == "nothing":
        return Moments(None, None)
    dtype = torch.promote_types(keys.dtype, torch.float32)
    if seen is None and map_.needs == "mean":
        return Moments(keys.mean(-2, keepdim=True, dtype=dtype), None)
    if seen is None:
        variance, mean = torch.var_mean(keys.to(dtype), dim=-2, correction=0, keepdim=True)
        return Moments(mean, variance)
    votes = seen.unsqueeze(-1)
    count = votes.sum(-2, keepdim=True).clamp(min=1)
    mean = keys.where(votes, 0.0).sum(-2, keepdim=True, dtype=dtype) / count
    if map_.needs == "mean":
        return Moments(mean, None)
    wide = keys.to(dtype)
    return Moments(mean, (wide - mean).square().where(votes, 0.0).sum(-2, keepdim=True) / count)


def masked_moments(map_: PointMap, keys: Tensor, seen: Tensor) -> Moments:
    """Over the keys that each row of `seen` [B, H or 1, L, S] shows: [B, H, L, D]."""
    if map_.needs == "nothing":
        return Moments(None, None)
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    votes = seen.to(wide.dtype)
    votes = votes / votes.sum(-1, keepdim=True).clamp(min=1)
    if map_.needs == "mean":
        return Moments(votes @ wide, None)
    origin = centre(wide, seen)  # any is exact; a near one keeps the difference accurate
    apart = wide - origin
    mean = votes @ apart
    variance = votes @ apart.square() - mean.square()
    return Moments(mean + origin, variance.clamp(min=0))


def centre(keys: Tensor, seen: Tensor | None) -> Tensor:
    """The mean of the keys that some row of `seen` [B, H or 1, L or 1, S] shows, without gradient: [B, H, 1, D]."""
    keys = keys.detach()
    if seen is None:
        return keys.mean(2, keepdim=True)
    shown = seen.any(2).unsqueeze(-1)
    total = keys.where(shown, 0.0).sum(2, keepdim=True, dtype=torch.promote_types(keys.dtype, torch.float32))
    return (total / shown.sum(2, keepdim=True).clamp(min=1)).to(keys.dtype)


def causal_moments(map_: PointMap, points: CausalPool) -> tuple[Moments, Moments]:
    """Over the complete windows before each query and its running one: [B, H, P, D] for the prefix, [B, H, W, s, D].

    Of queries alone, under softmax: one that sees a single point has its value whatever it is mapped to, and is given a
    variance of 1, since 1/0 would magnify what kernels round.
    """
    if map_.needs == "nothing":
        return Moments(None, None), Moments(None, None)
    wide = kept = torch.promote_types(points.keys.dtype, torch.float32)
    if map_.needs == "variance" and points.keys.device.type != "mps":
        wide = torch.float64  # a difference of running sums, magnified by 1/σ² where a query sees few keys
    first, running = points.prefix.keys.to(wide), points.keys.to(wide)
    first_seen = _ones(first) if points.prefix.seen is None else points.prefix.seen.unsqueeze(-1).to(wide)
    seen = _ones(running) if points.seen is None else points.seen.unsqueeze(-1).to(wide)

    counts = first_seen.cumsum(2), first_seen.sum(2)[:, :, None, None] + _earlier(seen) + seen

    def means(first: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        """Running means: over the prefix, and over the prefix, the complete windows and the running one."""
        prefix = (first * first_seen).cumsum(2) / counts[0].clamp(min=1)
        total = (first * first_seen).sum(2)[:, :, None, None] + _earlier(running * seen) + running * seen
        return prefix, total / counts[1].clamp(min=1)

    mean = means(first, running)
    if map_.needs == "mean":
        return Moments(mean[0], None), Moments(mean[1], None)
    centre = first_key(points).to(wide)
    square = means((first - centre).square(), (running - centre.unsqueeze(2)).square())
    variance = (
        several(counts[0], (square[0] - (mean[0] - centre).square()).clamp(min=0)),
        several(counts[1], (square[1] - (mean[1] - centre.unsqueeze(2)).square()).clamp(min=0)),
    )
    return Moments(mean[0].to(kept), variance[0].to(kept)), Moments(mean[1].to(kept), variance[1].to(kept))


def several(count: Tensor, variance: Tensor) -> Tensor:
    """The variance of several points; 1 of a single one."""
    return variance.where(count > 1, 1.0)


def first_key(points: CausalPool) -> Tensor:
    """The first key there is, [B, H, 1, D], without gradient.

    Whoever sees any key sees that one: as the origin of deviations it keeps differences accurate and leaks nothing.
    """
    running = points.keys.detach().flatten(2, 3)
    tokens = torch.cat([points.prefix.keys.detach(), running], dim=2)
    if points.seen is None or points.prefix.seen is None:
        return tokens[:, :, :1]
    exists = torch.cat([points.prefix.seen, points.seen.flatten(2, 3)], dim=2).expand(*tokens.shape[:2], -1)
    return tokens.gather(2, exists.int().argmax(2, keepdim=True).unsqueeze(-1).expand(-1, -1, -1, tokens.shape[-1]))


def _earlier(running: Tensor) -> Tensor:
    """The sum over the complete windows before each: [B, H, W, s, C] to [B, H, W, 1, C]."""
    complete = running[:, :, :, -1:]
    return pad(complete.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))


def _ones(x: Tensor) -> Tensor:
    return x.new_ones(1, 1, *x.shape[2:-1], 1)
