"""What a layer takes: its products, what is done beside them, and its attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...primal import Primal
from .. import rotary
from .._attention import plan
from ..devices import device_of
from ..estimates import TRAINING, Estimate
from ..plan import Plan
from .problem import LayerProblem

BACKWARD = 3.0
"""FLOPs and bytes of a product, forward and backward over forward."""


def products(
    p: LayerProblem, parts: Sequence[tuple[int, int]], launches: int, back: int, passes: float = 0.0
) -> Estimate:
    """The projections.

    Args:
        parts: tokens of a sequence and columns of each product, all of E inputs.
        launches, back: of everything but the attention, on the way there and on the way back.
        passes: how often all inputs move through memory beside the products, on both ways together.
    """
    device, size = device_of(p.x.device), p.dtype.itemsize
    batch, length, inputs = p.x.shape
    rate = device.efficiencies["product"].share * device.rates.get(p.dtype, device.rates[torch.float32])
    more = BACKWARD if p.trains else 1.0
    flops = more * sum(2.0 * batch * tokens * inputs * columns for tokens, columns in parts)
    moved = more * size * float(
        sum(batch * tokens * (inputs + columns) + inputs * columns for tokens, columns in parts)
    )  # fmt: skip
    beside = passes * batch * length * inputs * size
    launches += back if p.trains else 0
    seconds = max(flops / rate, moved / device.bandwidth) + beside / device.bandwidth + launches * device.gap
    return Estimate(flops, moved + beside, launches, seconds, 0.0 if p.captured else launches * device.host)


def turning(p: LayerProblem) -> float:
    """Passes over the inputs, on both ways together, in which rotary positions turn queries and keys."""
    if not rotary.alone(p.primal):
        return 0.0
    each = 4.0 if rotary.refusal(p.dtype, p.x.device) is None else 44.0
    return 2.0 * each if p.trains else each


def empty_heads(p: LayerProblem, heads: int, length: int) -> Tensor:
    """An empty tensor in the place of projected heads [N, heads, length, head_dim]."""
    empty = torch.empty(p.x.shape[0], length, heads, p.layer.head_dim, dtype=p.dtype, device=p.x.device)
    return empty.requires_grad_(p.trains).transpose(1, 2)


def attention_plan(
    p: LayerProblem, primal: Primal, heads: int, keys: int, impl: str, kv_heads: int | None = None
) -> Plan:
    """The plan for the attention of so many heads over so many keys, padded where the layer's are."""
    padding = p.padding
    if padding is not None and padding.shape[1] != keys:
        padding = torch.zeros(padding.shape[0], keys, dtype=padding.dtype, device=padding.device)
    k = empty_heads(p, heads if kv_heads is None else kv_heads, keys)
    return plan(
        empty_heads(p, heads, p.x.shape[1]), k, k, primal,
        key_padding_mask=padding, query_padding_mask=p.query_padding, attn_mask=p.mask, is_causal=p.is_causal,
        dropout_p=p.dropout_p, impl=impl, need_weights=p.need_weights, query_offset=p.query_offset,
        scale=p.layer.scale if primal.features.scaled else None, left_padding=p.layer.left_padding,
        parameters={name: p.parameters[name] for name in primal.features.fixed},
    )  # fmt: skip


def estimate_of(chosen: Plan) -> Estimate:
    """What the chosen executor would take."""
    return chosen.estimates[chosen.impl]


def one_after_another(*parts: Estimate) -> Estimate:
    """One after the other."""
    return Estimate(*(sum(values) for values in zip(*parts, strict=True)))


def in_one_call(p: LayerProblem, whole: Estimate) -> Estimate:
    """The same by the compiled part, which leaves the host one call."""
    device = device_of(p.x.device)
    if p.captured or not device.host:
        return whole
    return whole._replace(host=device.efficiencies["compiled"].call / (1.0 if p.trains else TRAINING))
