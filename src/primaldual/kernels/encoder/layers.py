"""The layers of an encoder with gradients: products by the library, what lies between them in few passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..derivatives import differentiated_once
from ..launching import launch_kernel
from .division import divided
from .dropout import Dropout, drop_arguments
from .norms import Norm, layer_normalised, normalised, normalised_backward
from .sums import fold, row_sum, weight_gradient


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, of [members, rows, width]."""
    return _Linear.apply(x, weight, bias)[0]


def linear_beside(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`linear`, and x again, for `add_norm` and nothing else: to the gradient from there dx is added in place."""
    return _Linear.apply(x, weight, bias)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)
        if bias is None:
            return torch.bmm(x, weight.mT), x.view_as(x)
        y = x.new_empty(*x.shape[:2], weight.shape[1])
        for i in range(len(x)):  # the library adds a bias on the way, but to one product, not to a batch of them
            torch.addmm(bias[i], x[i], weight[i].T, out=y[i])
        return y, x.view_as(x)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        dy, dx = gradients
        if dy is None:
            return dx, None, None
        dy = dy.contiguous()
        if ctx.needs_input_grad[0]:
            dx = torch.bmm(dy, weight) if dx is None else dx.contiguous().baddbmm_(dy, weight)
        return dx, weight_gradient(dy, x), row_sum(dy) if ctx.has_bias else None


def add_norm(
    x: Tensor, a: Tensor, weight: Tensor, bias: Tensor, norm: Norm, drop: Dropout | None, training: bool
) -> Tensor:
    """norm(x + dropout(a · weightᵀ + bias)), of [members, rows, width]; gradients in training alone."""
    return _AddNorm.apply(x, a, weight, bias, *norm, drop, training)[0]


def add_norm_beside(
    x: Tensor, a: Tensor, weight: Tensor, bias: Tensor, norm: Norm, drop: Dropout | None, training: bool
) -> tuple[Tensor, Tensor]:
    """`add_norm` with a layer norm, and the sum that was normalised: a block with its norms first goes on with it."""
    return _AddNorm.apply(x, a, weight, bias, *norm, drop, training)


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor,
        mean: Tensor | None, variance: Tensor | None, drop: Dropout | None, training: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        norm = Norm(norm_weight, norm_bias, mean, variance)
        branch = torch.bmm(a, weight.mT)
        y, r, moments = normalised(x, branch, bias, norm, drop, training)
        ctx.save_for_backward(a, weight, r, moments, norm_weight)
        ctx.about = (mean is not None, drop, bias.dtype)
        ctx.set_materialize_grads(False)
        if not training:
            ctx.mark_non_differentiable(y, r)
        return y, r

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        a, weight, r, moments, norm_weight = ctx.saved_tensors
        of_batch, drop, dtype = ctx.about
        dy, beside = _both(gradients, r, of_batch)
        dr, da, dbias, *of_norm = normalised_backward(dy, r, moments, norm_weight, of_batch, drop, beside)
        return (
            dr, torch.bmm(da, weight), weight_gradient(da, a), dbias.to(dtype), *of_norm, None, None, None, None
        )  # fmt: skip


def norm_beside(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The layer norm of x [members, rows, width], and x again."""
    return _NormBeside.apply(x, norm.weight, norm.bias)


class _NormBeside(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        assert weight.stride(0) == bias.stride(0)
        y = torch.empty_like(x)
        ctx.save_for_backward(x, layer_normalised(x, weight, bias, y), weight)
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, moments, weight = ctx.saved_tensors
        dy, beside = _both(gradients, x, False)
        dx, _, _, dweight, dbias = normalised_backward(dy, x, moments, weight, False, None, beside)
        return dx, dweight, dbias


def feed_forward(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, norm: Norm,
    drops: tuple[Dropout | None, Dropout | None], training: bool,
) -> Tensor:  # fmt: skip
    """norm(x + dropout(dropout(gelu(x · weight1ᵀ + bias1)) · weight2ᵀ + bias2)); gradients in training alone."""
    return _FeedForward.apply(x, None, weight1, bias1, weight2, bias2, *norm, *drops, training)[0]


def feed_forward_beside(
    x: Tensor, residual: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, norm: Norm,
    drops: tuple[Dropout | None, Dropout | None], training: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`feed_forward` with a layer norm, of x beside a residual of its own; and the sum that was normalised."""
    return _FeedForward.apply(x, residual, weight1, bias1, weight2, bias2, *norm, *drops, training)


class _FeedForward(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor,
        norm_weight: Tensor, norm_bias: Tensor, mean: Tensor | None, variance: Tensor | None, drop1: Dropout | None,
        drop2: Dropout | None, training: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from . import activation_kernels

        h = torch.bmm(x, weight1.mT)
        hidden = torch.empty_like(h)
        work = divided(h, 8)
        seed, numbers = drop_arguments(drop1, h)
        launch_kernel(
            activation_kernels.activate, work.grid, (h, bias1, seed, hidden),
            (bias1.stride(0), work.rows, work.span, *numbers, *work.shape, drop1 is not None),
        )  # fmt: skip
        norm = Norm(norm_weight, norm_bias, mean, variance)
        branch = torch.bmm(hidden, weight2.mT)
        y, r, moments = normalised(x if residual is None else residual, branch, bias2, norm, drop2, training)
        ctx.save_for_backward(x, weight1, bias1, weight2, h, hidden, r, moments, norm_weight)
        ctx.about = (mean is not None, drop1, drop2, residual is not None)
        ctx.set_materialize_grads(False)
        if not training:
            ctx.mark_non_differentiable(y, r)
        return y, r

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        from . import activation_kernels

        x, weight1, bias1, weight2, h, hidden, r, moments, norm_weight = ctx.saved_tensors
        of_batch, drop1, drop2, has_residual = ctx.about
        dy, beside = _both(gradients, r, of_batch)
        dr, da, dbias2, *of_norm = normalised_backward(dy, r, moments, norm_weight, of_batch, drop2, beside)
        if drop2 is None and not has_residual:
            da = dr.clone()  # dr is added to below
        dhidden = torch.bmm(da, weight2)
        dh = torch.empty_like(h)
        work = divided(h, 6)
        sums = h.new_empty(work.members, work.runs, work.width, dtype=torch.float32)
        seed, numbers = drop_arguments(drop1, h)
        launch_kernel(
            activation_kernels.activate_backward, work.grid, (dhidden, h, bias1, seed, dh, sums),
            (bias1.stride(0), work.rows, work.span, *numbers, *work.shape, drop1 is not None),
        )  # fmt: skip
        dweight2, dweight1 = weight_gradient(da, hidden), weight_gradient(dh, x)
        dx, dresidual = (torch.bmm(dh, weight1), dr) if has_residual else (dr.baddbmm_(dh, weight1), None)
        return (
            dx, dresidual, dweight1, fold(sums, bias1.dtype), dweight2, dbias2.to(bias1.dtype), *of_norm, None, None,
            None, None, None,
        )  # fmt: skip


def _both(gradients: tuple[Tensor | None, ...], r: Tensor, of_batch: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of the norm, and of the sum beside it where there is one."""
    dy, beside = gradients
    if of_batch and beside is not None:
        raise NotImplementedError("what a batch norm normalises has no gradient of its own here")
    return torch.zeros_like(r) if dy is None else dy.contiguous(), None if beside is None else beside.contiguous()
