"""The ragged kernels over tokens, as an operator of torch, an autograd function, and by the compiled part.

Keys and values are those of the tokens; mean pooling and re-centring happen inside, and gradients go straight to the
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..buffers import side_by_side
from ..derivatives import differentiated_once
from ..kept import on_side_stream
from ..launching import empty_like_heads, in_rows, traced
from ..native import library as native
from ..native import replay
from . import flops as ragged_flops
from . import layout as layouts
from . import work as ragged_work
from .launch import Call, backward, forward
from .layout import Layout
from .passes import Shift, blocks_of, dot_sums, place, pool, sum_rows


def _reading_tokens(scales: Sequence[int]) -> int:
    """How many heads read the tokens themselves, beside others that are pooled."""
    return scales.count(1) if max(scales) > 1 else 0


def _factor(scales: Sequence[int], tokens: int) -> float:
    """From a sum over tokens to the mean over windows, which is that of the tokens where all windows are whole."""
    return 1 / tokens if _whole(scales, tokens) else 1.0


def _whole(scales: Sequence[int], tokens: int) -> bool:
    return all(tokens % scale == 0 for scale in scales)


def _shares(layout: Layout, q: Tensor, k: Tensor, v: Tensor, scales: Sequence[int]) -> Tensor | None:
    """The table by which tokens have their shares in the mean over windows, where not all of these are whole."""
    if _whole(scales, k.shape[2]):
        return None
    B, _, L, D = q.shape
    return ragged_work.work(layout, B, L, max(D, v.shape[-1]), q.dtype, False, q.device).table


def tokens_forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: Sequence[int], is_causal: bool, dropout_p: float,
    seed: Tensor | None, marks: Tensor | None = None, back: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, and what the backward pass needs, empty if it does not.

    That is the points' keys and values, the sums of which the keys' mean is made, and the queries less that.
    """
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    B, H, S, D = k.shape
    sums, keys, values = q.new_empty(B, H, 0, D, dtype=torch.float32), k.new_empty(0), v.new_empty(0)
    shifted = empty_like_heads(q, D) if beta is not None and back else q.new_empty(0)
    if q.numel() == 0:
        return (
            empty_like_heads(q, v.shape[-1]),
            q.new_empty(q.shape[:3], dtype=torch.float32),
            keys,
            values,
            sums,
            shifted,
        )
    unpooled, pooled = _reading_tokens(scales), max(scales) > 1
    layout = layouts.pooled(tuple(scales), B, S, D, v.shape[-1], unpooled > 0) if pooled else layouts.of_tokens(k, v)
    shift = None
    if beta is not None:  # before the pooling, which heads with windows of one token do not wait for
        sums = sum_rows(k, _shares(layout, q, k, v, scales))
        shift = Shift(sums, _factor(scales, S), beta)
    if pooled:
        keys, values, _ = pool(k, v, layout, False, unpooled)
    running = pooled and is_causal
    tokens = (k, v) if unpooled or running else (None, None)
    call = Call(
        layout, shift, causal=is_causal, dropout_p=dropout_p, seed=seed, tokens=tokens, running=running, marks=marks
    )
    points = (keys, values) if pooled else (k, v)
    out, lse = forward(q, *points, v.shape[-1], call, shifted if shifted.numel() else None)
    return out, lse, keys, values, sums, shifted


@torch.library.custom_op("primaldual::ragged_tokens", mutates_args=())
def tokens_op(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: list[int], is_causal: bool, dropout_p: float,
    seed: Tensor | None, marks: Tensor | None = None, back: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return tokens_forward(q, k, v, beta, scales, is_causal, dropout_p, seed, marks, back)


register_flop_formula(torch.ops.primaldual.ragged_tokens)(ragged_flops.tokens)


@tokens_op.register_fake
def _(q, k, v, beta, scales, is_causal, dropout_p, seed, marks=None, back=True):  # type: ignore[no-untyped-def]
    B, H, S, D = k.shape
    out, lse = empty_like_heads(in_rows(q), v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
    rows = B * sum(-(-S // s) for s in scales if s > 1) if max(scales) > 1 and q.numel() else 0
    blocks = blocks_of(S)[1] if beta is not None and q.numel() else 0
    sums = q.new_empty(B, H, blocks, D, dtype=torch.float32)
    shifted = empty_like_heads(in_rows(q), D) if beta is not None and back else q.new_empty(0)
    return out, lse, k.new_empty(rows * D), v.new_empty(rows * v.shape[-1]), sums, shifted


def in_one_buffer(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether they are those of one buffer, [B, L, 3, H, D] in memory."""
    _, H, L, D = q.shape
    return q.shape == k.shape == v.shape and side_by_side((q, k, v), (3 * L * H * D, D, 3 * H * D, 1), H * D)


def tokens_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, out: Tensor, lse: Tensor, keys: Tensor,
    values: Tensor, scales: Sequence[int], is_causal: bool, dropout_p: float, seed: Tensor | None,
    marks: Tensor | None = None, together: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of q, k and v, in one buffer where `together`; and sums over the first, where there is β.

    The queries are those that the forward pass had, less their shift.
    """
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    B, H, S, D = k.shape
    DV = v.shape[-1]
    sums = q.new_empty(B, H, 0, D, dtype=torch.float32)
    if together:
        dq, dk, dv = q.new_empty(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        dq, dk, dv = empty_like_heads(q, D), empty_like_heads(k, D), empty_like_heads(v, DV)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), sums
    unpooled, pooled = _reading_tokens(scales), max(scales) > 1
    layout = layouts.pooled(tuple(scales), B, S, D, DV, unpooled > 0) if pooled else layouts.of_tokens(k, v)
    points = (keys, values) if pooled else (k, v)
    running = pooled and is_causal
    tokens = (k, v) if unpooled or running else (None, None)
    call = Call(layout, causal=is_causal, dropout_p=dropout_p, seed=seed, tokens=tokens, running=running, marks=marks)
    backward(grad, q, *points, out, lse, call, dk, dv, S, dq=dq)
    if beta is not None:  # what the mean's gradient adds to keys is the same for all of a window
        sums = sum_rows(dq)
        place(dk, dk, shift=Shift(sums, _factor(scales, S), beta, _shares(layout, q, k, v, scales)))
    return dq, dk, dv, sums


@torch.library.custom_op("primaldual::ragged_tokens_backward", mutates_args=())
def _tokens_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, out: Tensor, lse: Tensor, keys: Tensor,
    values: Tensor, scales: list[int], is_causal: bool, dropout_p: float, seed: Tensor | None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return tokens_gradients(grad, q, k, v, beta, out, lse, keys, values, scales, is_causal, dropout_p, seed, marks)


register_flop_formula(torch.ops.primaldual.ragged_tokens_backward)(ragged_flops.tokens_backward)


@_tokens_backward_op.register_fake
def _(grad, q, k, v, beta, *others):  # type: ignore[no-untyped-def]
    B, H, L, D = q.shape
    sums = q.new_empty(B, H, blocks_of(L)[1] if beta is not None and q.numel() else 0, D, dtype=torch.float32)
    return *(empty_like_heads(in_rows(x), x.shape[-1]) for x in (q, k, v)), sums


def _tokens_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, beta, scales, is_causal, dropout_p, seed, marks, _ = inputs
    out, lse, keys, values, sums, shifted = output
    ctx.mark_non_differentiable(lse, keys, values, sums, shifted)
    queries = q if beta is None else shifted
    ctx.save_for_backward(queries, k, v, beta, out, lse, keys, values, sums, seed, marks)
    ctx.settings = (scales, is_causal, dropout_p)


def _tokens_backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    q, k, v, beta, out, lse, keys, values, sums, seed, marks = ctx.saved_tensors
    scales, is_causal, dropout_p = ctx.settings
    dq, dk, dv, of_queries = _tokens_backward_op(
        grad, q, k, v, beta, out, lse, keys, values, scales, is_causal, dropout_p, seed, marks
    )
    dbeta = None
    if ctx.needs_input_grad[3]:
        dbeta = -_factor(scales, k.shape[2]) * (of_queries.sum(2) * sums.sum(2)).sum((0, 2))
    return dq, dk, dv, dbeta, *[None] * 6


tokens_op.register_autograd(differentiated_once(_tokens_backward), setup_context=_tokens_setup)


class _Tokens(torch.autograd.Function):
    """The same without the operator's dispatch, and gradients together where queries, keys and values are."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: tuple[int, ...], is_causal: bool,
        dropout_p: float, seed: Tensor | None, marks: Tensor | None = None, back: bool = True,
    ) -> Tensor:  # fmt: skip
        out, lse, keys, values, sums, shifted = tokens_forward(
            q, k, v, beta, scales, is_causal, dropout_p, seed, marks, back
        )
        queries = q if beta is None else shifted
        ctx.save_for_backward(queries, k, v, beta, out, lse, keys, values, sums, seed, marks)
        ctx.settings = (scales, is_causal, dropout_p, in_one_buffer(q, k, v))
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, out, lse, keys, values, sums, seed, marks = ctx.saved_tensors
        scales, is_causal, dropout_p, together = ctx.settings
        dq, dk, dv, of_queries = tokens_gradients(
            grad, q, k, v, beta, out, lse, keys, values, scales, is_causal, dropout_p, seed, marks, together
        )
        dbeta = None
        if ctx.needs_input_grad[3]:
            dbeta = dot_sums(of_queries, sums, -_factor(scales, k.shape[2]), torch.float32)
        return dq, dk, dv, dbeta, *[None] * 6


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: tuple[int, ...], is_causal: bool, dropout_p: float,
    seed: Tensor | None, marks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention over the tokens' means at every head's own scale, queries re-centred by β times the mean of these.

    marks (`marks`) say which of them a query of a sparse head keeps.
    """
    back = torch.is_grad_enabled()
    if traced():
        return tokens_op(q, k, v, beta, scales, is_causal, dropout_p, seed, marks, back)[0]
    library = native.library() if q.is_cuda and marks is None else None
    if library is not None and on_side_stream(q.device) and not has_tables(q, k, v, scales, is_causal, True):
        library = None  # a capture may follow: it asks for the tables, which Python makes here
    if library is not None:
        out = attend_compiled(library, q, k, v, beta, scales, is_causal, dropout_p, seed)
        if out is not None:
            return out
    return _Tokens.apply(q, k, v, beta, scales, is_causal, dropout_p, seed, marks, back)


def attend_compiled(
    library: ModuleType, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: tuple[int, ...],
    is_causal: bool, dropout_p: float, seed: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The same by the compiled part; None where it refuses."""
    kind, numbers = (0, is_causal, *scales), (dropout_p,)
    inputs = q, k, v, beta, seed
    return replay.attend(
        library, kind, numbers, inputs, lambda: _passes(scales, is_causal, dropout_p, in_one_buffer(q, k, v))
    )


def _passes(scales: tuple[int, ...], is_causal: bool, dropout_p: float, together: bool) -> replay.Passes:
    def forward(inputs: Any, back: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v, beta, seed = inputs
        out, *state, shifted = tokens_forward(q, k, v, beta, scales, is_causal, dropout_p, seed, back=back)
        return out, (q if beta is None else shifted, out, *state)

    def backward(
        grad: Tensor, inputs: Any, wanted: replay.Wanted, queries: Tensor, out: Tensor, lse: Tensor, keys: Tensor,
        values: Tensor, sums: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        _, k, v, beta, seed = inputs
        dq, dk, dv, of_queries = tokens_gradients(
            grad, queries, k, v, beta, out, lse, keys, values, scales, is_causal, dropout_p, seed, together=together
        )
        factor = -_factor(scales, k.shape[2])
        return dq, dk, dv, dot_sums(of_queries, sums, factor, torch.float32) if wanted[3] else None, None

    return replay.Passes(forward, backward)


def has_tables(q: Tensor, k: Tensor, v: Tensor, scales: tuple[int, ...], is_causal: bool, tokens_apart: bool) -> bool:
    """Whether the tables of such a call are on the device: only then can it be captured. For the last see `pooled`."""
    k, v = in_rows(k), in_rows(v)
    (B, _, S, D), DV = k.shape, v.shape[3]
    pooled = max(scales) > 1
    layout = layouts.pooled(scales, B, S, D, DV, tokens_apart and 1 in scales) if pooled else layouts.of_tokens(k, v)
    widest = max(q.shape[3], v.shape[3])
    return (layout, q.shape[0], q.shape[2], widest, q.dtype, is_causal, q.device) in ragged_work.work.kept
