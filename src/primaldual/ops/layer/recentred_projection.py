"""Queries come out of the projection already re-centred; what is left is softmax attention (`RowConstantsCancel`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dual import Expansion, Rewrite, RowConstantsCancel, beta_of
from ...kernels.cudnn import attention as cudnn
from ...kernels.native import layers as compiled
from ...kernels.native import library as native
from ...kernels.projection.recentred import RecentredProjection, wide
from ...kernels.ragged import limits
from ...primal import Primal
from .._attention import attention
from ..estimates import Estimate
from ..plan import Plan
from ..problem import require
from .costs import attention_plan, estimate_of, in_one_call, one_after_another, products
from .problem import LayerProblem, no_projection_kernel, packed, queries_differ

CUDNN_LAUNCHES = 20
"""Launches whose time the compiled part loses to cuDNN's attention, eager.

Batch 8, 8 heads of 64, forward and backward:
1.08 to 1.19 ms at 2048 tokens where `unpooled` takes 0.94 to 1.06; 2.79 to 2.84 at 4096 where it takes 3.00 to 3.13."""


def refusal(p: LayerProblem) -> str | None:
    """Why this route cannot compute the problem; None where it can."""
    form = p.form
    if not form.softmax or form.maps != "recentring" or form.token_maps:
        return "the heads are not softmax heads with a re-centring and nothing else"
    if form.weighted:
        return "it has no bias on keys, which weights of points are"
    if form.points != "tokens" or form.subset != "all":
        return "the heads are not fitted to all keys"
    if p.layer.impl == "reference":
        return "the reference maps queries and keys"
    return queries_differ(p) or no_projection_kernel(p)


def rewrites(p: LayerProblem) -> tuple[type[Rewrite], ...]:
    """The identities that this route makes use of."""
    return (RowConstantsCancel,)


def inner(p: LayerProblem) -> tuple[Plan, ...]:
    """The plan of the softmax attention inside."""
    return (attention_plan(p, Primal(), p.layer.num_heads, p.x.shape[1], p.executor),)


def run(p: LayerProblem, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim]; no weights."""
    require(expansion, RowConstantsCancel)
    if _runs_compiled(p):
        x, weight, bias = packed(p)
        factor, beta = beta_of(p.primal.point_maps[0], p.parameters)
        found = compiled.attend_by_cudnn(x, weight, bias, p.layer.num_heads, factor, beta)
        if found is not None:
            return found, None
    q, k, v = project(p)
    out = attention(q, k, v, Primal(), key_padding_mask=p.padding, dropout_p=p.dropout_p, impl=p.executor)
    assert isinstance(out, Tensor)
    return out, None


def estimate(p: LayerProblem) -> Estimate:
    """One product, the mean of the inputs, a shift of the queries; back, what goes through the mean is added to dk."""
    tokens, columns = p.x.shape[1:]
    projections = products(
        p, [(tokens, 3 * columns)], 3, 6 + CUDNN_LAUNCHES * _runs_compiled(p), passes=7.0 if p.trains else 3.0
    )
    found = one_after_another(projections, *(estimate_of(plan) for plan in inner(p)))
    return in_one_call(p, found) if _runs_compiled(p) else found


def project(p: LayerProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Re-centred queries, keys and values [N, heads, L, head_dim]."""
    x, weight, bias = packed(p)
    factor, learned = beta_of(p.primal.point_maps[0], p.parameters)
    share = None
    if p.padding is not None:
        seen = p.padding.logical_not() if p.padding.dtype == torch.bool else p.padding != -torch.inf
        share = seen.to(wide(x)) / seen.sum(1, keepdim=True).clamp(min=1)
    return RecentredProjection.apply(x, weight, bias, learned, share, factor, p.layer.num_heads)


def _runs_compiled(p: LayerProblem) -> bool:
    """Whether the compiled part does all of it, with cuDNN's attention."""
    dim = p.layer.head_dim
    return (
        p.padding is None and not p.dropout_p and p.executor in ("auto", "sdpa")
        and p.dtype.itemsize == 2 and limits.refusal(p.dtype, p.x.device, dim, dim) is None
        and not p.captured and native.library() is not None and not cudnn.wrong_gradients(p.x.shape[1])
    )  # fmt: skip
