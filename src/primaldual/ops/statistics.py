"""Mean and variance of the keys that each query's head is fitted to, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..primal import Moments, PointMap
from .pooling import CausalPool


def moments(map_: PointMap, keys: Tensor, seen: Tensor | None) -> Moments:
    """Over the points that are seen, the same for every query: [B, H, 1, D]."""
    if map_.needs == "nothing":
        return Moments(None, None)
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if seen is None:
        if map_.needs == "mean":
            return Moments(wide.mean(2, keepdim=True), None)
        variance, mean = torch.var_mean(wide, dim=2, correction=0, keepdim=True)
        return Moments(mean, variance)
    votes = seen.unsqueeze(-1)
    count = votes.sum(2, keepdim=True).clamp(min=1)
    mean = wide.where(votes, 0.0).sum(2, keepdim=True) / count
    if map_.needs == "mean":
        return Moments(mean, None)
    return Moments(mean, (wide - mean).square().where(votes, 0.0).sum(2, keepdim=True) / count)


def masked_moments(map_: PointMap, keys: Tensor, seen: Tensor) -> Moments:
    """Over the keys that each row of `seen` [B, H or 1, L, S] shows: [B, H, L, D]."""
    if map_.needs == "nothing":
        return Moments(None, None)
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    votes = seen.to(wide.dtype)
    votes = votes / votes.sum(-1, keepdim=True).clamp(min=1)
    mean = votes @ wide
    if map_.needs == "mean":
        return Moments(mean, None)
    centre = wide.detach().mean(2, keepdim=True)  # any shift is exact; a near one keeps the difference accurate
    variance = votes @ (wide - centre).square() - (mean - centre).square()
    return Moments(mean, variance.clamp(min=0))


def causal_moments(map_: PointMap, points: CausalPool) -> tuple[Moments, Moments]:
    """Over the complete windows before each query and its running one: [B, H, P, D] for the prefix, [B, H, W, s, D]."""
    if map_.needs == "nothing":
        return Moments(None, None), Moments(None, None)
    wide = torch.promote_types(points.keys.dtype, torch.float32)
    first, running = points.prefix.keys.to(wide), points.keys.to(wide)
    first_seen = _ones(first) if points.prefix.seen is None else points.prefix.seen.unsqueeze(-1).to(wide)
    seen = _ones(running) if points.seen is None else points.seen.unsqueeze(-1).to(wide)

    def means(first: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        """Running means: over the prefix, and over the prefix, the complete windows and the running one."""
        prefix = (first * first_seen).cumsum(2) / first_seen.cumsum(2).clamp(min=1)
        total = (first * first_seen).sum(2)[:, :, None, None] + _earlier(running * seen) + running * seen
        count = first_seen.sum(2)[:, :, None, None] + _earlier(seen) + seen
        return prefix, total / count.clamp(min=1)

    mean = means(first, running)
    if map_.needs == "mean":
        return Moments(mean[0], None), Moments(mean[1], None)
    # deviations from the first key there is: whoever sees any key sees that one, so nothing later leaks in
    batch = (running.shape[0], running.shape[1], -1, -1)
    tokens = torch.cat([first, running.flatten(2, 3)], dim=2).detach()
    exists = torch.cat([first_seen.expand(batch), seen.flatten(2, 3).expand(batch)], dim=2)
    centre = tokens.gather(2, exists.argmax(2, keepdim=True).expand(-1, -1, -1, tokens.shape[-1]))
    square = means((first - centre).square(), (running - centre.unsqueeze(2)).square())
    variance = (
        (square[0] - (mean[0] - centre).square()).clamp(min=0),
        (square[1] - (mean[1] - centre.unsqueeze(2)).square()).clamp(min=0),
    )
    return Moments(mean[0], variance[0]), Moments(mean[1], variance[1])


def _earlier(running: Tensor) -> Tensor:
    """The sum over the complete windows before each: [B, H, W, s, C] to [B, H, W, 1, C]."""
    complete = running[:, :, :, -1:]
    return pad(complete.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))


def _ones(x: Tensor) -> Tensor:
    return x.new_ones(1, 1, *x.shape[2:-1], 1)
