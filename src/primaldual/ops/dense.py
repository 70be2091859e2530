"""Every score once, in a matrix: O(N²) memory, and the weights where they are asked for.

All queries share their keys: under softmax the last input map is one of the query alone, since row constants cancel. A
causal head pooled by s sees the windows that are complete before its own, and its own up to the query. There the matrix
is that of the complete windows, with the running mean of each query's own window in the column of that window.

Where a map of statistics is followed by another, or Φ is finite, nothing cancels: each query has keys of its own. They
are made for a block of queries at a time, and once more on the way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from ..dual import GroupHeadsByScale, Rewrite, form_of
from ..dual.form import has_sink, kernel_of, pooling_of
from ..primal import LogKernel, Moments
from . import positions
from .pooling import CausalPool, Pool, fit_length, relative, visible
from .problem import Problem, UnsupportedError, accumulated
from .softmax import bias_of, needs_own_keys, one_sided, one_sided_causal, one_sided_rewrites, would_need_own_keys
from .statistics import masked_moments, moments


class Running(NamedTuple):
    """The mean of each query's own window up to the query, and where it stands."""

    keys: Tensor  # [B, H, L, D]
    values: Tensor  # [B, H, L, Dv]
    place: Tensor  # bool [L, W]: one column per query


class Sides(NamedTuple):
    """Mapped queries, the points they share, and what each query sees of them."""

    queries: Tensor  # [B, H, L, D]
    keys: Tensor  # [B, H, W, D]
    values: Tensor  # [B, H, W, Dv]
    seen: Tensor | None  # bool [B or 1, H or 1, L or 1, W]; None when all are
    bias: Tensor | None  # [B or 1, H or 1, L or 1, W]
    running: Running | None = None


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    primal, form = problem.primal, form_of(problem.primal)
    if not (form.finite or _logarithmic(problem)):
        return f"only {primal.features!r} knows its kernel"
    if reason := positions.refusal(problem):
        return reason
    if form.points == "own":
        return f"only {primal.training_set!r} knows its points"
    if max(problem.scales) > 1 and (reason := would_need_own_keys(problem)):
        return reason
    return None if problem.repeat_weights else problem.weights_refusal()


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (*(() if would_need_own_keys(problem) else one_sided_rewrites(problem)), GroupHeadsByScale)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv], and weights [B, H, L, S] where they are asked for."""
    if form_of(problem.primal).cancels:
        return problem.by_group(_attend)
    return accumulated(problem, lambda p: p.by_group(_attend))


def _attend(p: Problem) -> tuple[Tensor, Tensor | None]:
    finite = p.primal.features.finite
    if reason := needs_own_keys(p):
        if p.scale > 1:
            raise UnsupportedError(reason)
        sides = _masked(p, p.q, Pool(p.k, p.v, None, p.token_bias), p.seen_tokens())
        queries, scores = _by_blocks(p)
    else:
        sides = _causal(p) if p.is_causal else _masked(p, *one_sided(p))
        queries, scores = sides.queries, _scores(p, sides)
    weights = _normalized(p, queries, scores, sides)
    weights = weights if finite else dropout(weights, p.dropout_p)
    if sides.running is None:
        out = weights @ sides.values
    else:
        own = weights.where(sides.running.place, 0.0).sum(-1, keepdim=True)
        out = weights.masked_fill(sides.running.place, 0.0) @ sides.values + own * sides.running.values
    if finite:  # as in the re-associated form, which has no weights
        out = dropout(out, p.dropout_p)
    return out, _over_tokens(p, weights) if p.need_weights else None


def _masked(p: Problem, queries: Tensor, points: Pool, seen: Tensor | None) -> Sides:
    """The same points for every query, but for what a mask or a pattern hides."""
    pattern = visible(p)
    if pattern is not None:
        seen = pattern[None, None] if seen is None else seen & pattern
    return Sides(queries, points.keys, points.values, seen, bias_of(p, points, seen))


def _causal(p: Problem) -> Sides:
    """The complete windows before each query's own, and its own as far as the query."""
    placed, points = one_sided_causal(p)
    prefix = placed.prefix.shape[2]
    queries = placed.of_problem(torch.cat([placed.prefix, placed.rows.flatten(2, 3)], dim=2), p)
    complete = _after_prefix(points, lambda x: x[:, :, :, -1])
    index = torch.arange(p.query_offset, p.query_offset + p.q.shape[2], device=p.q.device)
    column = index.where(index < prefix, prefix + (index - prefix) // p.scale)[:, None]
    windows = torch.arange(complete.keys.shape[2], device=p.q.device)
    seen, place = (windows <= column)[None, None], windows == column  # [L, W]
    bias = None if complete.bias is None else complete.bias.unsqueeze(2)
    running = None
    if p.scale > 1:
        own = _of_queries(p, _after_prefix(points, lambda x: x.flatten(2, 3)))
        running = Running(own.keys, own.values, place)
        if own.bias is not None and bias is not None:
            bias = own.bias.unsqueeze(3).where(place, bias)
    else:
        own = _of_queries(p, complete)
    if own.seen is not None and complete.seen is not None:
        seen = seen & own.seen.unsqueeze(3).where(place, complete.seen.unsqueeze(2))
    pattern = visible(p)
    if pattern is not None:
        seen = seen & fit_length(pattern[None, None].transpose(2, 3), windows.shape[0]).transpose(2, 3)
    if form_of(p.primal).distance:
        added = positions.added(p, _places(p, place), seen)
        bias = added if bias is None else bias + added
    return Sides(queries, complete.keys, complete.values, seen, bias, running)


def _places(p: Problem, place: Tensor) -> Tensor:
    """Where the complete windows stand, and in the column of each query's own its running mean: [B or 1, 1, L, W]."""
    points = positions.of_windows(p)
    complete = _after_prefix(points, lambda x: x[:, :, :, -1]).keys.squeeze(-1)
    if p.scale == 1:
        return complete.unsqueeze(2)
    own = _of_queries(p, _after_prefix(points, lambda x: x.flatten(2, 3))).keys
    return own.where(place, complete.unsqueeze(2))


def _of_queries(p: Problem, tokens: Pool) -> Pool:
    """What stands where the queries stand, of what there is for every token."""

    def cut(x: Tensor | None) -> Tensor | None:
        return x if x is None else fit_length(x[:, :, p.query_offset :] if p.query_offset else x, p.q.shape[2])

    keys, values = cut(tokens.keys), cut(tokens.values)
    assert keys is not None and values is not None
    return Pool(keys, values, cut(tokens.seen), cut(tokens.bias))


def _after_prefix(points: CausalPool, of: Callable[[Tensor], Tensor]) -> Pool:
    """The unpooled tokens, and after them what is taken of the windows [B, H, W, s, ...]."""

    def both(head: Tensor | None, windows: Tensor | None) -> Tensor | None:
        return None if head is None or windows is None else torch.cat([head, of(windows)], dim=2)

    head = points.prefix
    keys, values = both(head.keys, points.keys), both(head.values, points.values)
    assert keys is not None and values is not None
    return Pool(keys, values, both(head.seen, points.seen), both(head.bias, points.bias))


def _scores(p: Problem, sides: Sides) -> Tensor:
    """log κ(Tq_i, Tk_j), or for a finite Φ the kernel itself: [B, H, L, W]."""
    scores = _kernel(p, sides.queries, sides.keys)
    if sides.running is None:
        return scores
    own = _kernel(p, sides.queries.unsqueeze(3), sides.running.keys.unsqueeze(3)).squeeze(4)  # [B, H, L, 1]
    return own.where(sides.running.place, scores)


def _kernel(p: Problem, x: Tensor, y: Tensor) -> Tensor:
    features = p.primal.features
    if p.relative_scale != 1.0:
        x, y = x * math.sqrt(p.relative_scale), y * math.sqrt(p.relative_scale)
    if _logarithmic(p):
        assert isinstance(features, LogKernel)
        return features.log_kernel(x, y)
    return features.kernel(x, y, p.parameters)


def _logarithmic(p: Problem) -> bool:
    """Whether scores are log κ, of a kernel that is known here; of `Laplace`, what positions add is a bias."""
    return kernel_of(p.primal.features) in ("exponential", "gaussian") or form_of(p.primal).distance


def _by_blocks(p: Problem) -> tuple[Tensor, Tensor]:
    """Mapped queries, and their scores with keys that are mapped for each of them."""
    rows = max(1, p.q.shape[2] // p.q.shape[3])  # queries × keys × channels is then no more than all scores
    parts, seen = [], p.seen_tokens().expand(-1, -1, p.q.shape[2], -1)
    for block in zip(p.q.split(rows, dim=2), seen.split(rows, dim=2), strict=True):
        if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            parts.append(checkpoint(_block, p, *block, use_reentrant=False))
        else:
            parts.append(_block(p, *block))
    queries, scores = zip(*parts, strict=True)
    return torch.cat(queries, dim=2), torch.cat(scores, dim=2)


def _block(p: Problem, queries: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    x, keys = queries.unsqueeze(3), p.k.unsqueeze(2)
    for map_ in p.primal.point_maps:
        if keys.shape[2] == 1:  # still the same for all queries
            found = Moments(*(m if m is None else m.unsqueeze(3) for m in masked_moments(map_, keys.squeeze(2), seen)))
        else:
            found = moments(map_, keys, seen)
        x, keys = map_.apply(x, found, p.parameters), map_.apply(keys, found, p.parameters)
    return x.squeeze(3), _kernel(p, x, keys).squeeze(3)


def _normalized(p: Problem, queries: Tensor, scores: Tensor, sides: Sides) -> Tensor:
    """κ(Tq_i, Tk_j) / h(Tq_i): [B, H, L, W]."""
    exponential = _logarithmic(p)
    if sides.bias is not None:
        bias = sides.bias.to(scores.dtype)
        if p.log_weights is not None and not exponential:
            bias = relative(bias, sides.seen)
        scores = scores + bias if exponential else scores * bias.exp()
    empty = None if sides.seen is None else ~sides.seen.any(-1, keepdim=True)
    if exponential and form_of(p.primal).kernel_sum:
        if sides.seen is None or empty is None:
            return scores.softmax(-1)
        # a row that sees nothing may see everything: its weights are thrown away
        return scores.masked_fill(~(sides.seen | empty), -torch.inf).softmax(-1).masked_fill(empty, 0.0)
    if exponential and has_sink(p.primal.normalizer):
        return _beside_sink(scores, sides.seen, empty, p.primal.normalizer.log_sink(scores, p.parameters))
    kernel = scores.exp() if exponential else scores
    if sides.seen is None or empty is None:
        return kernel / p.primal.normalizer.at(queries, kernel.sum(-1, keepdim=True), p.parameters)
    kernel = kernel.where(sides.seen, 0.0)
    kernel_sum = kernel.sum(-1, keepdim=True).masked_fill(empty, 1.0)  # before h, whose slope at 0 may be infinite
    return kernel / p.primal.normalizer.at(queries, kernel_sum, p.parameters).masked_fill(empty, 1.0)


def _beside_sink(scores: Tensor, seen: Tensor | None, empty: Tensor | None, log_sink: Tensor) -> Tensor:
    """Weights of the keys beside a sink, which every query sees."""
    if seen is not None and empty is not None:
        scores = scores.masked_fill(~(seen | empty), -torch.inf)
    log_h = torch.logaddexp(scores.logsumexp(-1, keepdim=True), log_sink.to(scores.dtype))
    weights = (scores - log_h).exp()
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def _over_tokens(p: Problem, weights: Tensor) -> Tensor:
    """A window's weight is shared by its tokens, as far as the query sees them: [B, H, L, W] to [B, H, L, S].

    Where weights are repeated, each of them has the whole.
    """
    pooled, tokens, device = pooling_of(p.primal.training_set), p.k.shape[2], p.q.device
    if pooled is None or p.scale == 1:
        return fit_length(weights.transpose(2, 3), tokens).transpose(2, 3)
    seen = p.seen_tokens()  # [B or 1, 1, L or 1, S]
    if pooled.how == "kmeans":
        share = pooled.reduce(p.k, p.v, seen, p.scale, p.parameters).share
        assert share is not None
        share = share.squeeze(2)
        return weights @ ((share > 0).to(weights.dtype) if p.repeat_weights else share)
    window, _ = pooled.window(torch.arange(tokens, device=device), p.scale, tokens)
    window = window.clamp(max=weights.shape[3] - 1)  # those after the last query's are seen by none
    if not p.repeat_weights:
        votes = seen.to(weights.dtype)
        count = votes.new_zeros(*votes.shape[:3], weights.shape[3]).index_add(3, window, votes)
        weights = weights / count.clamp(min=1)
    return weights.index_select(3, window).where(seen, 0.0)
