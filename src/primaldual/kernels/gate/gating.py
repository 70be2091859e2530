"""Outputs of heads times the sigmoid of their gates: an autograd function of one launch each way."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..launching import empty_like_heads, in_rows, launch_kernel, power_of_2, strides_of

ROWS = 64
"""Rows of a program, of a token's heads after one another."""


def gated(x: Tensor, g: Tensor) -> Tensor:
    """x ⊙ σ(g) for x [B, H, L, D] and g [B, H, L, 1 or D], in float32 inside and rounded once."""
    out: Tensor = _Gated.apply(x, g)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(x, g)
        x, g = in_rows(x), in_rows(g)
        out = empty_like_heads(x, x.shape[-1])
        launch_kernel(_kernels().gate, _grid(x), (x, g, out), (*strides_of(x, g, out), *_sizes(x, g)))
        return out

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor]:
        x, g = ctx.saved_tensors
        if torch.is_grad_enabled():  # which is to be differentiated again: in torch, which can be
            return _gradients(up, x, g)
        up, x, g = in_rows(up), in_rows(x), in_rows(g)
        dx, dg = empty_like_heads(x, x.shape[-1]), empty_like_heads(g, g.shape[-1])
        launch_kernel(
            _kernels().gate_backward, _grid(x), (up, x, g, dx, dg), (*strides_of(up, x, g, dx, dg), *_sizes(x, g))
        )
        return dx, dg


def _gradients(up: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    wide, level = up.float(), g.float().sigmoid()
    dg = (wide * x.float()).sum_to_size(g.shape) * level * (1 - level)
    return (wide * level).to(x.dtype), dg.to(g.dtype)


def _grid(x: Tensor) -> tuple[int, int, int]:
    return -(-x.shape[2] * x.shape[1] // ROWS), x.shape[0], 1


def _sizes(x: Tensor, g: Tensor) -> tuple[object, ...]:
    _, heads, length, dim = x.shape
    return length, heads, dim, power_of_2(dim), ROWS, g.shape[-1] == dim


@functools.cache
def _kernels() -> ModuleType:
    """Imported where they are launched: not everybody has Triton."""
    from . import kernels

    return kernels
