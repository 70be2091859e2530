"""The model's head, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..derivatives import differentiated_once
from ..launching import MULTIPROCESSORS, launch_kernel, power_of_2, precision_asked
from .division import STAGES
from .dropout import Dropout, drop_arguments
from .sums import fold


def head(z: Tensor, weight: Tensor, bias: Tensor, padding: Tensor | None, drop: Dropout | None) -> Tensor:
    """dropout(gelu(z)), 0 at padded steps, flattened and multiplied: z [members, cases, length, width]."""
    return _Head.apply(z, weight, bias, padding, drop)


class _Head(Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, padding: Tensor | None, drop: Dropout | None
    ) -> Tensor:
        from . import head_kernels

        members, cases, length, width = z.shape
        outputs = weight.shape[1]
        block, columns = max(16, power_of_2(outputs)), 64
        span = -(-length * width // max(1, 5 * MULTIPROCESSORS // members))
        span = -(-span // columns) * columns
        runs = -(-length * width // span)
        parts = z.new_empty(members, runs, cases, outputs, dtype=torch.float32)
        seed, numbers = drop_arguments(drop, z)
        tile = min(64, max(16, power_of_2(cases)))
        launch_kernel(
            head_kernels.head, (runs, -(-cases // tile), members),
            (z, weight, z if padding is None else padding, seed, parts),
            (weight.stride(0), cases, length, outputs, span, *numbers, width, tile, columns, block, drop is not None,
             padding is not None, _precision(weight)),
            stages=STAGES,
        )  # fmt: skip
        ctx.save_for_backward(z, weight, padding)
        ctx.about = (drop, bias.dtype)
        return (fold(parts, torch.float32) + bias.unsqueeze(1)).to(weight.dtype)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from . import head_kernels

        z, weight, padding = ctx.saved_tensors
        drop, dtype = ctx.about
        dscores = gradients[0].contiguous()
        members, cases, length, width = z.shape
        outputs = weight.shape[1]
        dz, dweight = torch.empty_like(z), torch.empty_like(weight, memory_format=torch.contiguous_format)
        seed, numbers = drop_arguments(drop, z)
        columns = 128 if outputs <= 16 else 64
        launch_kernel(
            head_kernels.head_backward, (-(-length * width // columns), members, 1),
            (z, weight, z if padding is None else padding, seed, dscores, dz, dweight),
            (weight.stride(0), cases, length, outputs, *numbers, width, 16, columns, max(16, power_of_2(outputs)),
             drop is not None, padding is not None, _precision(weight)),
            stages=STAGES,
        )  # fmt: skip
        return dz, dweight, dscores.sum(1).to(dtype), None, None


def _precision(x: Tensor) -> str:
    return precision_asked() if x.is_cuda else "ieee"
