"""What executors of softmax heads share: which heads these are, and queries mapped on one side over keys of all.

κ is exponential and h the kernel sum. The last input map is applied to the queries alone, since row constants cancel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..dual import Rewrite, RowConstantsCancel, derive, form_of
from ..dual.form import has_sink, kernel_of
from ..primal import Gaussian, Moments, PointMap
from . import positions
from .pooling import CausalPool, Pool, causal_pool, fit_length, in_blocks, pool
from .problem import Problem, UnsupportedError
from .statistics import causal_moments, centre, first_key, masked_moments, moments, several


def refusal(
    problem: Problem, who: str, *, sinks: bool = False, biases: bool = False, distances: bool = False
) -> str | None:
    """Why an executor of softmax heads, which the reason begins with, cannot compute the problem; None when it can.

    With `sinks` it takes a constant in h, too; with `biases` what is a bias on keys through which gradients flow; with
    `distances` what `Laplace` adds to the scores.
    """
    primal, form = problem.primal, form_of(problem.primal)
    biased = biases and kernel_of(primal.features) == "gaussian"
    if kernel_of(primal.features) != "exponential" and not biased and not (distances and form.distance):
        return f"{who} has the exponential kernel, not that of {primal.features!r}"
    if form.weighted and not biases:
        return f"{who} has no gradient for a bias on keys, which {primal.weights!r} is"
    if not (form.kernel_sum or (sinks and form.sink and not biased and not form.distance)):
        return f"{who} divides by the kernel sum, not by {primal.normalizer!r}"
    if problem.need_weights:
        return f"{who} does not return weights"
    per_query = problem.is_causal or problem.attn_hidden is not None
    if per_query and form.points == "own":
        return f"only {primal.training_set!r} knows its points where every query has its own keys"
    return would_need_own_keys(problem)


def would_need_own_keys(problem: Problem) -> str | None:
    """`needs_own_keys` of a problem that is still as it is written, were it rewritten as it can be."""
    if not problem.is_causal and problem.attn_hidden is None:
        return None
    return needs_own_keys(replace(problem, expansion=derive(problem.primal, one_sided_rewrites(problem))))


def needs_own_keys(problem: Problem) -> str | None:
    """Why each query needs keys of its own, as the problem's expansion is; None where all can share them."""
    if not problem.is_causal and problem.attn_hidden is None:
        return None
    for map_ in problem.expansion.maps:
        if map_.needs != "nothing":
            where = "" if form_of(problem.primal).cancels else " under softmax"
            return f"{map_!r} is not the last input map{where}, so each query would need its own keys"
    return None


def one_sided_rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """Where the last input map can be one of the queries alone, in the problem's dtype.

    1/(σ² + ε) leaves float16's range where a feature is nearly constant; its root, on both sides, does not.
    """
    maps = problem.primal.point_maps
    overflows = problem.q.dtype == torch.float16 and maps and maps[-1].needs == "variance"
    return () if overflows else (RowConstantsCancel,)


def one_sided(p: Problem) -> tuple[Tensor, Pool, Tensor | None]:
    """Mapped queries, mapped points, and `take` [B, H or 1, L or 1, W]: what masks leave of them (None: everything)."""
    if p.attn_hidden is not None:
        _check_keys_are_shared(p)
    points = pool(p)
    q, keys = p.q, points.keys
    take = None if points.seen is None else points.seen.unsqueeze(2)
    if p.attn_hidden is not None:
        take = ~p.attn_hidden if take is None else take & ~p.attn_hidden
    for map_ in p.expansion.maps:
        found = moments(map_, keys, points.seen)
        q, keys = map_.apply(q, found, p.parameters), map_.apply(keys, found, p.parameters)
    if (last := p.expansion.query_map) is not None:
        if p.attn_hidden is None:
            found = moments(last, keys, points.seen)
        else:
            assert take is not None
            found = masked_moments(last, keys, take)
            if found.variance is not None:  # as in `causal_moments`
                found = found._replace(variance=several(take.sum(-1, keepdim=True), found.variance))
        q = RowConstantsCancel.query(q, last, found, p.parameters)
        if _far(last, keys):
            keys = keys - centre(keys, take)  # cancels
    if p.expansion.biased_by_norms:
        q, points = _shorter(p, q), points._replace(bias=_with_norms(p, keys, points.bias))
    return q, points._replace(keys=keys), take


def _shorter(p: Problem, q: Tensor) -> Tensor:
    """Queries of a Gaussian kernel, whose products with keys are over b²."""
    assert isinstance(p.primal.features, Gaussian)
    bandwidth = p.primal.features.bandwidth
    return q if bandwidth == 1 else q / bandwidth**2


def _with_norms(p: Problem, keys: Tensor, bias: Tensor | None) -> Tensor:
    """The bias of keys, and that of their length."""
    assert isinstance(p.primal.features, Gaussian)
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    norms = wide.square().sum(-1) * (-0.5 * p.relative_scale * p.primal.features.factor(keys.shape[-1]))
    return norms if bias is None else norms + bias


def _check_keys_are_shared(p: Problem) -> None:
    if reason := needs_own_keys(p):
        raise UnsupportedError(reason)


def _far(last: PointMap, keys: Tensor) -> bool:
    """Whether keys are to be brought near 0, which cancels, before they are scored.

    Where they lie far from it, what a mapped query makes of that is large, and what its rounding leaves of the rest is
    little; 1/σ² magnifies it. In 16 bits the keys themselves are as coarse as that.
    """
    return last.needs == "variance" or (last.needs == "mean" and keys.dtype.itemsize > 2)


def sink_of(p: Problem) -> Tensor | None:
    """log c of a sink c, [1 or H, 1, 1]; None where h has none."""
    normalizer = p.primal.normalizer
    return normalizer.log_sink(p.q, p.parameters) if has_sink(normalizer) else None


def bias_of(p: Problem, points: Pool, take: Tensor | None) -> Tensor | None:
    """What is added to the scores, [B or 1, H or 1, L or 1, W]: of the points, of the mask, and of distances.

    `take` [B or 1, H or 1, L or 1, W] is what each query sees of the points; None where that is all.
    """
    found = None if points.bias is None else points.bias.unsqueeze(2)
    if p.attn_bias is not None:
        found = p.attn_bias if found is None else found + p.attn_bias
    if form_of(p.primal).distance:
        distances = positions.added(p, positions.of_points(p), take)
        found = distances if found is None else found + distances
    return found


class CausalQueries(NamedTuple):
    """Mapped queries in the windows they stand in; those before the first query of the problem hold nothing."""

    prefix: Tensor  # [B, H, P, D]
    rows: Tensor  # [B, H, W − skipped, s, D]
    skipped: int  # windows before these
    start: int  # the token at which prefix and rows begin; the problem's first query may come later

    def of_problem(self, x: Tensor, p: Problem) -> Tensor:
        """Of what was computed for every token from `start` on: the problem's queries."""
        before = p.query_offset - self.start
        return fit_length(x[:, :, before:] if before else x, p.q.shape[2])


def one_sided_causal(p: Problem) -> tuple[CausalQueries, CausalPool]:
    """Mapped queries and mapped points."""
    _check_keys_are_shared(p)
    points = causal_pool(p)
    prefix, windows, scale = points.prefix.keys.shape[2], points.keys.shape[2], p.scale
    skipped = 0 if prefix else p.query_offset // scale
    start = skipped * scale
    q = pad(p.q, (0, 0, p.query_offset - start, 0)) if p.query_offset > start else p.q
    first, rest = q[:, :, :prefix], in_blocks(q[:, :, prefix:], windows - skipped, scale)
    none = Moments(None, None)
    for map_ in p.expansion.maps:  # these need no statistics
        first, rest, head_keys, keys = (
            map_.apply(x, none, p.parameters) for x in (first, rest, points.prefix.keys, points.keys)
        )
        points = points._replace(keys=keys, prefix=points.prefix._replace(keys=head_keys))
    if (last := p.expansion.query_map) is not None:
        of_first, of_rest = causal_moments(last, points)
        if skipped:
            of_rest = Moments(*(x if x is None else x[:, :, skipped:] for x in of_rest))
        first = RowConstantsCancel.query(first, last, of_first, p.parameters)
        rest = RowConstantsCancel.query(rest, last, of_rest, p.parameters)
        if _far(last, points.keys):
            origin = first_key(points)
            head = points.prefix._replace(keys=points.prefix.keys - origin)
            points = points._replace(prefix=head, keys=points.keys - origin.unsqueeze(3))
    if p.expansion.biased_by_norms:
        first, rest, head = _shorter(p, first), _shorter(p, rest), points.prefix
        head = head._replace(bias=_with_norms(p, head.keys, head.bias))
        points = points._replace(prefix=head, bias=_with_norms(p, points.keys, points.bias))
    return CausalQueries(first, rest, skipped, start), points
