"""Sparse softmax heads that compute what they keep: the pieces of their pattern, by `gathered`.

On a GPU without dropout each piece is one FlexAttention (`kernels/flex`), told by the piece's `Span` what to skip; what
padding hides is a bias on the scores, so no mask is built for it. Elsewhere, plain torch.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..dual import GroupHeadsByScale, KeepPattern, Rewrite, form_of
from ..dual.form import over_of, pattern_of, pieces_of, pooling_of
from ..kernels.flex import attention as flex
from ..primal.patterns import Band, Block, Piece, Residues, Summary
from . import gathered, softmax
from .gathered import Laid, Part, near_block, summary_columns
from .pooling import Pool
from .problem import Problem, require


class PatternCost(NamedTuple):
    """What the pieces of a problem cost forward."""

    flops: int
    pieces: int  # attentions run one after the other


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    training_set, pattern = problem.primal.training_set, pattern_of(problem.primal.training_set)
    if pattern is None:
        return "the training set is not Sparse: every query sees all keys"
    if reason := softmax.refusal(problem, "fused attention"):
        return reason
    if problem.query_offset:
        return f"its pieces are laid out from token 0 on, and the first query stands at token {problem.query_offset}"
    if problem.attn_hidden is not None:
        return "an attn_mask beside the pattern needs the dense mask"
    if form_of(problem.primal).points == "own":
        return f"{over_of(training_set)!r} has points of its own"
    pooled = pooling_of(training_set)
    if pooled is not None and any(s > 1 for s in problem.scales):
        if pooled.prefix and problem.is_causal:
            return "causal windows after a prefix do not stand in equal blocks"
        if pooled.grid and problem.q.shape[2] > problem.k.shape[2]:
            return f"{problem.q.shape[2]} queries for a grid of {problem.k.shape[2]} keys"
    if pieces_of(pattern, problem.k.shape[2]) is None:
        return f"{pattern!r} does not say where the keys it keeps lie (Pattern.pieces)"
    return None


def estimate(problem: Problem) -> PatternCost:
    """Scores, FLOPs (2·B·H·L·columns·(D + Dv) for a group of heads) and pieces, as functions of shape."""
    training_set, pattern = problem.primal.training_set, pattern_of(problem.primal.training_set)
    assert pattern is not None
    fused = _flex_runs(problem)
    batch, _, queries, dim = problem.q.shape
    tokens, both = problem.k.shape[2], dim + problem.v.shape[-1]
    flops = count = 0
    for scale, heads in GroupHeadsByScale.groups(problem.scales):
        length = training_set.points(scale, tokens)
        pieces = pieces_of(pattern, length) or ()
        per_score = 2 * batch * len(heads) * queries * both
        columns = sum(_columns(piece, length, scale, fused) for piece in pieces)
        flops, count = flops + per_score * columns, count + len(pieces)
    return PatternCost(flops, count)


def _columns(piece: Piece, length: int, scale: int, fused: bool) -> int:
    """Scores computed for a query: the kept ones, those beside them in a near block or, fused, in a tile."""
    computed = flex.whole_tiles if fused else int
    match piece:
        case Band(reach):
            return 2 * computed(reach) + computed(1) if fused else 3 * near_block(piece)
        case Summary():
            return computed(summary_columns(piece, length))
        case Residues(stride):
            columns = -(-length // min(stride, length))
        case Block(size):
            columns = min(size, length)
    rows = columns * scale
    return computed(columns) * computed(rows) // rows  # a class smaller than a tile still takes one


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (*softmax.one_sided_rewrites(problem), KeepPattern, GroupHeadsByScale)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    return problem.by_group(lambda p: (_attend(p), None))


def _flex_runs(p: Problem) -> bool:
    return flex.usable(p.q, p.dropout_p)


def _attend(p: Problem) -> Tensor:
    require(p.expansion, KeepPattern)
    pattern, training_set = p.expansion.pattern, p.primal.training_set
    assert pattern is not None
    pieces = pieces_of(pattern, training_set.points(p.scale, p.k.shape[2]))
    assert pieces is not None
    fused = _flex_runs(p)
    attend_piece = _flex if fused else partial(gathered.dense, dropout_p=p.dropout_p)
    usual = p.relative_scale == 1.0  # pieces divide by √D
    if not p.is_causal:
        q, points, _ = softmax.one_sided(p)
        q = q if usual else q * p.relative_scale
        slot, per_key = _slots(p)
        if slot is None:
            return gathered.attend(q, points, None, pieces, per_key, None, attend_piece, not fused)
        length = training_set.points(p.scale, max(q.shape[2], p.k.shape[2]))
        query = slot.new_zeros(length * per_key).index_copy(0, slot, torch.arange(q.shape[2], device=q.device))
        q = q.index_select(2, query)  # slots that no query takes hold some query, and no one looks
        return gathered.attend(q, points, None, pieces, per_key, None, attend_piece, not fused).index_select(2, slot)
    queries, causal = softmax.one_sided_causal(p)
    q = queries.rows.flatten(2, 3)
    q = q if usual else q * p.relative_scale
    complete = Pool(causal.keys[:, :, :, -1], causal.values[:, :, :, -1], _last(causal.seen), _last(causal.bias))
    if p.scale == 1:
        return gathered.attend(q, complete, None, pieces, 1, 0, attend_piece, not fused)
    running = Pool(
        causal.keys.flatten(2, 3), causal.values.flatten(2, 3), _by_query(causal.seen), _by_query(causal.bias)
    )
    out = gathered.attend(q, complete, running, pieces, p.scale, 1, attend_piece, not fused, p.dropout_p)
    return out[:, :, : p.q.shape[2]]


def _slots(p: Problem) -> tuple[Tensor | None, int]:
    """Each query's slot, coordinate·per_key + place (None where that is its index), and per_key."""
    pooled = pooling_of(p.primal.training_set)
    if p.scale == 1 or pooled is None or not (pooled.prefix or pooled.grid):
        return None, p.scale
    per_key = p.scale * p.scale if pooled.grid else p.scale
    index = torch.arange(p.q.shape[2], device=p.q.device)
    coordinate, place = pooled.window(index, p.scale, p.k.shape[2])
    return coordinate * per_key + place, per_key


def _last(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[..., -1]


def _by_query(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten(2, 3)


def _flex(laid: Laid) -> Part:
    return flex.attend(laid.q, laid.keys, laid.values, laid.bias, laid.span)
