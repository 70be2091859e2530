"""What the routes share that take all scaled heads in one launch: `unpooled`, `grouped`, `grouped_mixed`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...dual import Expansion, GroupHeadsByScale, beta_of
from ...kernels.cudnn import beside
from ...kernels.launching import seed_of
from ...kernels.projection import grouped
from ...kernels.projection.grouped import Groups
from ...kernels.ragged import limits
from ...primal import Primal
from ..estimates import Estimate, estimate
from ..problem import query_map_alone
from .costs import attention_plan, products
from .problem import LayerProblem, no_projection_kernel, packed, queries_differ


class Projected(NamedTuple):
    """What the kernels of the projections are called with."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    groups: Groups
    recentred: bool
    beta: float
    betas: Tensor | None  # [heads], what is learned, times the number before


def refusal(p: LayerProblem, *executors: str) -> str | None:
    """Why none of these routes can compute the problem, where these executors are asked for; None where one can."""
    form = p.form
    if not form.simple or form.token_maps:
        return "the heads are not softmax heads, with at most a re-centring, over tokens or their windows"
    if form.subset != "all":
        return "every query has its own keys"
    if p.layer.impl != "auto" and p.layer.impl not in executors:
        return f"another is asked for: impl={p.layer.impl!r}"
    if reason := queries_differ(p) or no_projection_kernel(p):
        return reason
    if p.padding is not None:
        return "the kernels of the projections take no padding"
    reason = limits.refusal(p.dtype, p.x.device, p.layer.head_dim, p.layer.head_dim)
    return None if reason is None else f"the ragged kernel {reason}"


def refusal_of_points(p: LayerProblem, *executors: str) -> str | None:
    """The same of routes that pool the inputs first."""
    return "no head is pooled" if max(p.scales) == 1 else refusal(p, *executors)


def groups_of(p: LayerProblem) -> Groups:
    """The heads of each scale, and the sizes of the call."""
    batch, tokens, _ = p.x.shape
    scaled = GroupHeadsByScale.groups(p.scales)
    return Groups(scaled, batch, tokens, p.layer.num_heads, p.layer.head_dim)


def projected(p: LayerProblem, expansion: Expansion) -> tuple[Projected, Tensor | None]:
    """The arguments of the projection, and the seed of dropout."""
    map_ = query_map_alone(expansion)
    factor, beta = (0.0, None) if map_ is None else beta_of(map_, p.parameters)
    x, weight, bias = packed(p)
    beta = None if beta is None else beta.contiguous()
    return Projected(x, weight, bias, groups_of(p), map_ is not None, factor, beta), seed_of(p.x, p.dropout_p)


def attention(p: LayerProblem, impl: str) -> Estimate:
    """What an executor takes for the attention of all heads."""
    primal = Primal(training_set=p.primal.training_set)  # queries come out of the projection re-centred
    return estimate(impl, attention_plan(p, primal, p.layer.num_heads, p.x.shape[1], "auto").sizes)


def attend_points(p: LayerProblem, given: Projected, seed: Tensor | None, by_cudnn: bool) -> Tensor:
    """Project into one flat buffer and attend from it; back by cuDNN, where heads are long and that is asked."""
    flat, shift = grouped.project(*given)
    sizes = given.groups
    queries = beside.Queries(sizes.batch, sizes.heads, sizes.tokens, sizes.head_dim, sizes.row)
    return beside.attend(flat, queries, shift, grouped.layout(sizes), by_cudnn, p.dropout_p, seed)


def projections_of_points(p: LayerProblem) -> Estimate:
    """A product for every scale and for the queries, and what is done beside them."""
    sizes = groups_of(p)
    parts = [(p.x.shape[1], sizes.row)]
    windows = list(zip(sizes.windows, sizes.widths, strict=True))[sizes.pooled]
    each, maps = len(windows), len(p.primal.point_maps)
    return products(
        p, [*parts, *windows], 4 + each + 2 * maps, 10 + 2 * each + maps, passes=(6.0 if p.trains else 1.0) + 2.0 * maps
    )
