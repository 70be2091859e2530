"""The formula, dense and readable, at any dtype, in at least float32. It decides what is correct.

    out_i = Σ_{j∈S} κ(T q_i, T k_j) v_j / h(T q_i)

R below is 1, or the number of queries L where each query has its own points: pooled under causality, or mapped by the
statistics of what it sees.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import dropout

from ..dual import GroupHeadsByScale, Rewrite, form_of
from ..dual.form import has_sink, knows_positions
from ..primal import LogKernel, Moments, PointMap, Points
from . import positions
from .pooling import log_sum
from .problem import Problem, accumulated


class ZeroNormalizerError(ArithmeticError):
    """h is exactly zero for a query that sees keys."""


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    return problem.weights_refusal()


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (GroupHeadsByScale,)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv], and weights [B, H, L, S] where they are asked for."""
    return accumulated(problem, lambda p: p.by_group(_attend))


def _attend(p: Problem) -> tuple[Tensor, Tensor | None]:
    primal = p.primal

    # the training set: pool keys, values and the bias on keys to points
    values = p.v if p.key_bias is None else torch.cat([p.v, _as_value(p)], dim=-1)
    points = primal.training_set.reduce(p.k, values, p.seen_tokens(), p.scale, p.parameters)
    keys, values = points.keys, points.values[..., : p.v.shape[-1]]  # [B, H, R, W, D], [B, H, R, W, Dv]
    bias = points.values[..., -1] if p.key_bias is not None else torch.zeros_like(points.values[..., -1])
    if p.log_weights is not None:
        bias = bias + _added_up(p, points)

    # the input maps, with statistics over the points
    statistics = any(map_.needs != "nothing" for map_ in primal.point_maps)
    per_query = keys.shape[2] > 1 or (statistics and points.seen.shape[2] > 1)
    x = p.q.unsqueeze(3) if per_query else p.q.unsqueeze(2)  # [B, H, L, 1, D] or [B, H, 1, L, D]
    for map_ in primal.point_maps:
        found = _moments(map_, keys, points.seen)
        x, keys = map_.apply(x, found, p.parameters), map_.apply(keys, found, p.parameters)

    # which points each query sums over
    seen = points.seen  # [B, H or 1, R, W]
    visible = p.visible()
    if visible is not None:
        seen = seen & visible
    empty = ~seen.any(-1, keepdim=True)
    if p.attn_bias is not None:
        bias = bias + p.attn_bias
    bias = _with_positions(p, bias, points)

    # the kernel; where h is its sum, a factor per query cancels, and one is chosen that keeps the exponential in range;
    # of a sink as well
    root = math.sqrt(p.relative_scale)  # κ is a function of x·y/√D wherever another factor can be asked for
    x_scored, keys_scored = (x, keys) if root == 1.0 else (x * root, keys * root)
    form = form_of(primal)
    softmax = form.log_kernel and (form.kernel_sum or form.sink)
    sink: Tensor | float = 0.0
    if form.log_kernel:
        assert isinstance(primal.features, LogKernel)
        scores = (_rows(primal.features.log_kernel(x_scored, keys_scored)) + bias).masked_fill(~seen, -torch.inf)
        if softmax:
            shift = scores.amax(-1, keepdim=True).detach().masked_fill(empty, 0.0)
            if has_sink(primal.normalizer):
                log_sink = primal.normalizer.log_sink(shift, p.parameters)
                shift = torch.maximum(shift, log_sink.detach())
                sink = (log_sink - shift).exp()
            scores = scores - shift
        kernel = scores.exp()
    else:
        if p.log_weights is not None:  # relative to the largest that a query sees, which h cancels
            bias = bias - bias.detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).masked_fill(empty, 0.0)
            bias = bias.masked_fill(~seen, 0.0)
        kernel = _rows(primal.features.kernel(x_scored, keys_scored, p.parameters)) * bias.exp()
        kernel = kernel.masked_fill(~seen, 0.0)

    total = kernel.sum(-1, keepdim=True)
    if softmax:  # h ≥ 1
        h = total + sink
    else:
        h = primal.normalizer.at(x.squeeze(3 if per_query else 2), total, p.parameters)
        _check_normalizer(h, empty)
    weights = kernel / h.masked_fill(empty, 1.0)  # [B, H, L, W]

    dropped = weights if primal.features.finite else dropout(weights, p.dropout_p)
    out = _apply(dropped, values)
    if primal.features.finite:  # no weights exist in the re-associated form, so entries of the output are dropped
        out = dropout(out, p.dropout_p)
    if not p.need_weights:
        return out, None
    assert points.share is not None
    return out, _apply(dropped, (points.share > 0).to(dropped.dtype) if p.repeat_weights else points.share)


def _with_positions(p: Problem, bias: Tensor, points: Points) -> Tensor:
    """The bias [B, H, R, W], and what a kernel of positions adds to it: [B, H, L, W]."""
    if not knows_positions(p.primal.features):
        return bias
    places = positions.of_definition(p.primal.training_set, points, p.k, p.v, p.seen_tokens(), p.scale)
    added = p.primal.features.log_positions(positions.of_queries(p), places, p.parameters)
    return bias if added is None else bias + added.to(bias.dtype)


def _as_value(p: Problem) -> Tensor:
    """The bias on keys as one more value, so that it is pooled like them: [B, H, S, 1]."""
    assert p.key_bias is not None
    return p.key_bias.to(p.v.dtype).unsqueeze(-1).expand(-1, p.v.shape[1], -1, -1)


def _added_up(p: Problem, points: Points) -> Tensor:
    """log of the sum of the weights of each point's tokens, those that exist: [B, H, R, W]."""
    assert p.log_weights is not None
    tokens, width = p.k.shape[2], points.keys.shape[3]
    if points.share is not None:
        member = points.share > 0
    else:
        place = p.primal.training_set.coordinate(torch.arange(tokens, device=p.k.device), p.scale, tokens)
        member = place == torch.arange(width, device=p.k.device)[:, None]
    member = member & p.seen_tokens().unsqueeze(-2)  # [B or 1, H or 1, R, W, S]
    empty = ~member.any(-1)
    return log_sum(p.log_weights[:, :, None, None], member | empty.unsqueeze(-1)).masked_fill(empty, 0.0)


def _moments(map_: PointMap, keys: Tensor, seen: Tensor) -> Moments:
    """Mean and variance over the points that are seen, one vote each, in at least float32: [B, H, R, 1, D]."""
    if map_.needs == "nothing":
        return Moments(None, None)
    votes = seen.unsqueeze(-1)  # [B, H or 1, R, W, 1]
    count = votes.sum(-2, keepdim=True).clamp(min=1)
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    mean = wide.where(votes, 0.0).sum(-2, keepdim=True) / count
    if map_.needs == "mean":
        return Moments(mean, None)
    variance = (wide - mean).square().where(votes, 0.0).sum(-2, keepdim=True) / count
    return Moments(mean, variance)


def _rows(kernel: Tensor) -> Tensor:
    """[B, H, 1, L, W] or [B, H, L, 1, W] to [B, H, L, W]."""
    return kernel.flatten(2, 3)


def _apply(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_w weights_iw values_w, with values [B, H, R, W, ·]."""
    if values.shape[2] == 1:
        return weights @ values.squeeze(2)
    return (weights.unsqueeze(-2) @ values).squeeze(-2)


def _check_normalizer(h: Tensor, empty: Tensor) -> None:
    # a tensor's value cannot be looked at while it is traced or batched
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    zero = (h == 0) & ~empty
    if zero.any():
        raise ZeroNormalizerError(
            f"h is exactly zero for {int(zero.sum())} of {zero.numel()} queries that see keys: their output is not "
            f"defined. Features that can cancel (Taylor of odd degree) or underflow cause this."
        )
