"""Sparse heads by gathering: dense products over exactly the blocks a pattern keeps, with plain torch.

Keys stand in blocks of l. A query sees its own block and the two beside it (`near`), and further away either the keys
of its own residue mod l (strided) or the summary keys of every block (fixed). Each piece is one batched product;
their scores share one softmax. Cost O(N·(4l + N/l)) instead of O(N²); dropout and gradients everywhere.

Causal heads score the windows strictly before a query's own, and its running mean as a piece of one column.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from ..primal import Pattern
from .pooling import Pool


class Layout(NamedTuple):
    """Coordinates in blocks: `blocks` of `size` keys, `per_key` queries to a key coordinate."""

    blocks: int
    size: int
    per_key: int


def attend(
    q: Tensor, points: Pool, running: Pool | None, pattern: Pattern, length: int, per_key: int, dropout_p: float
) -> Tensor:
    """Queries [B, H, W·per_key, D], points of length W; `running` [B, H, W·per_key, ·] makes it causal."""
    pieces = pattern.pieces(length)
    assert pieces is not None
    windows = points.keys.shape[2]
    layout = Layout(-(-windows // pieces.block), pieces.block, per_key)
    keys, values, seen, bias = (_blocks(x, layout) for x in _columns(points))
    rows = layout.blocks * layout.size * per_key
    queries = _to_blocks(q, layout) / math.sqrt(q.shape[-1])  # [B, H, n, l·s, D]
    i = torch.arange(rows, device=q.device).div(per_key, rounding_mode="floor").unflatten(0, (layout.blocks, -1))
    j = torch.arange(layout.blocks * layout.size, device=q.device).unflatten(0, (layout.blocks, layout.size))

    def allowed(i: Tensor, j: Tensor) -> Tensor:
        ok = pattern.allows(i, j, length) & (j >= 0) & (j < windows)
        return ok & (j < i) if running is not None else ok

    near_j = _near(j[None, None, :, :, None], fill=-1)[0, 0, :, :, 0]  # [n, 3l]
    take = allowed(i[:, :, None], near_j[:, None, :]) & _near(seen)[..., 0].unsqueeze(-2)
    scores = [queries @ _near(keys).transpose(-1, -2) + _near(bias)[..., 0].unsqueeze(-2)]
    scores[0] = scores[0].masked_fill(~take, -torch.inf)

    far = None
    if pieces.far is not None:
        far = _Residues(layout) if pieces.far == "residues" else _Summary(layout, pieces.summary)
        far_j = far.coordinates(j)  # broadcasts against [n, l·s, m]
        distant = (
            far_j.div(layout.size, rounding_mode="floor") - torch.arange(layout.blocks, device=q.device)[:, None, None]
        ).abs() > 1
        take = allowed(i[:, :, None], far_j) & distant & far.flags(seen)
        scores.append((far.scores(queries, keys) + far.flags(bias)).masked_fill(~take, -torch.inf))
    if running is not None:
        own = (_to_blocks(running.keys, layout) * queries).sum(-1, keepdim=True)
        _, own_values, own_seen, own_bias = (_to_blocks(x, layout) for x in _columns(running))
        self_seen = pattern.allows(i, i, length)[..., None] & own_seen
        scores.append((own + own_bias).masked_fill(~self_seen, -torch.inf))

    joined = torch.cat([s.expand(*queries.shape[:4], -1) for s in scores], dim=-1)
    shift = joined.detach().amax(-1, keepdim=True)
    weights = (joined - shift.masked_fill(shift == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = dropout(weights / total.masked_fill(total == 0, 1.0), dropout_p)
    parts = list(weights.split([s.shape[-1] for s in scores], dim=-1))
    out = parts[0] @ _near(values)
    if far is not None:
        out = out + far.apply(parts[1], values)
    if running is not None:
        out = out + parts[-1] * own_values
    return out.flatten(2, 3)[:, :, : q.shape[2]]


class _Residues:
    """The keys of a query's own residue mod l: a dense attention of length n for each of the l residues."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def coordinates(self, j: Tensor) -> Tensor:
        return j.T.repeat_interleave(self.layout.per_key, 0)[None]  # [1, l·s, n]

    def flags(self, x: Tensor) -> Tensor:
        """[B, ·, n, l, 1] to [B, ·, 1, l·s, n]."""
        return x.squeeze(-1).transpose(-1, -2).repeat_interleave(self.layout.per_key, -2).unsqueeze(2)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._back(self._by_residue(queries) @ keys.movedim(3, 2).transpose(-1, -2))

    def apply(self, weights: Tensor, values: Tensor) -> Tensor:
        return self._back(self._by_residue(weights) @ values.movedim(3, 2))

    def _by_residue(self, x: Tensor) -> Tensor:  # [B, H, n, l·s, C] to [B, H, l, n·s, C]
        return x.unflatten(3, (self.layout.size, self.layout.per_key)).movedim(3, 2).flatten(3, 4)

    def _back(self, x: Tensor) -> Tensor:
        return x.unflatten(3, (self.layout.blocks, self.layout.per_key)).movedim(2, 3).flatten(3, 4)


class _Summary:
    """The last c keys of every block, seen by all."""

    def __init__(self, layout: Layout, summary: int) -> None:
        self.layout, self.summary = layout, summary

    def coordinates(self, j: Tensor) -> Tensor:
        return j[:, -self.summary :].flatten()[None, None]  # [1, 1, n·c]

    def flags(self, x: Tensor) -> Tensor:
        return x[:, :, :, -self.summary :, 0].flatten(2, 3)[:, :, None, None]

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries @ self._keys(keys).transpose(-1, -2)

    def apply(self, weights: Tensor, values: Tensor) -> Tensor:
        return weights @ self._keys(values)

    def _keys(self, x: Tensor) -> Tensor:  # [B, H, n, l, C] to [B, H, 1, n·c, C]
        return x[:, :, :, -self.summary :].flatten(2, 3).unsqueeze(2)


def _columns(points: Pool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, and the flags and bias of the points as one column each."""
    length = points.keys.shape[2]
    seen = points.keys.new_ones(1, 1, length, dtype=torch.bool) if points.seen is None else points.seen
    bias = points.keys.new_zeros(1, 1, length) if points.bias is None else points.bias.to(points.keys.dtype)
    return points.keys, points.values, seen.unsqueeze(-1), bias.unsqueeze(-1)


def _blocks(x: Tensor, layout: Layout) -> Tensor:
    """[B, ·, W, C] to [B, ·, n, l, C], zero-padded (flags: False)."""
    x = pad(x, (0, 0, 0, layout.blocks * layout.size - x.shape[2]))
    return x.unflatten(2, (layout.blocks, layout.size))


def _to_blocks(x: Tensor, layout: Layout) -> Tensor:
    """[B, ·, queries, C] to [B, ·, n, l·s, C]; queries past the last key are cut off by the caller's length."""
    rows = layout.blocks * layout.size * layout.per_key
    return pad(x, (0, 0, 0, rows - x.shape[2])).unflatten(2, (layout.blocks, layout.size * layout.per_key))


def _near(x: Tensor, fill: int = 0) -> Tensor:
    """Each block with the ones before and after it: [B, ·, n, l, C] to [B, ·, n, 3l, C]."""
    around = pad(x, (0, 0, 0, 0, 1, 1), value=fill)
    return torch.cat([around[:, :, :-2], around[:, :, 1:-1], around[:, :, 2:]], dim=3)
