"""Scaled heads of short sequences: one product for all tokens, whose keys and values are pooled in the attention.

What pooling first would save in arithmetic (`grouped`) is less there than what a product for every scale costs.
"""

from __future__ import annotations

from torch import Tensor

from ...dual import Expansion, Rewrite, RowConstantsCancel
from ...kernels.native import layers as compiled
from ...kernels.native import library as native
from ...kernels.projection import unpooled
from ...kernels.ragged.tokens import attend_tokens
from ..estimates import Estimate
from ..plan import Plan
from . import scaled
from .costs import in_one_call, one_after_another, products
from .problem import LayerProblem


def refusal(p: LayerProblem) -> str | None:
    """Why this route cannot compute the problem; None where it can."""
    if reason := scaled.refusal(p, "ragged", "unpooled"):
        return reason
    if max(p.scales) == 1:
        if p.form.maps != "recentring":
            return "softmax heads over all tokens have nothing to pool or re-centre"
        if not _runs_compiled(p) or p.dtype.itemsize != 2:
            return "heads that are re-centred and not scaled go this way through the compiled part alone"
    return None


def rewrites(p: LayerProblem) -> tuple[type[Rewrite], ...]:
    """The identities that this route makes use of."""
    return (RowConstantsCancel,)


def inner(p: LayerProblem) -> tuple[Plan, ...]:
    """The plans of attentions inside: none, this route attends itself."""
    return ()


def run(p: LayerProblem, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim]; no weights."""
    given, seed = scaled.projected(p, expansion)
    found = compiled.attend(*given, p.dropout_p, seed, pool_first=False)
    if found is not None:
        return found, None
    q, k, v = unpooled.project(*given)
    return attend_tokens(q, k, v, None, given.groups.scales, False, p.dropout_p, seed), None


def estimate(p: LayerProblem) -> Estimate:
    """One product; where queries are re-centred the mean of the inputs, and a pass over the gradients of the keys."""
    tokens, columns = p.x.shape[1:]
    maps = len(p.primal.point_maps)
    passes = 3.0 * maps + (2.0 + 2.0 * maps if p.trains else 0.0)
    projections = products(p, [(tokens, 3 * columns)], 1 + 2 * maps, 4 + 2 * maps, passes)
    found = one_after_another(projections, scaled.attention(p, "ragged"))
    return in_one_call(p, found) if _runs_compiled(p) else found


def _runs_compiled(p: LayerProblem) -> bool:
    return not p.captured and native.library() is not None
