"""Scaled heads inside a layer: inputs are pooled before the key and value projections (Remark downsample-x).

A head pooled by s projects N/s tokens instead of N, and from there on it is an ordinary head over fewer keys. On a GPU,
softmax heads in self-attention without padding, re-centred or not, attend all at once. Their projections are in
`grouped`; of short sequences, for which pooling first does not pay, in `unpooled`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..dual import GroupHeadsByScale, PoolBeforeProjection
from ..kernels.cudnn import attention as cudnn
from ..kernels.cudnn import beside as parallel
from ..kernels.launching import captured, launches, seed_of
from ..kernels.native import layers as compiled
from ..kernels.projection import grouped, unpooled
from ..kernels.projection.grouped import Groups
from ..kernels.projection.recentred import as_linear
from ..kernels.ragged import tokens as ragged_tokens
from ..kernels.ragged.work import MAX_HEAD_DIM
from ..ops import attention
from ..ops.pooling import pool_tokens
from ..ops.problem import in_order, pick
from ..primal import AllKeys, Exponential, KernelSum, Pooled
from .recentred import beta_of, plain, recenter_of

if TYPE_CHECKING:
    from .multihead import MultiheadAttention

SHORT = 2048
"""Tokens up to which one product for all of them, pooled afterwards, is faster than a product per scale."""

LONG = (4096, 8192)
"""Tokens from which on long heads go back through cuDNN's kernels, on streams beside ours: captured, eager."""


def applies(layer: MultiheadAttention, need_weights: bool, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether the rewrite holds: mean pooling and plain projections, and every query sees all keys."""
    return (
        layer.impl != "reference"
        and type(layer.primal.training_set) is Pooled
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
    if x is key and key is value and padding is None and _softmax_heads(layer) and plain(layer, x):
        assert layer.in_proj_weight is not None
        packed = as_linear(x, layer.in_proj_weight, layer.in_proj_bias)
        scaled = GroupHeadsByScale.groups(pooling.head_scales(layer.num_heads))
        sizes = Groups(scaled, x.shape[0], x.shape[1], layer.num_heads, layer.head_dim)
        if (way := how(layer.impl, layer.split(packed[0]), sizes, dropout_p)) != "apart":
            return _attend_grouped(layer, *packed, sizes, way, dropout_p)
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


def _softmax_heads(layer: MultiheadAttention) -> bool:
    """Softmax heads over windows of tokens, re-centred or as they are."""
    p = layer.primal
    softmax = type(p.features) is Exponential and type(p.normalizer) is KernelSum
    pooling = p.training_set
    assert isinstance(pooling, Pooled)
    return softmax and (len(p.inputs) == 0 or recenter_of(layer) is not None) and not (pooling.grid or pooling.prefix)


def how(impl: str, q: Tensor, groups: Groups, dropout_p: float = 0.0) -> str:
    """Which way heads of several lengths go, by name.

    "tokens": keys and values are pooled, in the attention, instead of inputs; else these are, with a product per scale.
    "ragged": all heads attend in one launch, as with "tokens". "parallel": the same, and long ones go back through
    cuDNN's kernels, which cannot drop what ours have dropped. "apart": group by group.
    """
    if not launches(q) or q.shape[-1] > MAX_HEAD_DIM or (q.is_cuda and q.shape[-1] % 8):
        return "apart"
    in_line = [h for _, heads in groups.groups for h in heads] == list(range(groups.heads))
    long = groups.tokens >= LONG[not captured(q)] and any(
        parallel.long(groups.tokens, windows, groups.head_dim) for windows in groups.windows
    )
    trains = torch.is_grad_enabled() and not dropout_p
    if impl == "auto" and long and trains and in_line and cudnn.usable(q, q, q):
        return "parallel"
    watched = torch._C._len_torch_dispatch_stack() > 0  # a FLOP counter sees operators, and no launches
    if impl not in ("auto", "ragged") or watched:
        return "apart"
    return "tokens" if groups.tokens <= SHORT else "ragged"


def _attend_grouped(
    layer: MultiheadAttention, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, way: str,
    dropout_p: float,
) -> Tensor:  # fmt: skip
    recentred = bool(layer.primal.inputs)
    number, beta = beta_of(layer) if recentred else (0.0, None)
    projection = x, weight, bias, groups, recentred, number, beta
    seed = seed_of(x, dropout_p)
    if way != "parallel":
        out = compiled.attend(*projection, dropout_p, seed, pool_first=way == "ragged")
        if out is not None:
            return out
    if way == "tokens":
        q, k, v = unpooled.project(*projection)
        return ragged_tokens.attend_tokens(q, k, v, None, groups.scales, False, dropout_p, seed)
    packed, shift = grouped.project(*projection)
    queries = parallel.Queries(groups.batch, groups.heads, groups.tokens, groups.head_dim, groups.row)
    return parallel.attend(packed, queries, shift, grouped.layout(groups), way == "parallel", dropout_p, seed)


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
