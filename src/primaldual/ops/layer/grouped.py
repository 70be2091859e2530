"""Scaled heads of long sequences: inputs are pooled first, each group projects its points, all attend in one launch."""

from __future__ import annotations

from torch import Tensor

from ...dual import PoolBeforeProjection, Rewrite, RowConstantsCancel
from ...kernels.cudnn import beside
from ...kernels.native import layers as compiled
from ...kernels.native import library as native
from ...kernels.projection import grouped
from ..estimates import Estimate
from . import scaled
from .costs import in_one_call, one_after_another, products
from .problem import LayerProblem


def refusal(p: LayerProblem) -> str | None:
    """Why this route cannot compute the problem; None where it can."""
    if max(p.scales) == 1:
        return "no head is pooled"
    return scaled.refusal(p, "ragged", "grouped")


def rewrites(p: LayerProblem) -> tuple[type[Rewrite], ...]:
    """The identities that this route makes use of."""
    return (RowConstantsCancel, PoolBeforeProjection)


def run(p: LayerProblem) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim]; no weights."""
    given, seed = scaled.projected(p)
    found = compiled.attend(*given, p.dropout_p, seed, pool_first=True)
    return attend(p, given, seed, by_cudnn=False) if found is None else found, None


def attend(p: LayerProblem, given: scaled.Projected, seed: Tensor | None, by_cudnn: bool) -> Tensor:
    """Project into one flat buffer, and attend from it; on the way back long heads go through cuDNN's kernels."""
    flat, shift = grouped.project(*given)
    sizes = given.groups
    queries = beside.Queries(sizes.batch, sizes.heads, sizes.tokens, sizes.head_dim, sizes.row)
    return beside.attend(flat, queries, shift, grouped.layout(sizes), by_cudnn, p.dropout_p, seed)


def estimate(p: LayerProblem) -> Estimate:
    """Products over points; on both ways the inputs are pooled."""
    found = one_after_another(projections(p), scaled.attention(p, "ragged"))
    return in_one_call(p, found) if not p.captured and native.library() is not None else found


def projections(p: LayerProblem) -> Estimate:
    """A product for every scale and for the queries, and what is done beside them."""
    sizes = scaled.groups_of(p)
    parts = [(p.x.shape[1], sizes.row)]
    windows = list(zip(sizes.windows, sizes.widths, strict=True))[sizes.pooled]
    each, maps = len(windows), len(p.primal.point_maps)
    return products(
        p, [*parts, *windows], 4 + each + 2 * maps, 10 + 2 * each + maps, passes=(6.0 if p.trains else 1.0) + 2.0 * maps
    )
