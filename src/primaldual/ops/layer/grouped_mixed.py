"""`grouped`, whose long heads go back through cuDNN's kernels, on streams beside ours."""

from __future__ import annotations

from torch import Tensor

from ...dual import Expansion, GroupHeadsByScale, PoolBeforeProjection, Rewrite, RowConstantsCancel
from ...kernels.cudnn import attention as cudnn
from ...kernels.cudnn import beside
from ..estimates import Estimate
from ..plan import Plan
from ..problem import require
from . import scaled
from .costs import empty_heads, one_after_another
from .problem import LayerProblem


def refusal(p: LayerProblem) -> str | None:
    """Why this route cannot compute the problem; None where it can."""
    if reason := scaled.refusal_of_points(p, "mixed", "grouped_mixed"):
        return reason
    if not p.trains:
        return "there is no way back"
    if p.dropout_p:
        return "what cuDNN drops is drawn inside it, where our forward pass cannot look"
    sizes = scaled.groups_of(p)
    if [h for _, heads in sizes.groups for h in heads] != list(range(sizes.heads)):
        return "heads of one scale do not stand side by side"
    if not any(beside.long(sizes.tokens, windows, sizes.head_dim) for windows in sizes.windows):
        return "no head is long enough for cuDNN's kernels to be the faster ones"
    q = empty_heads(p, sizes.heads, sizes.tokens)
    return None if cudnn.usable(q, q, q) else "cuDNN's attention does not take these heads"


def rewrites(p: LayerProblem) -> tuple[type[Rewrite], ...]:
    """The identities that this route makes use of; on the way back heads of one scale are one call."""
    return (RowConstantsCancel, PoolBeforeProjection, GroupHeadsByScale)


def inner(p: LayerProblem) -> tuple[Plan, ...]:
    """The plans of attentions inside: none, this route attends itself."""
    return ()


def run(p: LayerProblem, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim]; no weights."""
    require(expansion, PoolBeforeProjection, GroupHeadsByScale)
    given, seed = scaled.projected(p, expansion)
    return scaled.attend_points(p, given, seed, by_cudnn=True), None


def estimate(p: LayerProblem) -> Estimate:
    """The products over points, and the attention."""
    return one_after_another(scaled.projections_of_points(p), scaled.attention(p, "mixed"))
