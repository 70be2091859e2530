"""The ragged kernels over points that lie in flat buffers, as a layout says: an operator of torch, with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..derivatives import differentiated_once
from ..launching import empty_like_heads, in_rows
from . import flops as ragged_flops
from .launch import Call, backward, forward
from .layout import HeadLayout, as_integers, of_integers
from .passes import Shift


def attend_points(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Sequence[HeadLayout],
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

    shift [B, H, D] is taken off the queries; bias [B, H, points] is added to the scores; marks (`marks`) say
    which points a query of a sparse head keeps.
    """
    numbers = as_integers(sorted(layout, key=lambda entry: -entry.points))
    keys, values = keys.contiguous(), values.contiguous()
    shift, bias, *own = (None if x is None else x.contiguous() for x in (shift, bias, *own))  # type: ignore[assignment]
    return points_op(q, keys, values, numbers, value_dim, shift, bias, *own, is_causal, dropout_p, seed, marks)


@torch.library.custom_op("primaldual::ragged_points", mutates_args=())
def points_op(
    q: Tensor, keys: Tensor, values: Tensor, layout: list[int], value_dim: int, shift: Tensor | None,
    bias: Tensor | None, own_k: Tensor | None, own_v: Tensor | None, own_bias: Tensor | None, is_causal: bool,
    dropout_p: float, seed: Tensor | None, marks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    off = Shift.of(shift)
    call = Call(of_integers(layout), off, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks=marks)
    return forward(in_rows(q), keys, values, value_dim, call)


register_flop_formula(torch.ops.primaldual.ragged_points)(ragged_flops.points)


@points_op.register_fake
def _(q, keys, values, layout, value_dim, *others):  # type: ignore[no-untyped-def]
    return empty_like_heads(in_rows(q), value_dim), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("primaldual::ragged_points_backward", mutates_args=())
def _points_backward_op(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, layout: list[int],
    shift: Tensor | None, bias: Tensor | None, own_k: Tensor | None, own_v: Tensor | None, own_bias: Tensor | None,
    is_causal: bool, dropout_p: float, seed: Tensor | None, marks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    off = Shift.of(shift)
    call = Call(of_integers(layout), off, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks=marks)
    dk, dv = torch.empty_like(keys), torch.empty_like(values)
    found = backward(grad, in_rows(q), keys, values, out, lse, call, dk, dv, 0)
    dshift = None if shift is None else -found.q.sum(2, dtype=torch.float32)
    dshift, down_k, down_v = (q.new_empty(0) if x is None else x for x in (dshift, found.own_k, found.own_v))
    return found.q, found.k, found.v, dshift, down_k, down_v


register_flop_formula(torch.ops.primaldual.ragged_points_backward)(ragged_flops.points_backward)


@_points_backward_op.register_fake
def _(grad, q, keys, values, out, lse, layout, shift, bias, own_k, own_v, *others):  # type: ignore[no-untyped-def]
    def like(x: Tensor | None) -> Tensor:
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    dq = empty_like_heads(in_rows(q), q.shape[-1])
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


points_op.register_autograd(differentiated_once(_points_backward), setup_context=_points_setup)
