"""A sparse head as the pieces of its pattern: batches of small dense attentions, merged by their log-sum-exps.

    out = Σ_p exp(lse_p − lse) out_p,   lse = log Σ_p exp(lse_p)

which is exact since pieces are disjoint, and drops weights as one softmax would. Residue classes and blocks are
reshapes, summary keys a slice, and the near keys either a block of queries with the blocks beside it (`near`, plain
torch) or one attention whose kernel skips what a `Span` hides. Queries stand in slots, `per_key` to a coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from ..kernels.flex.attention import FAR, Span
from ..primal.patterns import Band, Block, Piece, Residues, Summary
from .pooling import Pool, fit_length

Part = tuple[Tensor, Tensor]
"""Outputs [..., rows, Dv] of a piece, and their log-sum-exps [..., rows], −inf where a row sees no key of it."""


class Laid(NamedTuple):
    """A piece as G attentions of R rows over C columns; without a span every row sees every column."""

    q: Tensor  # [G, H, R, D]
    keys: Tensor  # [G, H, C, D]
    values: Tensor  # [G, H, C, Dv]
    bias: Tensor | None  # [G, H or 1, C], −inf where hidden
    span: Span | None
    back: Callable[[Tensor], Tensor]  # [G, H, R, ·] to [B, H, slots, ·]


class BiasedPoints(NamedTuple):
    """The points of a head, hidden ones by their bias."""

    keys: Tensor  # [B, H, W, D]
    values: Tensor  # [B, H, W, Dv]
    bias: Tensor | None  # [B, H or 1, W]


def attend(
    q: Tensor,
    points: Pool,
    running: Pool | None,
    pieces: tuple[Piece, ...],
    per_key: int,
    least: int | None,
    attend_piece: Callable[[Laid], Part],
    near: bool,
    dropout_p: float = 0.0,
) -> Tensor:
    """Queries [B, H, L, D] at coordinates ⌊i/per_key⌋ to outputs [B, H, L, Dv].

    least: causal heads see j ≤ i − least; None when all. running: each slot's own point, beside those before it;
    `dropout_p` is for that one, a piece of one column.
    near: lay bands out in blocks, for an `attend_piece` that computes what a span hides.
    """
    width = max(points.keys.shape[2], -(-q.shape[2] // per_key))
    slots = fit_length(q, width * per_key)
    at = BiasedPoints(fit_length(points.keys, width), fit_length(points.values, width), _bias(points, width))
    parts = []
    for piece in pieces:
        laid = lay_out(piece, slots, at, per_key, least, near)
        if laid is not None:
            out, lse = attend_piece(laid)
            parts.append((laid.back(out), laid.back(lse.unsqueeze(-1)).squeeze(-1)))
    if running is not None and any(piece.own for piece in pieces):
        parts.append(_running(slots, running, dropout_p))
    return merge(parts)[:, :, : q.shape[2]]


def dense(laid: Laid, dropout_p: float = 0.0) -> Part:
    """softmax(q·k/√D + bias) v over what the span shows, and log Σ exp(q·k/√D + bias)."""
    scores = (laid.q / math.sqrt(laid.q.shape[-1])) @ laid.keys.transpose(-1, -2)
    scores = scores.to(_wide(scores))
    if laid.bias is not None:
        scores = scores + laid.bias.unsqueeze(-2)
    if laid.span is not None:
        rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(~laid.span.allows(rows[:, None], columns), -torch.inf)
    shift = scores.detach().amax(-1, keepdim=True)
    shift = shift.masked_fill(shift == -torch.inf, 0.0)
    weights = (scores - shift).exp()
    total = weights.sum(-1, keepdim=True)
    unseen = total == 0
    total = total.masked_fill(unseen, 1.0)
    lse = (total.log() + shift).masked_fill(unseen, -torch.inf).squeeze(-1)
    return dropout(weights / total, dropout_p).to(laid.values.dtype) @ laid.values, lse


def merge(parts: list[Part]) -> Tensor:
    """Σ_p exp(lse_p − lse) out_p; zero where no piece has a key."""
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([lse for _, lse in parts])
    top = lse.detach().amax(0)
    share = (lse - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = share.sum(0)
    share = (share / total.masked_fill(total == 0, 1.0)).unsqueeze(-1)
    merged = share[0] * parts[0][0]
    for part, weight in zip(parts[1:], share[1:], strict=True):
        merged = torch.addcmul(merged, weight, part[0].to(merged.dtype))
    return merged.to(parts[0][0].dtype)


def lay_out(piece: Piece, q: Tensor, at: BiasedPoints, per_key: int, least: int | None, near: bool) -> Laid | None:
    """The piece of slots [B, H, W·per_key, D] over W points; None when it is empty."""
    width = at.keys.shape[2]
    match piece:
        case Residues(stride):
            span = None if least is None else Span(per_key, 1, least, FAR)
            return _grouped(q, at, per_key, min(stride, width), 3, span)
        case Block(size):
            span = None if least is None else Span(per_key, 1, least, FAR)
            return _grouped(q, at, per_key, min(size, width), 2, span)
        case Summary(size, count):
            span = Span(per_key * size, count, -FAR, FAR, 0) if least is None else Span(per_key * size, count, 1, FAR)
            columns = summary_columns(piece, width)
            if not columns or width <= size:
                return None

            def last(x: Tensor) -> Tensor:  # [B, ·, W, C] to [B, ·, columns, C]
                x = fit_length(x, width + -width % size).unflatten(2, (-1, size))
                return x[:, :, :, size - count :].flatten(2, 3)[:, :, :columns]

            bias = None if at.bias is None else last(at.bias.unsqueeze(-1)).squeeze(-1)
            return Laid(q, last(at.keys), last(at.values), bias, span, lambda x: x)
        case Band(reach, own):
            reach = min(reach, width - 1)
            low = -reach if least is None else max(least, int(not own))
            span = Span(per_key, 1, low, reach, 2 * FAR if own or low > 0 else 0)
            if span.empty:
                return None
            if near and near_block(piece) < width:
                return _near(q, at, per_key, near_block(piece), span)
            return Laid(q, *at, span, lambda x: x)


def summary_columns(piece: Summary, width: int) -> int:
    """How many of `width` keys are summary keys."""
    return width // piece.size * piece.count + max(0, width % piece.size - (piece.size - piece.count))


def near_block(piece: Band) -> int:
    """The block that a band is gathered in: the stride or the radius it comes from."""
    return max(1, piece.reach + (not piece.own))


def _grouped(q: Tensor, at: BiasedPoints, per_key: int, size: int, groups: int, span: Span | None) -> Laid:
    """W as [W/size, size], with dimension `groups` of [B, H, W/size, size] in the batch: 3 residues, 2 blocks."""
    batch, slots = q.shape[0], q.shape[2]
    width = slots // per_key
    blocks, inside = -(-width // size), 5 - groups
    short = blocks * size - width

    def split(x: Tensor, places: int = 1) -> Tensor:  # [B, H, W·places, C] to [B·groups, H, inside·places, C]
        x = fit_length(x, blocks * size * places).unflatten(2, (blocks, size, places))
        return x.permute(0, groups, 1, inside, 4, 5).flatten(3, 4).flatten(0, 1)

    def back(x: Tensor) -> Tensor:
        x = x.unflatten(0, (batch, size if groups == 3 else blocks))  # no -1, which an empty batch leaves open
        x = x.unflatten(3, (-1, per_key))  # [B, groups, H, inside, places, C]
        x = x.permute(0, 2, 3, 1, 4, 5) if groups == 3 else x.permute(0, 2, 1, 3, 4, 5)
        return x.flatten(2, 4)[:, :, :slots]

    keys, values, bias = _columns(at)
    if short and span is None:  # causal rows never reach past the last key
        bias = _hide(torch.zeros_like(keys[:, :1, :, :1], dtype=_wide(keys)) if bias is None else bias, 0, short)
    elif bias is not None:
        bias = fit_length(bias, blocks * size)
    if bias is not None:
        bias = bias.unflatten(2, (blocks, size)).permute(0, groups, 1, inside, 4).flatten(0, 1).squeeze(-1)
    return Laid(split(q, per_key), split(keys), split(values), bias, span, back)


def _near(q: Tensor, at: BiasedPoints, per_key: int, size: int, span: Span) -> Laid:
    """Each block of queries over its own block of keys, the one before and, unless causal, the one after."""
    batch, slots, width = q.shape[0], q.shape[2], at.keys.shape[2]
    blocks = -(-width // size)
    short, around = blocks * size - width, range(3 if span.low < 0 else 2)

    def windows(x: Tensor) -> Tensor:  # [B, H, (n + 2)·l, C] to [B·n, H, 2l or 3l, C]
        x = x.unflatten(2, (-1, size))
        return torch.cat([x[:, :, k : k + blocks] for k in around], dim=3).transpose(1, 2).flatten(0, 1)

    def back(x: Tensor) -> Tensor:
        return x.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :slots]

    keys, values, bias = _columns(at)
    bias = torch.zeros_like(keys[:, :1, :, :1], dtype=_wide(keys)) if bias is None else bias
    rows = fit_length(q, blocks * size * per_key).unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1)
    keys, values = (windows(pad(x, (0, 0, size, short + size))) for x in (keys, values))
    span = span._replace(low=span.low - size, high=span.high - size, hole=span.hole - size)
    return Laid(rows, keys, values, windows(_hide(bias, size, short + size)).squeeze(-1), span, back)


def _running(slots: Tensor, running: Pool, dropout_p: float) -> Part:
    """A piece of one column: the slot's own point."""
    values = running.values
    if dropout_p:
        values = values * dropout(torch.ones_like(values[..., :1]), dropout_p)
    score = (slots.to(_wide(slots)) * running.keys).sum(-1) / math.sqrt(slots.shape[-1])
    score = score if running.bias is None else score + running.bias
    return values, score if running.seen is None else score.masked_fill(~running.seen, -torch.inf)


def _bias(points: Pool, width: int) -> Tensor | None:
    """[B, H or 1, width], −inf where a point is hidden or missing; None when there is nothing to say."""
    missing = width - points.keys.shape[2]
    if points.seen is None and points.bias is None and not missing:
        return None
    bias = torch.zeros_like(points.keys[:, :1, :, 0], dtype=_wide(points.keys))
    bias = bias if points.bias is None else bias + points.bias
    bias = bias if points.seen is None else bias.masked_fill(~points.seen, -torch.inf)
    return pad(bias, (0, missing), value=-torch.inf) if missing else bias


def _columns(at: BiasedPoints) -> tuple[Tensor, Tensor, Tensor | None]:
    return at.keys, at.values, None if at.bias is None else at.bias.unsqueeze(-1)


def _hide(bias: Tensor, before: int, after: int) -> Tensor:
    return pad(bias, (0, 0, before, after), value=-torch.inf)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
