"""Sparse softmax heads that compute what they keep.

On a GPU without dropout: FlexAttention over a block mask. Everywhere else, and where it has no form: `gathered`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..dual.rewrites import pooling_of
from ..primal import Sparse
from . import gathered, sdpa
from .pooling import Pool
from .problem import Problem

WORTHWHILE = 5
"""Pieces pay when they hold at most one key in so many: measured on a CPU, where they break even near 400 keys."""

SMALLEST_HEAD = 16
"""FlexAttention's least head dimension; smaller heads are padded with zeros."""


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    training_set = problem.primal.training_set
    if not isinstance(training_set, Sparse):
        return "the training set is not Sparse: every query sees all keys"
    if reason := sdpa.refusal(problem):
        return reason
    if problem.attn_hidden is not None:
        return "an attn_mask beside the pattern needs the dense mask"
    pooled = pooling_of(training_set)
    irregular = pooled is not None and (pooled.prefix or pooled.grid) and any(s > 1 for s in problem.scales)
    if irregular and (problem.is_causal or not _flex_runs(problem)):
        return "pooled windows of a grid, or after a prefix, do not stand in equal blocks"
    if problem.q.shape[2] > problem.k.shape[2] and not _flex_runs(problem):
        return f"{problem.q.shape[2]} queries for {problem.k.shape[2]} keys: queries past the last key have no block"
    if training_set.pattern.pieces(problem.k.shape[2]) is None and not _flex_runs(problem):
        return f"{training_set.pattern!r} does not say where the keys it keeps lie (Pattern.pieces)"
    return None


def pass_over(problem: Problem) -> str | None:
    """Why `auto` prefers another executor that can: few keys are scored cheaper together than in pieces."""
    training_set = problem.primal.training_set
    assert isinstance(training_set, Sparse)
    length = training_set.points(min(problem.scales), problem.k.shape[2])
    pieces = training_set.pattern.pieces(length)
    if pieces is None:
        return None
    far = {None: 0, "residues": 1, "summary": pieces.summary}[pieces.far] * length // pieces.block
    kept = 3 * pieces.block + far
    return None if kept * WORTHWHILE <= length else f"{kept} of {length} keys in pieces cost more than the dense mask"


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    return problem.by_group(lambda p: (_attend(p), None))


def _flex_runs(p: Problem) -> bool:
    return p.q.is_cuda and p.dropout_p == 0 and p.q.dtype != torch.float64


def _attend(p: Problem) -> Tensor:
    training_set = p.primal.training_set
    assert isinstance(training_set, Sparse)
    length = training_set.points(p.scale, p.k.shape[2])
    if not p.is_causal:
        q, points, _ = sdpa.one_sided(p)
        if _flex_runs(p):
            return _flex(p, q, points, training_set, length)
        return gathered.attend(q, points, None, training_set.pattern, length, p.scale, p.dropout_p)
    _, rows, causal = sdpa.one_sided_causal(p)
    q = rows.flatten(2, 3)
    complete = Pool(causal.keys[:, :, :, -1], causal.values[:, :, :, -1], _last(causal.seen), _last(causal.bias))
    if p.scale == 1 and _flex_runs(p):
        return _flex(p, q, complete, training_set, length)
    running = Pool(
        causal.keys.flatten(2, 3), causal.values.flatten(2, 3), _by_query(causal.seen), _by_query(causal.bias)
    )
    out = gathered.attend(q, complete, running, training_set.pattern, length, p.scale, p.dropout_p)
    return out[:, :, : p.q.shape[2]]


def _last(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[..., -1]


def _by_query(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten(2, 3)


def _flex(p: Problem, q: Tensor, points: Pool, training_set: Sparse, length: int) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    coordinate = training_set.coordinate(torch.arange(q.shape[2], device=q.device), p.scale, p.k.shape[2])
    seen = None if points.seen is None else points.seen.expand(q.shape[0], -1, -1)
    bias = None if points.bias is None else points.bias.expand(*q.shape[:2], -1)

    def kept(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ok = training_set.pattern.allows(coordinate[i], j, length)
        ok = ok & (j <= i) if p.is_causal else ok
        return ok if seen is None else ok & seen[b, 0, j]

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[b, h, j]

    mask = create_block_mask(
        kept, None if seen is None else q.shape[0], None, q.shape[2], points.keys.shape[2], q.device
    )
    query, keys, values = (pad(x, (0, max(0, SMALLEST_HEAD - x.shape[-1]))) for x in (q, points.keys, points.values))
    out = _compiled_flex()(
        query, keys, values, block_mask=mask, score_mod=None if bias is None else biased,
        scale=1 / math.sqrt(q.shape[-1]),
    )  # fmt: skip
    return out[..., : points.values.shape[-1]]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
