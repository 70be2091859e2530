"""torch's fused attention, one call per distinct key length.

Softmax heads only: κ exponential, h the kernel sum. The last input map is applied to the queries alone, since row
constants cancel. A causal head pooled by s sees, at place t of its window, the complete windows before it and one
running mean: for each t that is an ordinary attention over 2⌈N/s⌉ keys, and the s of them run as one batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from ..dual import GroupHeadsByScale, Rewrite, RowConstantsCancel, derive, form_of
from ..kernels.cudnn import attention as cudnn
from ..primal import Exponential, KernelSum, Moments, PointMap
from .pooling import CausalPool, Pool, causal_pool, fit_length, in_blocks, pool
from .pooling import visible as visible_of
from .problem import Problem
from .statistics import causal_moments, centre, first_key, masked_moments, moments, several

_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    primal, form = problem.primal, form_of(problem.primal)
    if type(primal.features) is not Exponential:
        return f"fused attention has the exponential kernel, not that of {primal.features!r}"
    if type(primal.normalizer) is not KernelSum:
        return f"fused attention divides by the kernel sum, not by {primal.normalizer!r}"
    if problem.need_weights:
        return "fused attention does not return weights"
    per_query = problem.is_causal or problem.attn_hidden is not None
    if per_query and form.points == "own":
        return f"only {primal.training_set!r} knows its points where every query has its own keys"
    return needs_own_keys(problem)


def needs_own_keys(problem: Problem) -> str | None:
    """Why each query would need keys of its own; None where all can share them."""
    if not problem.is_causal and problem.attn_hidden is None:
        return None
    for map_ in derive(problem.primal, one_sided_rewrites(problem)).maps:
        if map_.needs != "nothing":
            where = "" if form_of(problem.primal).softmax else " under softmax"
            return f"{map_!r} is not the last input map{where}, so each query would need its own keys"
    return None


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (*one_sided_rewrites(problem), GroupHeadsByScale)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    return problem.by_group(lambda p: ((_causal if p.is_causal else _attend)(p), None))


def one_sided_rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """Where the last input map can be one of the queries alone, in the problem's dtype.

    1/(σ² + ε) leaves float16's range where a feature is nearly constant; its root, on both sides, does not.
    """
    maps = problem.primal.point_maps
    overflows = problem.q.dtype == torch.float16 and maps and maps[-1].needs == "variance"
    return () if overflows else (RowConstantsCancel,)


def one_sided(p: Problem) -> tuple[Tensor, Pool, Tensor | None]:
    """Mapped queries, mapped points, and `take` [B, H or 1, L or 1, W]: what masks leave of them (None: everything)."""
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
    return q, points._replace(keys=keys), take


def _far(last: PointMap, keys: Tensor) -> bool:
    """Whether keys are to be brought near 0, which cancels, before they are scored.

    Where they lie far from it, what a mapped query makes of that is large, and what its rounding leaves of the rest is
    little; 1/σ² magnifies it. In 16 bits the keys themselves are as coarse as that.
    """
    return last.needs == "variance" or (last.needs == "mean" and keys.dtype.itemsize > 2)


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
    return CausalQueries(first, rest, skipped, start), points


def _attend(p: Problem) -> Tensor:
    q, points, take = one_sided(p)
    visible = visible_of(p)
    if visible is not None:
        take = visible[None, None] if take is None else take & visible
    bias = None if points.bias is None else points.bias.unsqueeze(2)
    if p.attn_bias is not None:
        bias = p.attn_bias if bias is None else bias + p.attn_bias
    return _keep_nan(fused(q, points.keys, points.values, take, bias, p.dropout_p, p.score_scale), q, p)


def _keep_nan(out: Tensor, q: Tensor, p: Problem) -> Tensor:
    """A key that is not a number makes the statistics so, and with them every mapped query and its output.

    torch's kernel for CPUs gives zeros for such a query where there are fewer than 16 keys.
    """
    if q.device.type != "cpu" or p.expansion.query_map is None:
        return out
    return out.masked_fill(q.isnan().any(-1, keepdim=True), torch.nan)


def _causal(p: Problem) -> Tensor:
    queries, points = one_sided_causal(p)
    prefix, windows = queries.prefix.shape[2], points.keys.shape[2]
    visible = visible_of(p, queries.start)
    if visible is not None:
        visible = fit_length(visible[None, None].transpose(2, 3), prefix + windows).transpose(2, 3)[0, 0]  # [·, P + W]
    out = _by_place(queries, points, visible, p.dropout_p, p.score_scale)
    if not prefix:
        return _keep_nan(queries.of_problem(out, p), queries.of_problem(queries.rows.flatten(2, 3), p), p)
    head = points.prefix
    take = torch.ones(prefix, prefix, dtype=torch.bool, device=p.q.device).tril()[None, None]
    take = take if head.seen is None else take & head.seen.unsqueeze(2)
    take = take if visible is None else take & visible[:prefix, :prefix]
    bias = None if head.bias is None else head.bias.unsqueeze(2)
    alone = fused(queries.prefix, head.keys, head.values, take, bias, p.dropout_p, p.score_scale)
    mapped = torch.cat([queries.prefix, queries.rows.flatten(2, 3)], dim=2)
    return _keep_nan(queries.of_problem(torch.cat([alone, out], dim=2), p), queries.of_problem(mapped, p), p)


def _by_place(
    queries: CausalQueries, points: CausalPool, visible: Tensor | None, dropout_p: float, scores: float | None
) -> Tensor:
    """Outputs [B, H, (W − skipped)·s, Dv]: places fold into the batch."""
    q, skipped = queries.rows, queries.skipped
    batch, _, rows, scale, _ = q.shape
    windows, prefix = points.keys.shape[2], points.prefix.keys.shape[2]
    if scale == 1:
        return _tokens(queries, points, visible, dropout_p, scores)

    def by_place(x: Tensor) -> Tensor:  # [B, H, W, s, ...] to [B·s, H, W, ...]
        return x.movedim(3, 1).flatten(0, 1)

    def keys_of(head: Tensor, running: Tensor) -> Tensor:  # prefix, complete windows, running means
        complete = torch.cat([head.expand(*running.shape[:2], *head.shape[2:]), running[:, :, :, -1]], dim=2)
        shared = complete.unsqueeze(1).expand(-1, scale, *complete.shape[1:]).flatten(0, 1)
        return torch.cat([shared, by_place(running)], dim=2)

    earlier = torch.ones(rows, windows, dtype=torch.bool, device=q.device).tril(skipped - 1)
    own = torch.eye(windows, dtype=torch.bool, device=q.device)[skipped:]
    take = torch.cat([own.new_ones(rows, prefix), earlier, own], dim=1)[None]  # [1, rows, P + 2W]
    if visible is not None:  # [·, P + W] to [s, rows, P + W]; a query's own window is the running one
        shown = fit_length(visible[None, None, prefix:], rows * scale)[0, 0].unflatten(0, (rows, scale))
        shown = shown.transpose(0, 1)
        take = take & torch.cat([shown, shown[:, :, prefix:]], dim=2)
    take = take.expand(scale, -1, -1).repeat(batch, 1, 1).unsqueeze(1)  # [B·s, 1, rows, P + 2W]
    if points.seen is not None:
        assert points.prefix.seen is not None
        head_seen, running_seen = (
            x.unsqueeze(-1).expand(batch, *x.shape[1:], -1) for x in (points.prefix.seen, points.seen)
        )
        take = take & keys_of(head_seen, running_seen).squeeze(-1).unsqueeze(2)
    bias = None
    if points.bias is not None:
        assert points.prefix.bias is not None
        head_bias, running_bias = points.prefix.bias.unsqueeze(-1), points.bias.unsqueeze(-1)
        bias = keys_of(head_bias, running_bias).squeeze(-1).unsqueeze(2)
    keys, values = keys_of(points.prefix.keys, points.keys), keys_of(points.prefix.values, points.values)
    out = fused(by_place(q), keys, values, take, bias, dropout_p, scores)
    return out.unflatten(0, (batch, scale)).movedim(1, 3).flatten(2, 3)


def _tokens(
    queries: CausalQueries, points: CausalPool, visible: Tensor | None, dropout_p: float, scores: float | None
) -> Tensor:
    """Plain causal attention: every window is one token."""
    q, keys, values = (x.squeeze(3) for x in (queries.rows, points.keys, points.values))
    if points.seen is None and points.bias is None and visible is None:
        if not queries.skipped:
            return _fused(q, keys, values, dropout_p=dropout_p, is_causal=True, scale=scores)
        if q.shape[2] == 1:  # a step of decoding sees every key
            return fused(q, keys, values, None, None, dropout_p, scores)
    take = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device).tril(queries.skipped)[None, None]
    take = take if points.seen is None else take & points.seen.squeeze(3).unsqueeze(2)
    take = take if visible is None else take & visible
    bias = None if points.bias is None else points.bias.squeeze(3).unsqueeze(2)
    return fused(q, keys, values, take, bias, dropout_p, scores)


def fused(
    q: Tensor, k: Tensor, v: Tensor, take: Tensor | None, bias: Tensor | None, dropout_p: float, scale: float | None
) -> Tensor:
    """scaled_dot_product_attention, with zeros and zero gradients where a row sees no key. `take` keeps where True."""
    if take is None:
        mask = None if bias is None else bias.to(q.dtype)
        return _fused(q, k, v, attn_mask=_full(mask, q, k), dropout_p=dropout_p, scale=scale)
    empty = ~take.any(-1, keepdim=True)
    mask = take | empty  # such a row may see everything: its output is thrown away
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
    elif q.is_cuda:
        mask = _additive(mask, q)
    out = _fused(q, k, v, attn_mask=_full(mask, q, k), dropout_p=dropout_p, scale=scale)
    return out.masked_fill(empty, 0.0)


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """scaled_dot_product_attention, past what is wrong with cuDNN's backward pass.

    torch keeps its plan by the strides of q, k and v, although the plan holds those of the gradient too: of two calls
    that differ in them alone, the second would read memory that is not its own. So the gradient is made to come in as
    the output lies in memory. And some calls are left to others (`cudnn.left_to_others`).
    """
    masked, dropout_p = options.get("attn_mask") is not None, options.get("dropout_p", 0.0)
    others = cudnn.left_to_others(q, k, v, masked, dropout_p)
    with sdpa_kernel(_NOT_CUDNN) if others else nullcontext():
        out = scaled_dot_product_attention(q, k, v, **options)
    if (
        out.is_cuda
        and out.requires_grad
        and not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    ):
        out.register_hook(partial(_laid_out, out.stride()))
    return out


def _laid_out(strides: tuple[int, ...], x: Tensor) -> Tensor:
    return (
        x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    )


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    """0 and −inf at q's dtype, rows 16 bytes apart: torch takes it as it is, one for all heads, and makes no copy."""
    columns = mask.shape[-1]
    wide = pad(mask, (0, -columns % 8)) if columns % 8 else mask
    return torch.where(wide, q.new_zeros(()), -torch.inf)[..., :columns]


def _full(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:2], q.shape[2], k.shape[2])
