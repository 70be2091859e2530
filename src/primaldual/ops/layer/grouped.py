"""Scaled heads of long sequences: inputs are pooled first, each group projects its points, all attend in one launch."""

from __future__ import annotations

from torch import Tensor

from ...dual import Expansion, PoolBeforeProjection, Rewrite, RowConstantsCancel
from ...kernels.native import layers as compiled
from ...kernels.native import library as native
from ..estimates import Estimate
from ..plan import Plan
from ..problem import require
from . import scaled
from .costs import in_one_call, one_after_another
from .problem import LayerProblem


def refusal(p: LayerProblem) -> str | None:
    """Why this route cannot compute the problem; None where it can."""
    return scaled.refusal_of_points(p, "ragged", "grouped")


def rewrites(p: LayerProblem) -> tuple[type[Rewrite], ...]:
    """The identities that this route makes use of."""
    return (RowConstantsCancel, PoolBeforeProjection)


def inner(p: LayerProblem) -> tuple[Plan, ...]:
    """The plans of attentions inside: none, this route attends itself."""
    return ()


def run(p: LayerProblem, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim]; no weights."""
    require(expansion, PoolBeforeProjection)
    given, seed = scaled.projected(p, expansion)
    found = compiled.attend(*given, p.dropout_p, seed, pool_first=True)
    return scaled.attend_points(p, given, seed, by_cudnn=False) if found is None else found, None


def estimate(p: LayerProblem) -> Estimate:
    """Products over points; on both ways the inputs are pooled."""
    found = one_after_another(scaled.projections_of_points(p), scaled.attention(p, "ragged"))
    return in_one_call(p, found) if not p.captured and native.library() is not None else found
