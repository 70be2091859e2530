"""Scaled heads inside a layer: inputs are pooled before the key and value projections (Remark downsample-x).

A head pooled by s projects N/s tokens instead of N, and from there on it is an ordinary head over fewer keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..dual import GroupHeadsByScale, PoolBeforeProjection
from ..ops import attention
from ..ops.pooling import pool_tokens
from ..ops.problem import in_order, pick
from ..primal import AllKeys, Pooled

if TYPE_CHECKING:
    from .multihead import MultiheadAttention


def applies(layer: MultiheadAttention, need_weights: bool, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether the rewrite holds: mean pooling and plain projections, and every query sees all keys."""
    return (
        layer.impl != "reference"
        and isinstance(layer.primal.training_set, Pooled)
        and any(s > 1 for s in layer.primal.training_set.head_scales(layer.num_heads))
        and PoolBeforeProjection.refusal(layer.primal) is None
        and layer.convolutions is None
        and not (need_weights or is_causal or mask is not None)
    )


def attend(
    layer: MultiheadAttention, x: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, dropout_p: float,
    parameters: dict[str, Tensor],
) -> Tensor:  # fmt: skip
    """Head outputs [N, heads, L, head_dim]."""
    pooling = layer.primal.training_set
    assert isinstance(pooling, Pooled)
    primal = replace(layer.primal, training_set=AllKeys(), residual=False)
    per_head = {name for map_ in primal.inputs for name in map_.per_head}
    queries = layer.split(linear(x, *layer.weights_of("q")))
    groups = GroupHeadsByScale.groups(pooling.head_scales(layer.num_heads))
    outputs = []
    for scale, heads in groups:
        points, mask = _pool(key, padding, pooling, scale)
        value_points = points if value is key else _pool(value, padding, pooling, scale)[0]
        out = attention(
            pick(queries, 1, heads), _project(layer, "k", points, heads), _project(layer, "v", value_points, heads),
            primal, key_padding_mask=mask, dropout_p=dropout_p, impl=layer.impl,
            parameters={n: pick(p, 0, heads) if n in per_head else p for n, p in parameters.items()},
        )  # fmt: skip
        assert isinstance(out, Tensor)
        outputs.append(out)
    return in_order(outputs, [heads for _, heads in groups])


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


def _project(layer: MultiheadAttention, part: Literal["k", "v"], x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """The projection of these heads alone: [N, W, E] to [N, heads, W, head_dim]."""
    weight, bias = layer.weights_of(part)
    rows = pick(weight.unflatten(0, (layer.num_heads, layer.head_dim)), 0, heads).flatten(0, 1)
    if bias is not None:
        bias = pick(bias.unflatten(0, (layer.num_heads, layer.head_dim)), 0, heads).flatten()
    return layer.split(linear(x, rows, bias))
