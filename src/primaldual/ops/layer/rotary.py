"""Queries and keys come out of the projection with their rotary positions, and then any executor attends.

What gates are made of comes with them, and goes back with them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...dual import Expansion, Rewrite
from ...kernels.gate import gating
from ...kernels.projection import turned
from ...kernels.projection.recentred import as_linear
from ...primal import Primal
from .. import rotary
from .._attention import attention
from ..estimates import Estimate
from ..places import Places
from ..plan import Plan
from .costs import attention_plan, estimate_of, one_after_another, products, turning
from .problem import LayerProblem, no_projection_kernel, packed


def refusal(p: LayerProblem) -> str | None:
    """Why this route cannot compute the problem; None where it can."""
    if not rotary.alone(p.primal):
        return "the tokens are not turned by rotary positions and nothing else"
    if p.layer.impl == "reference":
        return "the reference turns projected queries and keys"
    if p.padding is not None:
        return "what is padding may move the places of a row"
    if p.extra_keys is not None:
        return "there are keys that are not projected"
    return no_projection_kernel(p) or rotary.refusal(p.dtype, p.x.device)


def rewrites(p: LayerProblem) -> tuple[type[Rewrite], ...]:
    """None of this route: there are those of the executor that attends."""
    return ()


def inner(p: LayerProblem) -> tuple[Plan, ...]:
    """The plan of the attention of what is turned."""
    return (attention_plan(p, _turned(p), p.layer.num_heads, p.x.shape[1], p.executor),)


def run(p: LayerProblem, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim], and weights [N, heads, L, L] where they are asked for."""
    x, weight, bias = packed(p)
    gate = None if p.squash is None or not gates(p) else as_linear(p.x, *p.squash)[1:]
    length, map_ = x.shape[1], rotary.map_of(p.primal)
    of_q, of_k = (
        rotary.table(map_, p.layer.head_dim, Places(first, length), x.device) for first in (p.query_offset, 0)
    )
    q, k, v, *by = turned.project(x, weight, bias, gate, of_q, of_k, p.layer.num_heads)
    result = attention(
        q, k, v, _turned(p), attn_mask=p.mask, is_causal=p.is_causal, dropout_p=p.dropout_p, parameters=p.parameters,
        impl=p.executor, need_weights=p.need_weights, query_offset=p.query_offset,
    )  # fmt: skip
    if isinstance(result, tuple):
        return result
    return gating.gated(result, *by) if by else result, None


def gates(p: LayerProblem) -> bool:
    """Whether this route multiplies the outputs by their gates; weights, which are multiplied, too, are another's."""
    return p.squash is not None and not p.need_weights


def estimate(p: LayerProblem) -> Estimate:
    """One product and a launch that turns, each way; what is added up for the biases; and the attention's own plan."""
    tokens, columns = p.x.shape[1:]
    projections = products(p, [(tokens, 3 * columns)], 2, 5, turning(p) + (1.0 if p.trains else 0.0))
    return one_after_another(projections, *(estimate_of(plan) for plan in inner(p)))


def _turned(p: LayerProblem) -> Primal:
    """What the heads compute of queries and keys that are turned."""
    return replace(p.primal, inputs=p.primal.point_maps, residual=False, bias=False)
