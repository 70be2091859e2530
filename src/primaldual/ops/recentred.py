"""Re-centred softmax heads over all tokens, on cuDNN's kernels: each way two passes over memory more than softmax."""

from __future__ import annotations

from torch import Tensor

from ..dual import Rewrite, RowConstantsCancel, beta_of, form_of
from ..kernels.cudnn import attention as cudnn
from ..kernels.cudnn.recentred import RecentredAttention
from .problem import Problem, require, with_usual_scale


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    p, form = problem, form_of(problem.primal)
    if not form.softmax or form.maps != "recentring" or form.points != "tokens" or form.subset != "all":
        return "these are not softmax heads over all tokens with a re-centring and nothing else"
    if form.weighted:
        return "it has no bias on keys, which weights of points are"
    if p.is_causal or p.key_hidden is not None or p.attn_hidden is not None:
        return "it has no form for masks"
    if p.need_weights:
        return "fused attention does not return weights"
    return cudnn.refusal(p.q, p.k, p.v, p.dropout_p)


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (RowConstantsCancel,)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    p = with_usual_scale(problem)
    require(p.expansion, RowConstantsCancel)
    factor, per_head = beta_of(p.primal.point_maps[0], p.parameters)
    per_head = None if per_head is None else per_head.float()
    return RecentredAttention.apply(p.q, p.k, p.v, per_head, factor, p.dropout_p), None
