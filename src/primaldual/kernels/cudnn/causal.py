"""Causal scaled heads: those over the tokens themselves through cuDNN's kernels, beside ours for windows.

Half of the scores of scales 1, 1, 2, 2, 4, 4, 8, 8 are of the first two heads, which cuDNN knows: its backward pass has
five products for each pair where ours has seven. Windows, complete and running, are ours. Each side has a stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivatives import differentiated_once
from ..launching import empty_like_heads, in_rows
from ..ragged import layout as layouts
from ..ragged.launch import Call, backward, forward
from ..ragged.passes import place, place_three, pool
from ..streams import Fork
from . import attention as cudnn

QUERIES = 1024
"""From which on two streams and the copies of cuDNN's results are expected to pay."""


class CausalTokens(torch.autograd.Function):
    """Queries, keys and values [B, H, N, D] of heads whose windows are in ascending order, those of one token first."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scales: tuple[int, ...]) -> Tensor:
        q, k, v = in_rows(q), in_rows(k), in_rows(v)
        tokens, windows = _sides(scales)
        out = empty_like_heads(q, v.shape[-1])
        fork = _forked(q)
        with fork.part(0):
            found, lse = cudnn.fused(q[:, tokens], k[:, tokens], v[:, tokens], is_causal=True)
            place(found, out[:, tokens])
        with fork.part(1):
            call, keys, values = _windows(k, v, scales)
            _, own_lse = forward(q[:, windows], keys, values, v.shape[-1], call, None, out[:, windows])
        fork.join()
        ctx.save_for_backward(q, k, v, out, lse, own_lse, keys, values)
        ctx.scales = scales
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, own_lse, keys, values = ctx.saved_tensors
        tokens, windows = _sides(ctx.scales)
        grad = cudnn.like_output(grad, out)
        dq, dk, dv = (empty_like_heads(x, x.shape[-1]) for x in (q, k, v))
        fork = _forked(q)
        with fork.part(0):
            g, queries, keys_, values_, output = (x[:, tokens] for x in (grad, q, k, v, out))
            found = cudnn.by_cudnn(g, queries, keys_, values_, output, lse.squeeze(-1), is_causal=True)
            place_three(found, (dq[:, tokens], dk[:, tokens], dv[:, tokens]), window=1)
        with fork.part(1):
            call = _call(k, v, ctx.scales)
            g, queries, output, of_q, of_k, of_v = (x[:, windows] for x in (grad, q, out, dq, dk, dv))
            backward(g, queries, keys, values, output, own_lse, call, of_k, of_v, k.shape[2], dq=of_q)
        fork.join()
        return dq, dk, dv, None


def _sides(scales: tuple[int, ...]) -> tuple[slice, slice]:
    """Heads over tokens, and heads over windows of several."""
    return slice(None, scales.count(1)), slice(scales.count(1), None)


def _call(k: Tensor, v: Tensor, scales: tuple[int, ...]) -> Call:
    """Of heads over windows, whose points lie in buffers of their own, and are running means of the tokens."""
    _, windows = _sides(scales)
    B, _, S, D = k.shape
    layout = layouts.pooled(scales[windows], B, S, D, v.shape[-1])
    return Call(layout, causal=True, tokens=(k[:, windows], v[:, windows]), running=True)


def _windows(k: Tensor, v: Tensor, scales: tuple[int, ...]) -> tuple[Call, Tensor, Tensor]:
    call = _call(k, v, scales)
    keys, values, _ = pool(*call.tokens, call.layout, False, 0)  # type: ignore[arg-type]
    return call, keys, values


def _forked(q: Tensor) -> Fork:
    return Fork(2 if q.is_cuda else 1)
