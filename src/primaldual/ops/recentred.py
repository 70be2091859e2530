"""Re-centred softmax heads over all tokens, on cuDNN's kernels: each way two passes over memory more than softmax."""

from __future__ import annotations

from torch import Tensor

from ..dual import beta_of, form_of
from ..kernels.cudnn import attention as cudnn
from ..kernels.cudnn.recentred import Recentred
from .problem import Problem


def applies(p: Problem) -> bool:
    """A re-centring and nothing else, no masks, and shapes that cuDNN takes, and takes fast."""
    form = form_of(p.primal)
    if not form.softmax or form.maps != "recentring" or form.points != "tokens" or form.subset != "all":
        return False
    if p.is_causal or p.key_hidden is not None or p.attn_hidden is not None or cudnn.half_empty(p.k.shape[2]):
        return False
    return not (p.dropout_p and p.q.shape[-1] <= 16) and cudnn.usable(p.q, p.k, p.v)


def run(p: Problem) -> Tensor:
    """Outputs [B, H, L, Dv]."""
    number, per_head = beta_of(p.primal.point_maps[0], p.parameters)
    return Recentred.apply(p.q, p.k, p.v, None if per_head is None else per_head.float(), number, p.dropout_p)
