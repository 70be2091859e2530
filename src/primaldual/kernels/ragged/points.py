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
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over points that lie in flat buffers, as the layout says: outputs and log-sum-exps.

    shift [B, H, D] is taken off the queries; bias [B, H, points] is added to the scores, and has a gradient; marks
    (`marks`) say which points a query of a sparse head keeps. `sink` [H] is the score of a point of each head whose
    value is zero.
    """
    numbers = as_integers(sorted(layout, key=lambda entry: -entry.points))
    keys, values = keys.contiguous(), values.contiguous()
    shift, bias, *own = (None if x is None else x.contiguous() for x in (shift, bias, *own))  # type: ignore[assignment]
    return points_op(q, keys, values, numbers, value_dim, shift, bias, *own, is_causal, dropout_p, seed, marks, sink)


@torch.library.custom_op("primaldual::ragged_points", mutates_args=())
def points_op(
    q: Tensor, keys: Tensor, values: Tensor, layout: list[int], value_dim: int, shift: Tensor | None,
    bias: Tensor | None, own_k: Tensor | None, own_v: Tensor | None, own_bias: Tensor | None, is_causal: bool,
    dropout_p: float, seed: Tensor | None, marks: Tensor | None = None, sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    off = Shift.of(shift)
    call = Call(of_integers(layout), off, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks=marks)
    out, lse = forward(in_rows(q), keys, values, value_dim, call)
    return (out, lse) if sink is None else _beside_sink(out, lse, sink)


def _beside_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs in place, and log-sum-exps with the sink in them: a factor for each query.

    With both the backward pass is that of a softmax over the points and the sink: weights are exp(score − lse), and
    what is taken off their gradients is out·grad, to which the sink, whose value is zero, adds nothing.
    """
    both = torch.logaddexp(lse, sink.unsqueeze(-1))
    out.mul_((lse - both).exp().unsqueeze(-1).to(out.dtype))
    return out, both


register_flop_formula(torch.ops.primaldual.ragged_points)(ragged_flops.points)


@points_op.register_fake
def _(q, keys, values, layout, value_dim, *others):  # type: ignore[no-untyped-def]
    return empty_like_heads(in_rows(q), value_dim), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("primaldual::ragged_points_backward", mutates_args=())
def _points_backward_op(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, layout: list[int],
    shift: Tensor | None, bias: Tensor | None, own_k: Tensor | None, own_v: Tensor | None, own_bias: Tensor | None,
    is_causal: bool, dropout_p: float, seed: Tensor | None, marks: Tensor | None = None, sink: Tensor | None = None,
    of_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    off = Shift.of(shift)
    call = Call(of_integers(layout), off, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks=marks)
    dk, dv = torch.empty_like(keys), torch.empty_like(values)
    found = backward(grad, in_rows(q), keys, values, out, lse, call, dk, dv, 0, of_bias=of_bias)
    dshift = None if shift is None else -found.q.sum(2, dtype=torch.float32)
    dsink = None
    if sink is not None:
        weight = (sink.unsqueeze(-1) - lse).exp()
        dsink = -(weight * (grad.float() * out.float()).sum(-1)).sum((0, 2))
    more = (dshift, found.own_k, found.own_v, dsink, found.bias, found.own_bias)
    dshift, down_k, down_v, dsink, dbias, down_bias = (q.new_empty(0) if x is None else x for x in more)
    return found.q, found.k, found.v, dshift, down_k, down_v, dsink, dbias, down_bias


register_flop_formula(torch.ops.primaldual.ragged_points_backward)(ragged_flops.points_backward)


@_points_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, q, keys, values, out, lse, layout, shift, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed,
    marks=None, sink=None, of_bias=False,
):  # fmt: skip
    def like(x: Tensor | None) -> Tensor:
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    dq = empty_like_heads(in_rows(q), q.shape[-1])
    biases = (bias, own_bias) if of_bias else (None, None)
    return dq, torch.empty_like(keys), torch.empty_like(values), *map(like, (shift, own_k, own_v, sink, *biases))


def _points_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, keys, values, layout, _, shift, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks, sink = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, keys, values, out, lse, shift, bias, own_k, own_v, own_bias, seed, marks, sink)
    ctx.settings = (layout, is_causal, dropout_p)


def _points_backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, keys, values, out, lse, shift, bias, own_k, own_v, own_bias, seed, marks, sink = ctx.saved_tensors
    layout, is_causal, dropout_p = ctx.settings
    of_bias, of_own_bias = ctx.needs_input_grad[6], ctx.needs_input_grad[9]
    dq, dk, dv, dshift, down_k, down_v, dsink, dbias, down_bias = _points_backward_op(
        grad, q, keys, values, out, lse, layout, shift, bias, own_k, own_v, own_bias, is_causal, dropout_p, seed, marks,
        sink, of_bias or of_own_bias,
    )  # fmt: skip
    dshift = None if shift is None else dshift
    down_k, down_v = (None, None) if own_k is None else (down_k, down_v)
    dsink = None if sink is None else dsink
    dbias, down_bias = dbias if of_bias else None, down_bias if of_own_bias else None
    return dq, dk, dv, None, None, dshift, dbias, down_k, down_v, down_bias, *[None] * 4, dsink


points_op.register_autograd(differentiated_once(_points_backward), setup_context=_points_setup)
