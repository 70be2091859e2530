"""Scaled softmax heads over long sequences: our kernel forward, and on the way back cuDNN's beside ours.

Causal heads over the tokens themselves go through cuDNN's both ways, and those over windows through ours.
"""

from __future__ import annotations

from torch import Tensor

from ..dual import GroupHeadsByScale, Rewrite, RowConstantsCancel, beta_of, form_of
from ..kernels.cudnn import attention as cudnn
from ..kernels.cudnn import beside, causal
from ..kernels.ragged import limits
from .problem import Problem, query_map_alone, require, with_usual_scale


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can.

    It takes whole windows of all tokens, at two or more scales, with at most a re-centring.
    """
    p, form = problem, form_of(problem.primal)
    if not form.simple or form.points != "windows" or form.subset != "all":
        return "these are not softmax heads over plain windows of all tokens, with at most a re-centring"
    if p.key_hidden is not None or p.attn_hidden is not None or p.key_bias is not None:
        return "it has no form for masks"
    if p.need_weights:
        return "fused attention does not return weights"
    if p.dropout_p:
        return "what cuDNN drops is drawn inside it, where our forward pass cannot look"
    groups, tokens = GroupHeadsByScale.groups(p.scales), p.k.shape[2]
    if len(groups) < 2 or [h for _, heads in groups for h in heads] != list(range(p.q.shape[1])):
        return "heads of one scale do not stand side by side, or there is one scale alone"
    if p.is_causal:
        if reason := _causal_refusal(p):
            return reason
        return None if cudnn.usable(p.q, p.k, p.v) else "cuDNN's attention does not take these tensors"
    if any(tokens % scale for scale, _ in groups):
        return f"the windows do not divide {tokens} tokens"
    if not any(beside.long(p.q.shape[2], tokens // scale, p.q.shape[3]) for scale, _ in groups):
        return "no head is long enough for cuDNN's kernels to be the faster ones"
    return None if cudnn.usable(p.q, p.k, p.v) else "cuDNN's attention does not take these tensors"


def _causal_refusal(p: Problem) -> str | None:
    queries, tokens, first = p.q.shape[2], p.k.shape[2], min(p.scales)
    if p.primal.point_maps:
        return "causal heads that are re-centred have a mean for each query"
    if queries != tokens or p.query_offset:
        return "causal heads need as many queries as keys"
    if first > 1:
        return "no causal head is over the tokens themselves"
    if not limits.takes_running_means(p.scales, queries, tokens):
        return f"our kernel makes no running means of windows of {max(p.scales)} tokens"
    if queries < causal.QUERIES or p.q.shape[3] <= beside.NARROW or cudnn.wrong_gradients(tokens):
        return f"cuDNN's kernels are not the faster ones, or not right, for {tokens} tokens of {p.q.shape[3]} channels"
    return None


def long_groups(p: Problem) -> int:
    """How many groups of heads go back through cuDNN's kernels."""
    if p.is_causal:
        return int(1 in p.scales)
    groups, tokens = GroupHeadsByScale.groups(p.scales), p.k.shape[2]
    return sum(beside.long(p.q.shape[2], tokens // scale, p.q.shape[3]) for scale, _ in groups)


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (RowConstantsCancel, GroupHeadsByScale)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    p = with_usual_scale(problem)
    require(p.expansion, GroupHeadsByScale)
    if p.is_causal:
        return causal.CausalTokens.apply(p.q, p.k, p.v, p.scales), None
    beta, factor = None, 0.0
    if (map_ := query_map_alone(p.expansion)) is not None:
        factor, per_head = beta_of(map_, p.parameters)
        beta = None if per_head is None else per_head.float()
    return beside.Tokens.apply(p.q, p.k, p.v, beta, factor, p.scales), None
