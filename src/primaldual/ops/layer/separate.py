"""Project every token, then attend: what every layer can do."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...dual import Expansion, Rewrite
from .. import masks
from .._attention import attention
from ..estimates import Estimate
from ..plan import Plan
from .costs import attention_plan, estimate_of, one_after_another, products, turning
from .problem import LayerProblem

JOINING_PASSES = 6.0
"""Passes over the inputs in which the gradients of queries, keys and values become one tensor."""

BIAS_PASSES = 3.0
"""And in which they are added up to those of the biases."""


def refusal(p: LayerProblem) -> str | None:
    """Why this route cannot compute the problem: nothing stops it."""
    return None


def rewrites(p: LayerProblem) -> tuple[type[Rewrite], ...]:
    """None of this route: there are those of the executor that attends."""
    return ()


def inner(p: LayerProblem) -> tuple[Plan, ...]:
    """The plan of the attention inside."""
    return (_plan(p),)


def run(p: LayerProblem, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, heads, L, head_dim], and weights [N, heads, L, S] where they are asked for."""
    q, k, v, padding, mask, is_causal = heads(p)
    result = attention(
        q, k, v, p.primal if not p.primal.residual else replace(p.primal, residual=False),
        key_padding_mask=padding, query_padding_mask=p.query_padding, attn_mask=mask, is_causal=is_causal,
        dropout_p=p.dropout_p, parameters=p.parameters, impl=p.executor, need_weights=p.need_weights,
        query_offset=p.query_offset, scale=p.layer.scale, left_padding=p.layer.left_padding,
    )  # fmt: skip
    return result if isinstance(result, tuple) else (result, None)


def heads(p: LayerProblem) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """Queries, keys and values [N, heads, L, head_dim] with the extra ones, the two masks, and whether it is causal."""
    q, k, v = p.layer.project(p.x, p.key, p.value, p.padding, p.query_padding)
    masked = p.padding, p.mask, p.is_causal
    if p.extra_keys is not None and p.extra_values is not None:
        k, v = (torch.cat([t, e.to(t.dtype).expand(t.shape[0], -1, -1)], 1)
                for t, e in ((k, p.extra_keys), (v, p.extra_values)))  # fmt: skip
        masked = _seen_by_all(p)
    return p.split(q), p.split(k), p.split(v), *masked


def estimate(p: LayerProblem) -> Estimate:
    """Three products, one where they are packed, and the attention's own plan."""
    (_, queries, columns), keys, shared = p.x.shape, p.key.shape[1], p.layer.num_kv_heads * p.layer.head_dim
    if p.one_input and p.layer.packed is not None:
        passes = JOINING_PASSES + BIAS_PASSES if p.trains else 0.0
        projections = products(p, [(queries, 3 * columns)], 1, 4, turning(p) + passes)
    else:
        parts = [(queries, columns), (keys, shared), (keys, shared)]
        projections = products(p, parts, 3, 9, turning(p) + (BIAS_PASSES if p.trains else 0.0))
    return one_after_another(projections, estimate_of(_plan(p)))


def _plan(p: LayerProblem) -> Plan:
    """The attention of all heads."""
    primal = replace(p.primal, residual=False, bias=False)
    return attention_plan(p, primal, p.layer.num_heads, p.key.shape[1], p.executor, p.layer.num_kv_heads)


def _seen_by_all(p: LayerProblem) -> tuple[Tensor | None, Tensor | None, bool]:
    """The masks where extra keys, which every query sees, stand after the tokens."""
    assert p.extra_keys is not None
    extra, mask = p.extra_keys.shape[1], p.mask
    if p.is_causal:
        nothing = torch.zeros(p.x.shape[1], p.key.shape[1], dtype=torch.bool, device=p.x.device)
        mask = masks.with_future(nothing if mask is None else mask, p.query_offset)
    padding, mask = (None if m is None else pad(m, (0, extra)) for m in (p.padding, mask))
    return padding, mask, False
