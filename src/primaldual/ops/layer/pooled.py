"""Pool the inputs, project each group of heads' own points, attend group by group (Remark downsample-x).

    mean_{t∈w}(A x_t + b) = A · mean_{t∈w}(x_t) + b      (`PoolBeforeProjection`)

A head pooled by s projects N/s tokens instead of N, and from there on it is an ordinary head over fewer keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...dual import Expansion, GroupHeadsByScale, PoolBeforeProjection, Rewrite
from ...dual.form import knows_positions, pooling_of
from ...primal import AllKeys, Pooled, Primal
from .._attention import attention
from ..estimates import Estimate
from ..plan import Plan
from ..pooling import pool_tokens
from ..problem import in_order, pick, require
from .costs import attention_plan, estimate_of, one_after_another, products
from .problem import LayerProblem, queries_differ


def refusal(p: LayerProblem) -> str | None:
    """Why this route cannot compute the problem; None where it can."""
    if pooling_of(p.primal.training_set) is None or p.form.subset != "all" or max(p.scales) == 1:
        return "no head is fitted to pooled keys alone"
    if knows_positions(p.primal.features):
        return "a kernel of positions asks where the tokens of a point stand"
    if reason := PoolBeforeProjection.refusal(p.primal):
        return reason
    if p.form.weighted:
        return "the weights of pooled tokens add up, so tokens are pooled in the attention"
    if p.layer.convolutions is not None:
        return "the projections are convolutional"
    if p.layer.impl == "reference":
        return "the reference projects every token"
    return queries_differ(p)


def rewrites(p: LayerProblem) -> tuple[type[Rewrite], ...]:
    """The identities that this route makes use of."""
    return (PoolBeforeProjection, GroupHeadsByScale)


def inner(p: LayerProblem) -> tuple[Plan, ...]:
    """The plans of the attentions inside, one for every scale."""
    return tuple(_plan(p, scale, heads) for scale, heads in GroupHeadsByScale.groups(p.scales))


def run(p: LayerProblem, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim]; no weights."""
    require(expansion, PoolBeforeProjection)
    pooling = pooling_of(p.primal.training_set)
    assert pooling is not None
    primal = _unpooled(p)
    by_head = primal.by_head
    queries = p.split(linear(p.x, *p.layer.weights_of("q")))
    groups = expansion.calls(p.layer.num_heads)
    outputs = []
    for scale, heads in groups:
        points, mask = _pool(p.key, p.padding, pooling, scale)
        value_points = points if p.value is p.key else _pool(p.value, p.padding, pooling, scale)[0]
        out = attention(
            pick(queries, 1, heads), _project(p, "k", points, heads), _project(p, "v", value_points, heads),
            primal, key_padding_mask=mask, dropout_p=p.dropout_p, impl=p.executor, scale=p.layer.scale,
            parameters={n: pick(x, 0, heads) if n in by_head else x for n, x in p.parameters.items()},
        )  # fmt: skip
        assert isinstance(out, Tensor)
        outputs.append(out)
    return in_order(outputs, [heads for _, heads in groups]), None


def estimate(p: LayerProblem) -> Estimate:
    """Fewer rows to project; a pass that pools, two products and an attention for every group."""
    tokens, dim, columns = p.key.shape[1], p.layer.head_dim, p.x.shape[2]
    groups = GroupHeadsByScale.groups(p.scales)
    parts = [(p.x.shape[1], columns)]
    parts += [(p.primal.training_set.points(s, tokens), 2 * len(heads) * dim) for s, heads in groups]
    each = len(groups)
    projections = products(p, parts, 1 + 4 * each, 3 + 8 * each, passes=2.0 * each)
    return one_after_another(projections, *(estimate_of(plan) for plan in inner(p)))


def _plan(p: LayerProblem, scale: int, heads: tuple[int, ...]) -> Plan:
    """The attention of the heads of one scale."""
    points = p.primal.training_set.points(scale, p.key.shape[1])
    return attention_plan(p, _unpooled(p), len(heads), points, p.executor)


def _unpooled(p: LayerProblem) -> Primal:
    return replace(p.primal, training_set=AllKeys(), residual=False, bias=False)


def _pool(x: Tensor, padding: Tensor | None, pooling: Pooled, scale: int) -> tuple[Tensor, Tensor | None]:
    """Inputs [N, S, E] and their padding mask [N, S], both pooled; a bias on keys is pooled like a value."""
    if padding is None or scale == 1:
        return pool_tokens(x.unsqueeze(1), None, pooling, scale, {})[0].squeeze(1), padding
    hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
    seen = ~hidden.unsqueeze(1)
    points, exists = pool_tokens(x.masked_fill(hidden.unsqueeze(-1), 0.0).unsqueeze(1), seen, pooling, scale, {})
    assert exists is not None
    mask = ~exists.squeeze(1)
    if padding.dtype != torch.bool:
        bias, _ = pool_tokens(padding.masked_fill(hidden, 0.0)[:, None, :, None], seen, pooling, scale, {})
        mask = bias[:, 0, :, 0].masked_fill(mask, -torch.inf)
    return points.squeeze(1), mask


def _project(p: LayerProblem, part: Literal["k", "v"], x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """The projection of these heads alone: [N, W, E] to [N, heads, W, head_dim]."""
    weight, bias = p.layer.weights_of(part)
    by_head = (p.layer.num_heads, p.layer.head_dim)
    rows = pick(weight.unflatten(0, by_head), 0, heads).flatten(0, 1)
    if bias is not None:
        bias = pick(bias.unflatten(0, by_head), 0, heads).flatten()
    return p.split(linear(x, rows, bias))
