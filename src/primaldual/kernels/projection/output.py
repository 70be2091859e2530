"""The output projection: torch's linear layer; in a CUDA graph, the parts of its way back run side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .. import launching
from ..derivatives import differentiated_once
from ..launching import captured, launches
from .launching import forked
from .recentred import as_linear, column_sums, total


def project(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) for x [B, N, E]."""
    ours = (
        type(layer) is nn.Linear
        and not torch.compiler.is_compiling()
        and launches(x) and (captured(x) or launching.on_cpu()) and torch.is_grad_enabled() and x.numel() > 0
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )  # fmt: skip
    return _Linear.apply(*as_linear(x, layer.weight, layer.bias)) if ours else layer(x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        want_x, want_weight, want_bias = ctx.needs_input_grad
        grad = grad.contiguous()
        rows = grad.flatten(0, 1)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_x else None
        dweight = torch.empty_like(weight) if want_weight else None
        dbias = torch.empty(weight.shape[0], dtype=ctx.bias_dtype, device=x.device) if want_bias else None
        fork = forked(grad, 3)
        with fork.part(0):
            if dx is not None:
                torch.mm(rows, weight, out=dx.view(-1, x.shape[-1]))
        with fork.part(1):
            if dbias is not None:
                total(column_sums(grad), dbias)
        if dweight is not None:
            torch.mm(rows.T, x.reshape(-1, x.shape[-1]), out=dweight)
        fork.join()
        return dx, dweight, dbias
