"""The ragged kernels as operators of torch, with gradients.

`points_op`: the points of every head lie in flat buffers, as a layout says. `tokens_op`: keys and values are those of
the tokens; mean pooling and re-centring happen inside, and gradients go straight to the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import native, ragged_recipe
from .launching import in_rows
from .passes import pool, unpool
from .ragged_launch import Call, backward, forward, output
from .ragged_work import Layout, worked


def attend_points(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Sequence[Layout],
    value_dim: int,
    *,
    shift: Tensor | None = None,
    bias: Tensor | None = None,
    own: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    is_causal: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over points that lie in flat buffers, as the layout says: outputs and log-sum-exps.

    shift [B, H, D] is taken off the queries; bias [B, H, points] is added to the scores; marks (`ragged_marks`) say
    which points a query of a sparse head keeps.
    """
    flat = [number for head in sorted(layout, key=lambda h: -h.points) for number in head]
    keys, values = keys.contiguous(), values.contiguous()
    shift, bias, *own = (None if x is None else x.contiguous() for x in (shift, bias, *own))  # type: ignore[assignment]
    return points_op(q, keys, values, flat, value_dim, shift, bias, *own, is_causal, dropout_p, seed, marks)


@torch.library.custom_op("primaldual::ragged_points", mutates_args=())
def points_op(
    q: Tensor, keys: Tensor, values: Tensor, layout: list[int], value_dim: int, shift: Tensor | None,
    bias: Tensor | None, own_k: Tensor | None, own_v: Tensor | None, own_bias: Tensor | None, is_causal: bool,
    dropout_p: float, seed: Tensor | None, marks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = Call(tuple(layout), shift, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks=marks)
    return forward(in_rows(q), keys, values, value_dim, call)


@points_op.register_fake
def _(q, keys, values, layout, value_dim, *others):  # type: ignore[no-untyped-def]
    return output(in_rows(q), value_dim), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("primaldual::ragged_points_backward", mutates_args=())
def _points_backward_op(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, layout: list[int],
    shift: Tensor | None, bias: Tensor | None, own_k: Tensor | None, own_v: Tensor | None, own_bias: Tensor | None,
    is_causal: bool, dropout_p: float, seed: Tensor | None, marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = Call(tuple(layout), shift, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks=marks)
    dk, dv = torch.empty_like(keys), torch.empty_like(values)
    found = backward(grad, in_rows(q), keys, values, out, lse, call, dk, dv, 0)
    shift_, own_k_, own_v_ = (q.new_empty(0) if x is None else x for x in (found.shift, found.own_k, found.own_v))
    return found.q, found.k, found.v, shift_, own_k_, own_v_


@_points_backward_op.register_fake
def _(grad, q, keys, values, out, lse, layout, shift, bias, own_k, own_v, *others):  # type: ignore[no-untyped-def]
    def like(x: Tensor | None) -> Tensor:
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    dq = output(in_rows(q), q.shape[-1])
    return dq, torch.empty_like(keys), torch.empty_like(values), like(shift), like(own_k), like(own_v)


def _points_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, keys, values, layout, _, shift, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, keys, values, out, lse, shift, bias, own_k, own_v, own_bias, seed, marks)
    ctx.settings = (layout, is_causal, dropout_p)


def _points_backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, keys, values, out, lse, shift, bias, own_k, own_v, own_bias, seed, marks = ctx.saved_tensors
    layout, is_causal, dropout_p = ctx.settings
    dq, dk, dv, dshift, down_k, down_v = _points_backward_op(
        grad, q, keys, values, out, lse, layout, shift, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks
    )
    dshift = None if shift is None else dshift
    down_k, down_v = (None, None) if own_k is None else (down_k, down_v)
    return dq, dk, dv, None, None, dshift, None, down_k, down_v, *[None] * 5


points_op.register_autograd(_points_backward, setup_context=_points_setup)


@functools.lru_cache(maxsize=256)
def packed(
    scales: tuple[int, ...], batch: int, tokens: int, dim: int, value_dim: int, apart: bool = False
) -> tuple[int, ...]:
    """The layout of pooled heads, one after the other, longest first.

    Where those with windows of one token are `apart`, they have no place: they are given the tokens themselves.
    """
    numbers: list[int] = []
    before = 0
    for head in sorted(range(len(scales)), key=lambda h: scales[h]):
        points = -(-tokens // scales[head])
        at = batch * before
        numbers += [head, points, scales[head], at * dim, points * dim, dim]
        numbers += [at * value_dim, points * value_dim, value_dim]
        before += 0 if apart and scales[head] == 1 else points
    return tuple(numbers)


def _head_at(x: Tensor, head: int) -> tuple[int, int, int]:
    return head * x.stride(1), x.stride(0), x.stride(2)


def _in_place(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The layout of heads that are fitted to the tokens themselves."""
    return tuple(
        number for head in range(k.shape[1]) for number in (head, k.shape[2], 1, *_head_at(k, head), *_head_at(v, head))
    )


def _apart(scales: Sequence[int], beta: Tensor | None) -> int:
    """How many heads read the tokens themselves beside others that are pooled.

    Not with a mean: that waits for the pooling anyway, and its gradient wants all points in one place.
    """
    return scales.count(1) if beta is None and max(scales) > 1 else 0


def _tokens(k: Tensor, v: Tensor, scales: Sequence[int], beta: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (k, v) if _apart(scales, beta) else (None, None)


def _tokens_forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: Sequence[int], is_causal: bool, dropout_p: float,
    seed: Tensor | None, marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, and what the backward pass needs: the points' keys and values, and their mean (empty if not needed)."""
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    B, _, S, D = k.shape
    pooled = max(scales) > 1
    none = q.new_empty(0, dtype=torch.float32)
    if q.numel() == 0:
        return (
            output(q, v.shape[-1]),
            q.new_empty(q.shape[:3], dtype=torch.float32),
            k.new_empty(0),
            v.new_empty(0),
            none,
        )
    mean = shift = None
    if pooled:
        apart = _apart(scales, beta)
        layout = packed(tuple(scales), B, S, D, v.shape[-1], apart > 0)
        keys, values, mean = pool(k, v, layout, beta is not None, apart)
    else:
        layout, keys, values = _in_place(k, v), k, v
        mean = None if beta is None else k.mean(2, dtype=torch.float32)
    if beta is not None:
        assert mean is not None
        shift = mean * beta[:, None]
    tokens = _tokens(k, v, scales, beta)
    call = Call(layout, shift, causal=is_causal, dropout_p=dropout_p, seed=seed, tokens=tokens, marks=marks)
    out, lse = forward(q, keys, values, v.shape[-1], call)
    if not pooled:
        keys, values = k.new_empty(0), v.new_empty(0)
    return out, lse, keys, values, none if mean is None else mean


@torch.library.custom_op("primaldual::ragged_tokens", mutates_args=())
def tokens_op(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: list[int], is_causal: bool, dropout_p: float,
    seed: Tensor | None, marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _tokens_forward(q, k, v, beta, scales, is_causal, dropout_p, seed, marks)


@tokens_op.register_fake
def _(q, k, v, beta, scales, *others):  # type: ignore[no-untyped-def]
    B, H, S, D = k.shape
    out, lse = output(in_rows(q), v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
    rows = 0
    if max(scales) > 1 and q.numel():
        rows = B * sum(-(-S // s) for s in scales if s > 1 or beta is not None)
    mean = q.new_empty((B, H, D) if beta is not None and q.numel() else (0,), dtype=torch.float32)
    return out, lse, k.new_empty(rows * D), v.new_empty(rows * v.shape[-1]), mean


def _room(q: Tensor, k: Tensor, v: Tensor, together: bool) -> tuple[Tensor, ...]:
    """For gradients: thirds of one buffer where it is wanted and q, k and v are that, [B, L, 3, H, D] in memory."""
    B, H, L, D = q.shape
    shape, strides, step = q.shape, (3 * L * H * D, D, 3 * H * D, 1), H * D * q.element_size()
    if together and all(
        x.shape == shape and x.stride() == strides and x.data_ptr() == q.data_ptr() + i * step
        for i, x in enumerate((q, k, v))
    ):
        return q.new_empty(B, L, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return output(q, D), output(k, D), output(v, v.shape[-1])


def _tokens_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, out: Tensor, lse: Tensor, keys: Tensor,
    values: Tensor, mean: Tensor, scales: Sequence[int], is_causal: bool, dropout_p: float, seed: Tensor | None,
    marks: Tensor | None = None, together: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of q, k, v and beta. They may share a buffer where `together` is set; an operator's results must not."""
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    B, _, S, D = k.shape
    DV = v.shape[-1]
    none = q.new_empty(0, dtype=torch.float32)
    dq, dk, dv = _room(q, k, v, together)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), none if beta is None else torch.zeros_like(beta)
    pooled = max(scales) > 1
    if pooled:
        layout = packed(tuple(scales), B, S, D, DV, _apart(scales, beta) > 0)
    else:
        layout, keys, values = _in_place(k, v), k, v
    shift = None if beta is None else mean * beta[:, None]
    tokens = _tokens(k, v, scales, beta)
    call = Call(layout, shift, causal=is_causal, dropout_p=dropout_p, seed=seed, tokens=tokens, marks=marks)
    if beta is None:
        backward(grad, q, keys, values, out, lse, call, dk, dv, S, dq=dq)
        return dq, dk, dv, none
    if not pooled:
        found = backward(grad, q, keys, values, out, lse, call, dk, dv, S, dq=dq)
        assert found.shift is not None
        dk += (found.shift * (beta / S)[:, None]).unsqueeze(2).to(dk.dtype)
        return dq, dk, dv, (found.shift * mean).sum((0, 2))
    dkeys, dvalues = torch.empty_like(keys), torch.empty_like(values)
    found = backward(grad, q, keys, values, out, lse, call, dkeys, dvalues, 0, dq=dq)
    assert found.shift is not None
    dmean = found.shift * beta[:, None]
    unpool(dkeys, dvalues, dmean, dk, dv, layout)
    return dq, dk, dv, (found.shift * mean).sum((0, 2))


@torch.library.custom_op("primaldual::ragged_tokens_backward", mutates_args=())
def _tokens_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, out: Tensor, lse: Tensor, keys: Tensor,
    values: Tensor, mean: Tensor, scales: list[int], is_causal: bool, dropout_p: float, seed: Tensor | None,
    marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _tokens_gradients(
        grad, q, k, v, beta, out, lse, keys, values, mean, scales, is_causal, dropout_p, seed, marks
    )  # fmt: skip


@_tokens_backward_op.register_fake
def _(grad, q, k, v, beta, *others):  # type: ignore[no-untyped-def]
    dbeta = q.new_empty(0 if beta is None else beta.shape, dtype=torch.float32)
    return *(output(in_rows(x), x.shape[-1]) for x in (q, k, v)), dbeta


def _tokens_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, beta, scales, is_causal, dropout_p, seed, marks = inputs
    out, lse, keys, values, mean = output
    ctx.mark_non_differentiable(lse, keys, values, mean)
    ctx.save_for_backward(q, k, v, beta, out, lse, keys, values, mean, seed, marks)
    ctx.settings = (scales, is_causal, dropout_p)


def _tokens_backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    q, k, v, beta, out, lse, keys, values, mean, seed, marks = ctx.saved_tensors
    scales, is_causal, dropout_p = ctx.settings
    dq, dk, dv, dbeta = _tokens_backward_op(
        grad, q, k, v, beta, out, lse, keys, values, mean, scales, is_causal, dropout_p, seed, marks
    )
    return dq, dk, dv, None if beta is None else dbeta, *[None] * 5


tokens_op.register_autograd(_tokens_backward, setup_context=_tokens_setup)


class _Tokens(torch.autograd.Function):
    """The same without the operator's dispatch."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: tuple[int, ...], is_causal: bool,
        dropout_p: float, seed: Tensor | None, marks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out, lse, keys, values, mean = _tokens_forward(q, k, v, beta, scales, is_causal, dropout_p, seed, marks)
        ctx.save_for_backward(q, k, v, beta, out, lse, keys, values, mean, seed, marks)
        ctx.settings = (scales, is_causal, dropout_p)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, out, lse, keys, values, mean, seed, marks = ctx.saved_tensors
        scales, is_causal, dropout_p = ctx.settings
        dq, dk, dv, dbeta = _tokens_gradients(
            grad, q, k, v, beta, out, lse, keys, values, mean, scales, is_causal, dropout_p, seed, marks, together=True
        )
        return dq, dk, dv, None if beta is None else dbeta, *[None] * 5


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: tuple[int, ...], is_causal: bool, dropout_p: float,
    seed: Tensor | None, marks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention over the tokens' means at every head's own scale, queries re-centred by β times the mean of these.

    marks (`ragged_marks`) say which of them a query of a sparse head keeps.
    """
    if traced():
        return tokens_op(q, k, v, beta, scales, is_causal, dropout_p, seed, marks)[0]
    if q.is_cuda and marks is None and (library := native.library()) is not None:
        out = attend_compiled(library, q, k, v, beta, scales, is_causal, dropout_p, seed)
        if out is not None:
            return out
    return _Tokens.apply(q, k, v, beta, scales, is_causal, dropout_p, seed, marks)


def attend_compiled(
    library: ModuleType, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scales: tuple[int, ...],
    is_causal: bool, dropout_p: float, seed: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The same by the compiled part, which learns a kind of call when it first sees it; None where it refuses."""
    out = library.attend(q, k, v, beta, seed, scales, is_causal, dropout_p)
    if out is None:
        tensors = q, k, v, beta, seed
        ragged_recipe.learn(library, _tokens_forward, _tokens_gradients, tensors, scales, is_causal, dropout_p)
        out = library.attend(q, k, v, beta, seed, scales, is_causal, dropout_p)
    return out if isinstance(out, Tensor) else None


def known(q: Tensor, k: Tensor, v: Tensor, scales: tuple[int, ...], is_causal: bool, apart: bool) -> bool:
    """Whether a call like this was made before: only then can it be captured. For `apart` see `packed`."""
    k, v = in_rows(k), in_rows(v)
    (B, _, S, D), DV = k.shape, v.shape[3]
    layout = packed(scales, B, S, D, DV, apart and 1 in scales) if max(scales) > 1 else _in_place(k, v)
    widest = max(q.shape[3], v.shape[3])
    return (layout, q.shape[0], q.shape[2], widest, q.dtype, is_causal, q.device) in worked


def traced() -> bool:
    """Whether something looks at the operators: a compiler, a dispatch mode such as a FLOP counter, a transform.

    Otherwise the operator's dispatch is left out, which costs more than a launch.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


from .. import flops  # noqa: E402, F401  # registers what the operators above count as
