"""New queries and the points that they see, of the heads of one scale: the formula of the reference, of few rows.

A single token's own point stands in its slot. Of several, each has its window's mean up to itself, beside the complete
points before it: those are scored for all of them at once, its own for itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...dual.form import Form, has_sink, knows_positions, pattern_of
from ...primal import BatchNorm, LogKernel, Moments, PointMap, Primal
from ...primal.features import Parameters
from ..statistics import moments as moments_of
from .points import Points, Running
from .rows import Piece


class Call(NamedTuple):
    """New queries of heads of one scale, and what they may see."""

    primal: Primal
    tail: tuple[PointMap, ...]  # the maps of points that are not applied before points are kept
    q: Tensor  # [B, H, L, D], mapped by the others
    points: Points
    running: Running
    piece: Piece
    parameters: Parameters  # of these heads
    factor: float  # on the scores
    form: Form  # of the primal

    @property
    def each(self) -> int:
        """Query heads that share a key."""
        return self.q.shape[1] // self.running.keys.shape[1]

    @property
    def own(self) -> bool:
        """Whether a token's own point is not that in its slot."""
        return self.points.scale > 1 and self.piece.length > 1

    def seen(self, slots: int) -> Tensor | None:
        """Boolean [B or 1, L, slots]: what each query sees of these; None where it is all."""
        piece, points = self.piece, self.points
        pattern = pattern_of(self.primal.training_set)
        if piece.length == 1 and piece.end is not None and not piece.ragged and pattern is None:
            return None
        slot = piece.spots(points.scale, points.prefix).slot.unsqueeze(-1)
        j = piece.arange(slots)
        seen = j < slot if self.own else j <= slot
        return seen if pattern is None else seen & pattern.allows(slot, j, slots)

    def bias(self, slots: int) -> tuple[Tensor | None, Tensor | None]:
        """What is added to log κ of the slots and of the own points: [B, H or G·1, L, ·]; weights and positions."""
        found: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.running.log_weights is not None:  # relative to the own point's, which h cancels
            kept = self.points.seen("weights", self.piece)
            added = (kept.unsqueeze(2) - self.running.log_weights.unsqueeze(-1)).to(self.points.wide)
            added = added.repeat_interleave(self.each, 1)
            found = added, torch.zeros_like(added[..., :1])
        if knows_positions(self.primal.features):
            queries, at, own = self._positions(slots)
            by = [self.primal.features.log_positions(queries, x, self.parameters) for x in (at, own)]
            found = tuple(x if x is None or y is None else x + y for x, y in zip(found, by, strict=True))  # type: ignore[assignment]
            found = tuple(y if x is None else x for x, y in zip(found, by, strict=True))  # type: ignore[assignment]
        return found

    def _positions(self, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where queries [B or 1, 1, L, 1], slots [B or 1, 1, 1 or L, W] and own points [B or 1, 1, L, 1] stand."""
        s, P, dtype = self.points.scale, self.points.prefix, self.points.wide
        spots, j = self.piece.spots(s, P), self.piece.arange(slots)
        middle = torch.where(j < P, j.to(dtype), P + (j - P) * s + (s - 1) / 2)
        queries = self.piece.places[:, None, :, None].to(dtype)
        own = queries - spots.inside[:, None, :, None].to(dtype) / 2
        at = middle.expand(1, 1, 1, -1)
        if not self.own:
            at = torch.where(j == spots.slot[:, None, :, None], own, at)
        return queries, at, own


def recentred(call: Call, found: Moments) -> tuple[Tensor, Tensor | None]:
    """The queries that leave keys as they are, and what a score lacks for each of them, [B, H, L, 1].

    (T q)·(T k) = q'·k − q'·βμ,   q' = q − βμ, or (q − βμ) ⊙ (σ² + ε)^(−1) of a `BatchNorm`
    """
    if not call.tail:
        return call.q, None
    each = call.each
    wide = Moments(*(None if x is None else x.repeat_interleave(each, 1) for x in found))
    affine = call.tail[0].affine(wide, call.parameters)
    assert affine is not None
    shift, scale = affine
    x = call.q - shift
    if type(call.tail[0]) is BatchNorm and scale is not None:
        x = x * scale * scale
    return x.to(call.q.dtype), None if call.form.cancels else -(x * shift).sum(-1, keepdim=True)


def by_scores(call: Call, found: Moments) -> Tensor:
    """Outputs [B, H, L, Dv] where κ is exp(x·y) and maps act on queries alone."""
    x, lacking = recentred(call, found)
    keys, values = (call.points.seen(n, call.piece) for n in ("keys", "values"))
    G, slots, each = keys.shape[1], keys.shape[2], call.each
    seen, (bias, own_bias) = call.seen(slots), call.bias(slots)
    if call.form.cancels and call.piece.length == 1:
        mask: Tensor | None = None if seen is None else seen[:, None]
        if bias is not None:
            bias = bias.to(x.dtype) if mask is None else bias.to(x.dtype).masked_fill(~mask, -torch.inf)
            mask = bias if bias.shape[1] == 1 else bias.unflatten(1, (G, each)).squeeze(3)
        x = x.unflatten(1, (G, each)).flatten(2, 3)
        if mask is not None:
            mask = mask.expand(x.shape[0], -1, each, slots)
        return scaled_dot_product_attention(x, keys, values, mask, scale=call.factor).flatten(1, 2).unsqueeze(2)
    wide = call.points.wide
    x, keys = (x * call.factor).to(wide), keys.to(wide)
    folded = x.unflatten(1, (G, each)).flatten(2, 3)
    scores = (folded @ keys.transpose(-1, -2)).unflatten(2, (each, -1)).flatten(1, 2)  # [B, H, L, W]
    of_own = (x * call.running.keys.repeat_interleave(each, 1)).sum(-1, keepdim=True) if call.own else None
    if lacking is not None:
        scores, of_own = scores + lacking * call.factor, None if of_own is None else of_own + lacking * call.factor
    return _summed(call, scores, of_own, bias, own_bias, seen, call.q)


def by_kernel(call: Call) -> Tensor:
    """The same with any kernel, and any maps of points: those with statistics of a single token alone."""
    wide, each, piece = call.points.wide, call.each, call.piece
    keys = call.points.seen("keys", piece).to(wide).repeat_interleave(each, 1)
    slots = keys.shape[2]
    seen, (bias, own_bias) = call.seen(slots), call.bias(slots)
    x, own = call.q.to(wide), call.running.keys.to(wide).repeat_interleave(each, 1) if call.own else None
    shown = None
    if any(map_.needs != "nothing" for map_ in call.tail):
        assert piece.length == 1
        points = call.points
        slot = piece.spots(points.scale, points.prefix).slot.unsqueeze(-1)
        shown = piece.arange(slots) <= slot  # [B or 1, 1, W]; a pattern hides nothing from statistics
    for map_ in call.tail:
        found = Moments(None, None) if shown is None else moments_of(map_, keys, shown)
        x, keys = map_.apply(x, found, call.parameters), map_.apply(keys, found, call.parameters)
        own = None if own is None else map_.apply(own, found, call.parameters)
    features, root = call.primal.features, math.sqrt(call.factor * math.sqrt(x.shape[-1]))
    scaled = [None if t is None else t if root == 1.0 else t * root for t in (x, keys, own)]

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        if call.form.log_kernel:
            assert isinstance(features, LogKernel)
            return features.log_kernel(x, y)
        return features.kernel(x, y, call.parameters)

    of_x, of_keys, of_own = scaled
    assert of_x is not None and of_keys is not None
    scores, own_scores = kernel(of_x, of_keys), None
    if of_own is not None:
        own_scores = kernel(of_x.unsqueeze(3), of_own.unsqueeze(3)).squeeze(-1)
    return _summed(call, scores, own_scores, bias, own_bias, seen, x)


def _summed(
    call: Call, scores: Tensor, own: Tensor | None, bias: Tensor | None, own_bias: Tensor | None, seen: Tensor | None,
    x: Tensor,
) -> Tensor:  # fmt: skip
    """Σ_j κ_j v_j / h of log κ, or of κ where it has no logarithm: [B, H, L, W], and of the own points [B, H, L, 1]."""
    form = call.form
    hidden = None if seen is None else ~seen[:, None]
    if own is not None:
        scores = torch.cat([scores, own], -1)
        hidden = None if hidden is None else torch.cat([hidden, torch.zeros_like(hidden[..., :1])], -1)
        if bias is not None and own_bias is not None:
            bias = torch.cat([bias, own_bias.expand(*bias.shape[:-1], 1)], -1)
    sink: Tensor | float = 0.0
    if form.log_kernel:
        scores = scores if bias is None else scores + bias
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
        if form.kernel_sum or form.sink:
            shift = scores.amax(-1, keepdim=True)
            if has_sink(call.primal.normalizer):
                log_sink = call.primal.normalizer.log_sink(shift, call.parameters)
                shift = torch.maximum(shift, log_sink)
                sink = (log_sink - shift).exp()
            scores = scores - shift
        kernel = scores.exp()
    else:
        kernel = scores if bias is None else scores * (bias if hidden is None else bias.masked_fill(hidden, 0.0)).exp()
        kernel = kernel if hidden is None else kernel.masked_fill(hidden, 0.0)
    total = kernel.sum(-1, keepdim=True)
    if form.log_kernel and (form.kernel_sum or form.sink):
        h = total + sink
    else:
        h = call.primal.normalizer.at(x, total, call.parameters)
    weights = kernel / h
    values = call.points.seen("values", call.piece).to(weights.dtype)
    slots, each = values.shape[2], call.each
    folded = weights[..., :slots].unflatten(1, (-1, each)).flatten(2, 3)
    out = (folded @ values).unflatten(2, (each, -1)).flatten(1, 2)
    if own is not None:
        out = out + weights[..., slots:] * call.running.values.repeat_interleave(each, 1)
    return out
