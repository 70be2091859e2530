"""Depth-wise convolutions of heads along the tokens: an autograd function of one launch forward and two backward."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..launching import empty_like_heads, in_rows, launch_kernel, power_of_2, strides_of

MOST_TAPS = 16
"""Each is a read of a row, and a sum of its own on the way back."""

ROWS = 32
"""Tokens that a program has at a time."""

STEPS = 16
"""So often, where it sums over them."""


def convolved(x: Tensor, taps: Tensor, left: int) -> Tensor:
    """Σ_t w_t ⊙ x_{i+t−left} for x [B, H, L, D] and taps [H, D, size]; beyond the ends x is zero."""
    out: Tensor = _Convolved.apply(x, taps, left, False)
    return out


class _Convolved(torch.autograd.Function):
    """Linear in x and in w: what comes back to x is a convolution, what comes back to w a correlation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, left: int, back: bool) -> Tensor:
        ctx.save_for_backward(x, taps)
        ctx.settings = left, back
        x, (_, heads, length, dim) = in_rows(x), x.shape
        out = empty_like_heads(x, dim)
        launch_kernel(
            _kernels().convolve, (-(-length // ROWS), heads, x.shape[0]), (x, taps, out),
            (*strides_of(x, out), *taps.stride(), length, left, taps.shape[-1], dim, power_of_2(dim), ROWS, back),
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        x, taps = ctx.saved_tensors
        left, back = ctx.settings
        size = taps.shape[-1]
        dx = _Convolved.apply(up, taps, size - 1 - left, not back) if ctx.needs_input_grad[0] else None
        dtaps = None
        if ctx.needs_input_grad[1]:
            found = _Correlated.apply(up, x, left, size)
            dtaps = (found.flip(-1) if back else found).to(taps.dtype)
        return dx, dtaps, None, None


class _Correlated(torch.autograd.Function):
    """Σ_i up_i ⊙ x_{i+t−left}, over the batch, too: [H, D, size] in float32."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, x: Tensor, left: int, size: int) -> Tensor:
        ctx.save_for_backward(up, x)
        ctx.left = left
        up, x, (batch, heads, length, dim) = in_rows(up), in_rows(x), x.shape
        spans = -(-length // (ROWS * STEPS))
        found = x.new_empty(batch, heads, spans, size, dim, dtype=torch.float32)
        launch_kernel(
            _kernels().correlate, (spans, heads, batch), (up, x, found),
            (*strides_of(up, x), length, spans, left, size, power_of_2(size), dim, power_of_2(dim), ROWS, STEPS),
        )  # fmt: skip
        return found.sum((0, 2)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        up, x = ctx.saved_tensors
        size = grad.shape[-1]
        return (
            _Convolved.apply(x, grad, ctx.left, False), _Convolved.apply(up, grad, size - 1 - ctx.left, True),
            None, None,
        )  # fmt: skip


@functools.cache
def _kernels() -> ModuleType:
    """Imported where they are launched: not everybody has Triton."""
    from . import kernels

    return kernels
