"""The running mean, and variance, of the points that each new token sees.

    μ_i = (m + u_i)/(w_i + 1),   σ²_i = (s + (u_i − o)²)/(w_i + 1) − (μ_i − o)²

with u_i the point that token i is in, up to it, w_i the complete ones before, m their sum, s the sum of (k − o)², and o
the first key of the row, an origin that keeps the difference accurate.
"""

from __future__ import annotations

from torch import Tensor

from ...primal import Moments
from ..statistics import several
from .held import Held
from .points import Points
from .rows import Piece, Rows


class Statistics(Held):
    """Sums over the complete points of the heads of one scale, [B, G, 1, D] each."""

    def __init__(self, rows: Rows, points: Points, variance: bool) -> None:
        super().__init__(rows.static)
        self.points, self.variance = points, variance
        B, G, _, D = points.tensors["keys"].shape
        for name in ("total", "squares", "origin") if variance else ("total",):
            self.add(name, (B, G, 1, D), points.widest, rows.device)

    def push(self, keys: Tensor, piece: Piece, cancels: bool) -> Moments:
        """Moments of what each new token sees, [B, G, L, D], its own point being `keys` up to it.

        Where a factor per query cancels, the variance of a single point is 1, as `causal_moments` has it.
        """
        spots = piece.spots(self.points.scale, self.points.prefix)
        u = keys.to(self.points.widest)
        if self.variance:
            origin = self.tensors["origin"]
            origin.copy_(u[:, :, :1].where((piece.places[:, :1] == 0)[:, None, :, None], origin))
            u = u - origin
        valid = piece.valid
        complete = spots.complete if valid is None else spots.complete & valid
        count = (spots.slot + 1)[:, None, :, None]
        mean = self._mean("total", u, complete, count)
        if not self.variance:
            return Moments(mean.to(self.points.wide), None)
        variance = (self._mean("squares", u.square(), complete, count) - mean.square()).clamp(min=0)
        variance = several(count, variance) if cancels else variance
        return Moments((mean + origin).to(self.points.wide), variance.to(self.points.wide))

    def _mean(self, name: str, u: Tensor, complete: Tensor, count: Tensor) -> Tensor:
        added, total = u.masked_fill(~complete[:, None, :, None], 0.0), self.tensors[name]
        if u.shape[2] == 1:
            mean = (total + u) / count
        else:
            mean = (total + added.cumsum(2) - added + u) / count
        total.add_(added.sum(2, keepdim=True))
        return mean

    def crop(self) -> None:
        """Of the points that are complete now."""
        keys = self.points.tensors["keys"].to(self.points.widest)
        u = keys - self.tensors["origin"] if self.variance else keys
        u = u.masked_fill(~self.points.complete()[:, None, :, None], 0.0)
        self.tensors["total"].copy_(u.sum(2, keepdim=True))
        if self.variance:
            self.tensors["squares"].copy_(u.square().sum(2, keepdim=True))
