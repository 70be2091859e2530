"""Our own fused attention: heads with different numbers of keys in one launch (kernels in `kernels/ragged`).

Softmax heads only, as in `sdpa`, weights of points and norms of a Gaussian kernel among them, which are a bias on keys;
of sparse ones all scores are computed, and those of the pattern kept
(`kernels.ragged.marks`). Mean pooling without masks goes through `kernels.ragged.tokens`, which pools, attends and, on
the way back, hands the gradients to the tokens. Everything else pools first and goes through `kernels.ragged.points`;
padded sequences do that for all heads at once (`kernels.ragged.padded`), the rest group by group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..dual import GroupHeadsByScale, NormsOfKeysAreBias, Rewrite, beta_of, form_of
from ..dual.form import pattern_of, pooling_of
from ..kernels.kept import on_device
from ..kernels.launching import seed_of, traced
from ..kernels.ragged import layout as layouts
from ..kernels.ragged import limits
from ..kernels.ragged import marks as ragged_marks
from ..kernels.ragged.layout import HeadLayout
from ..kernels.ragged.marks import marks
from ..kernels.ragged.padded import Flat, flat, keep_padded, pool_padded
from ..kernels.ragged.points import attend_points
from ..kernels.ragged.tokens import attend_tokens, has_tables
from ..primal import TrainingSet
from . import softmax
from .problem import Problem, in_order, query_map_alone, with_usual_scale
from .statistics import centre


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    if reason := softmax.refusal(problem, "the ragged kernel", sinks=True, biases=True):
        return reason
    if problem.attn_hidden is not None:
        return "an attn_mask gives every query its own keys"
    training_set, form = problem.primal.training_set, form_of(problem.primal)
    if "own" in (form.points, form.subset):
        return f"the ragged kernel knows no points but tokens and their windows, not those of {training_set!r}"
    if (pattern := pattern_of(training_set)) is not None:
        if problem.is_causal:
            return "the ragged kernel has no causal form of sparse patterns"
        if problem.query_offset:
            return "the ragged kernel lays a pattern out from the first query on, which stands at token 0"
        for scale in sorted(set(problem.scales)):
            points = training_set.points(scale, problem.k.shape[2])
            if reason := ragged_marks.refusal(pattern, points, problem.q.shape[2]):
                return reason
    if problem.is_causal and problem.query_offset:
        return "the ragged kernel takes the first query for the first token"
    pooled = pooling_of(training_set)
    if problem.is_causal and pooled is not None and pooled.prefix and max(problem.scales) > 1:
        return "the ragged kernel has no causal form with unpooled prefix tokens"
    if problem.is_causal and any(map_.needs == "variance" for map_ in problem.primal.point_maps):
        return "1/σ² over the few keys that the first queries see magnifies what does not cancel in the ragged kernel"
    if reason := limits.refusal(problem.q.dtype, problem.q.device, problem.q.shape[-1], problem.v.shape[-1]):
        return f"the ragged kernel {reason}"
    if _capturing(problem) and not ragged_marks.has_marks(*_marked(problem)):
        return "the marks of its pattern are not on the device; run it once on a side stream before the capture"
    if _capturing(problem) and (_plain(problem) or (_padded(problem) and max(problem.scales) > 1)):
        p = problem
        if not has_tables(p.q, p.k, p.v, p.scales, p.is_causal, _plain(p)):
            return "its tables are not on the device; run it once on a side stream before the capture"
    return None


def _capturing(p: Problem) -> bool:
    """A compiler cannot ask, and captures only what it has run."""
    return p.q.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of: all heads are one launch, some pooled group by group before."""
    one_sided: tuple[type[Rewrite], ...] = (*softmax.one_sided_rewrites(problem), NormsOfKeysAreBias)
    return one_sided if _plain(problem) or _padded(problem) else (*one_sided, GroupHeadsByScale)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    seed = seed_of(problem.q, problem.dropout_p)
    attend = _points
    if not problem.expansion.maps and (_plain(problem) or _padded(problem)):
        problem = with_usual_scale(_near(problem))
        attend = _tokens if _plain(problem) else _windows
    return attend(problem, seed), None


def _marked(p: Problem) -> tuple[TrainingSet, tuple[int, ...], int, int, torch.device]:
    """What the marks of a pattern depend on."""
    return p.primal.training_set, p.scales, p.q.shape[2], p.k.shape[2], p.q.device


def _plain(p: Problem) -> bool:
    """Mean pooling of all tokens, and at most a re-centring, which causal heads have not: all happens inside the op."""
    if p.key_hidden is not None or (p.is_causal and len(p.primal.point_maps) > 0):
        return False
    if p.is_causal and not limits.takes_running_means(p.scales, p.q.shape[2], p.k.shape[2]):
        return max(p.scales) == 1 and _simple(p)
    return _simple(p)


def _padded(p: Problem) -> bool:
    """The same of padded tokens. A compiler fuses the general way; pooled in float16 they could overflow."""
    if p.key_hidden is None or p.key_bias is not None or p.is_causal or p.q.numel() == 0 or traced():
        return False
    return _simple(p) and (max(p.scales) == 1 or p.q.dtype != torch.float16)


def _simple(p: Problem) -> bool:
    form = form_of(p.primal)
    if not form.softmax or form.weighted:  # a sink, which stands beside points, and a bias on them
        return False
    return form.simple or (form.maps != "other" and max(p.scales) == 1)  # any pooling by 1 leaves the tokens


def _near(p: Problem) -> Problem:
    """Where queries are re-centred, keys near 0: what all of them share is taken off both, and cancels.

    In 16 bits keys that lie far from 0 are as coarse as what this would gain.
    """
    if not p.primal.point_maps or p.q.dtype.itemsize <= 2:
        return p
    shared = centre(p.k, None if p.key_hidden is None else ~p.key_hidden.unsqueeze(2))
    factor, per_head = beta_of(p.primal.point_maps[0], p.parameters)
    keys = p.k - shared
    if p.key_hidden is not None:
        keys = keys.masked_fill(p.key_hidden.unsqueeze(-1), 0.0)
    beta = factor if per_head is None else per_head.to(shared.dtype)[:, None, None]
    return replace(p, q=p.q - shared * beta, k=keys)


def direct(p: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The operator with all but the tensors settled, where that is all there is to do: the host's shortest way."""
    if p.dropout_p or not _plain(p) or pattern_of(p.primal.training_set) is not None or p.relative_scale != 1.0:
        return None
    scales, is_causal, map_ = p.scales, p.is_causal, query_map_alone(p.expansion)
    if map_ is None:
        return lambda q, k, v: attend_tokens(q, k, v, None, scales, is_causal, 0.0, None)
    factor, per_head = beta_of(map_, p.parameters)
    if per_head is not None or p.q.dtype.itemsize > 2:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        beta = _kept_constant(factor, q.shape[1], q.device)  # looked up each time: a graph may be captured now
        return attend_tokens(q, k, v, beta, scales, is_causal, 0.0, None)

    return attend


def _tokens(p: Problem, seed: Tensor | None) -> Tensor:
    return attend_tokens(p.q, p.k, p.v, _beta(p), p.scales, p.is_causal, p.dropout_p, seed, marks(*_marked(p)))


def _windows(p: Problem, seed: Tensor | None) -> Tensor:
    assert p.key_hidden is not None
    beta, hidden = _beta(p), p.key_hidden.squeeze(1)
    with torch.autocast(p.q.device.type, enabled=False):
        if max(p.scales) == 1:
            points = keep_padded(p.k, p.v, hidden, beta is not None)
        else:
            layout = layouts.pooled(p.scales, p.k.shape[0], p.k.shape[2], p.k.shape[3], p.v.shape[3])
            points = pool_padded(p.k, p.v, hidden, p.scales, layout, beta is not None)
        shift = None if points.mean is None or beta is None else points.mean * beta[:, None]
    return attend_points(
        p.q, points.keys, points.values, points.layout, p.v.shape[-1], shift=shift, bias=points.bias,
        dropout_p=p.dropout_p, seed=seed, marks=marks(*_marked(p)),
    )[0]  # fmt: skip


def _beta(p: Problem) -> Tensor | None:
    """β of every head, where queries are re-centred."""
    map_ = query_map_alone(p.expansion)
    if map_ is None:
        return None
    factor, per_head = beta_of(map_, p.parameters)
    if per_head is not None:
        return per_head.float().contiguous()
    make = _constant if torch.compiler.is_compiling() else _kept_constant
    return make(factor, p.q.shape[1], p.q.device)


def _constant(value: float, size: int, device: torch.device) -> Tensor:
    return torch.full((size,), value, device=device)


_kept_constant = on_device(most=256, from_host=False)(_constant)


def _points(p: Problem, seed: Tensor | None) -> Tensor:
    """Pool and map each group of heads as `sdpa` does, and attend with all of them in one launch."""
    groups = p.expansion.calls(p.q.shape[1])
    heads_of = [heads for _, heads in groups]
    with torch.autocast(p.q.device.type, enabled=False):  # its sums are float32, and all of a tile has one dtype
        pieces = [(_causal_piece if p.is_causal else _piece)(part) for part in p.parts(groups)]
    q = in_order([piece.q for piece in pieces], heads_of)
    own_k = own_v = own_bias = None
    if p.is_causal and max(p.scales) > 1:
        own_k = in_order([_or_zeros(piece.own_k, piece.q, p.k.shape[-1]) for piece in pieces], heads_of)
        own_v = in_order([_or_zeros(piece.own_v, piece.q, p.v.shape[-1]) for piece in pieces], heads_of)
    bias = None
    if any(piece.bias is not None or piece.own_bias is not None for piece in pieces):
        longest = max(piece.keys.shape[2] for piece in pieces)
        bias = in_order([_rectangle(piece.bias, piece.keys, longest) for piece in pieces], heads_of)
        if own_k is not None:
            own_bias = in_order([_rectangle(piece.own_bias, piece.q, p.q.shape[2]) for piece in pieces], heads_of)
    keys, values = ([flat(x) for x in side] for side in zip(*((x.keys, x.values) for x in pieces), strict=True))
    layout, k_offset, v_offset = [], 0, 0
    for piece, k, v, (scale, heads) in zip(pieces, keys, values, groups, strict=True):
        for place, head in enumerate(heads):
            at = *k.place(place, k_offset), *v.place(place, v_offset)
            layout.append(HeadLayout(head, piece.keys.shape[2], scale, *at))
        k_offset, v_offset = k_offset + k.flat.numel(), v_offset + v.flat.numel()
    return attend_points(
        q, _join(keys), _join(values), layout, p.v.shape[-1], bias=bias, own=(own_k, own_v, own_bias),
        is_causal=p.is_causal, dropout_p=p.dropout_p, seed=seed, marks=marks(*_marked(p)), sink=_sink(p),
    )[0]  # fmt: skip


def _sink(p: Problem) -> Tensor | None:
    """The score of a sink of every head, [H]."""
    sink = softmax.sink_of(p)
    return None if sink is None else sink.float().flatten().expand(p.q.shape[1]).contiguous()


class _Piece(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor | None  # [B, 1 or H, points]; −inf hides
    own_k: Tensor | None = None
    own_v: Tensor | None = None
    own_bias: Tensor | None = None  # [B, 1 or H, L]


def _piece(p: Problem) -> _Piece:
    q, points, _ = softmax.one_sided(p)
    return _Piece(_scaled(q, p), points.keys, points.values, _hide(points.seen, points.bias))


def _causal_piece(p: Problem) -> _Piece:
    queries, points = softmax.one_sided_causal(p)
    length = p.q.shape[2]

    def complete(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, :, :, -1]

    def running(x: Tensor) -> Tensor:
        return x.flatten(2, 3)[:, :, :length]

    hidden = _hide(points.seen, points.bias)
    piece = _Piece(
        _scaled(running(queries.rows), p), points.keys[:, :, :, -1], points.values[:, :, :, -1], complete(hidden)
    )
    if p.scale == 1:
        return piece
    own_bias = None if hidden is None else running(hidden)
    return piece._replace(own_k=running(points.keys), own_v=running(points.values), own_bias=own_bias)


def _scaled(q: Tensor, p: Problem) -> Tensor:
    """Mapped queries; the kernel divides by √D."""
    return q if p.relative_scale == 1.0 else q * p.relative_scale


def _hide(seen: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if seen is None:
        return None if bias is None else bias.float()
    base = torch.zeros((), device=seen.device) if bias is None else bias.float()
    return torch.where(seen, base, -torch.inf)


def _or_zeros(x: Tensor | None, like: Tensor, dim: int) -> Tensor:
    return like.new_zeros(*like.shape[:3], dim) if x is None else x


def _rectangle(bias: Tensor | None, like: Tensor, width: int) -> Tensor:
    """[B, H, width] of a group's bias; columns that are not there are never read."""
    batch, heads = like.shape[:2]
    if bias is None:
        return torch.zeros(batch, heads, width, device=like.device)
    bias = bias.expand(batch, heads, -1)
    return torch.nn.functional.pad(bias, (0, width - bias.shape[-1]))


def _join(parts: list[Flat]) -> Tensor:
    return parts[0].flat if len(parts) == 1 else torch.cat([part.flat for part in parts])
