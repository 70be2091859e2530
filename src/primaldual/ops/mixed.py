"""Scaled softmax heads over long sequences: our kernel forward, and on the way back cuDNN's beside ours."""

from __future__ import annotations

from torch import Tensor

from ..dual import GroupHeadsByScale, beta_of, form_of
from ..kernels.cudnn import attention as cudnn
from ..kernels.cudnn import beside
from .problem import Problem


def applies(p: Problem) -> bool:
    """Whether some of the heads are long, and cuDNN takes them."""
    return long_groups(p) > 0 and cudnn.usable(p.q, p.k, p.v)


def long_groups(p: Problem) -> int:
    """How many groups of heads go back through cuDNN's kernels, on a GPU.

    None unless they are whole windows of all tokens, at two or more scales, with at most a re-centring. And none with
    dropout: what cuDNN drops is drawn inside it, where our forward pass cannot look.
    """
    if p.is_causal or p.key_hidden is not None or p.attn_hidden is not None or p.dropout_p or p.q.dtype.itemsize != 2:
        return 0
    form = form_of(p.primal)
    groups, tokens = GroupHeadsByScale.groups(p.scales), p.k.shape[2]
    if len(groups) < 2 or not form.simple or form.points != "windows" or form.subset != "all":
        return 0
    in_line = [h for _, heads in groups for h in heads] == list(range(p.q.shape[1]))
    if not in_line or any(tokens % scale for scale, _ in groups):
        return 0
    return sum(beside.long(p.q.shape[2], tokens // scale, p.q.shape[3]) for scale, _ in groups)


def run(p: Problem) -> Tensor:
    """Outputs [B, H, L, Dv]."""
    beta, factor = None, 0.0
    if p.primal.point_maps:
        factor, per_head = beta_of(p.primal.point_maps[0], p.parameters)
        beta = None if per_head is None else per_head.float()
    return beside.Tokens.apply(p.q, p.k, p.v, beta, factor, p.scales)
