"""Attention maps over tokens, of some cases of a call, a few queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..ops import masks, reference
from ..ops.plan import choose, execute
from ..ops.problem import Problem, state
from .calls import AttentionCall

Pooling = Literal["shared", "repeated"]
"""What a token has of the weight of its pooled point: an equal share among its tokens, or the whole of it."""

AT_ONCE = 1 << 24
"""Weights that are held at once, those of all heads together."""


class Block(NamedTuple):
    """The maps of some queries."""

    weights: Tensor  # [cases, H, queries, S]
    valid: Tensor  # bool [cases, queries]: which of the queries are not padding


def blocks(call: AttentionCall, cases: slice, pooling: Pooling) -> Iterator[Block]:
    """The maps κ(Tq_i, Tk_j)/h(Tq_i) of these cases, in the order of the queries, in at least float32.

    A gate, which a head's channels need not have in common, is left out. A map is zero where a query does not see a
    token. A learned and a zero key are among the tokens. Where `refusal` has a reason, "shared" raises with it.
    """
    problem = _problem(call, cases, pooling)
    queries, keys = call.queries.shape[2], call.keys.shape[2]
    valid = torch.ones(problem.q.shape[0], queries, dtype=torch.bool, device=problem.q.device)
    if call.query_padding is not None:
        padding = call.query_padding[cases]
        hidden, _ = masks.padding("query_padding_mask", padding, (padding.shape[0], queries))
        valid = valid if hidden is None else ~hidden[:, 0]
    executor = choose(problem).impl
    rows = max(1, AT_ONCE // max(1, problem.q.shape[0] * problem.q.shape[1] * keys))
    device = problem.q.device.type
    # under autocast scores would be rounded
    exact = torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
    for first in range(0, queries, rows):
        with torch.no_grad(), exact:
            weights = execute(_of_queries(problem, first, first + rows), executor)[1]
        assert weights is not None
        yield Block(weights, valid[:, first : first + rows])


def head_maps(call: AttentionCall, case: int, pooling: Pooling = "shared") -> Tensor:
    """The maps [H, queries, S] of one case."""
    return torch.cat([weights[0] for weights, _ in blocks(call, slice(case, case + 1), pooling)], dim=1)


def refusal(call: AttentionCall) -> str | None:
    """Why a window's weight cannot be shared by its tokens; None where it can."""
    return reference.refusal(_problem(call, slice(0, 1), "shared"))


def _problem(call: AttentionCall, cases: slice, pooling: Pooling) -> Problem:
    """The call as the executors take it."""
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    values = call.values[cases, ..., :1]  # outputs are not wanted
    q, k, v = (x.to(dtype) for x in (call.queries[cases], call.keys[cases], values))
    key_padding, query_padding = (None if m is None else m[cases] for m in (call.padding, call.query_padding))
    mask = call.mask
    if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
        mask = mask[cases]
    stated = state(
        q, k, v, replace(call.primal.ungated, bias=False, residual=False), key_padding_mask=key_padding,
        query_padding_mask=query_padding, attn_mask=mask, is_causal=call.is_causal,
        parameters={name: x.to(torch.promote_types(x.dtype, dtype)) for name, x in call.parameters_of(cases).items()},
        need_weights=True, query_offset=call.query_offset, scale=call.scale,
    )  # fmt: skip
    return replace(stated, repeat_weights=pooling == "repeated")


def _of_queries(p: Problem, first: int, end: int) -> Problem:
    """The same for some of the queries, in their places."""
    hidden, bias = (None if m is None else m[:, :, first:end] for m in (p.attn_hidden, p.attn_bias))
    return replace(
        p, q=p.q[:, :, first:end], attn_hidden=hidden, attn_bias=bias, query_offset=p.query_offset + first
    )  # fmt: skip
