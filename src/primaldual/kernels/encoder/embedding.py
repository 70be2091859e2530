"""The embedding but for its product, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..derivatives import differentiated_once
from ..launching import MULTIPROCESSORS, launch_kernel, power_of_2
from .division import STAGES, columns_of
from .dropout import Dropout, drop_arguments


def embed(x: Tensor, bias: Tensor, positions: Tensor, factor: float, drop: Dropout | None) -> Tensor:
    """dropout(factor · (x + bias) + positions) of x [members, batch · length, width]."""
    return _Embed.apply(x, bias, positions, factor, drop)


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, positions: Tensor, factor: float, drop: Dropout | None) -> Tensor:
        from . import embedding_kernels

        members, rows, width = x.shape
        length = positions.shape[1]
        ctx.about = (length, factor, drop, bias.dtype, positions.dtype)
        y = torch.empty_like(x)
        grid, shape, warps = _by_steps(members, length, width)
        seed, numbers = drop_arguments(drop, x)
        launch_kernel(
            embedding_kernels.embed, grid, (x, bias, positions, seed, y),
            (bias.stride(0), positions.stride(0), rows // length, length, factor, *numbers, *shape, drop is not None),
            warps,
        )  # fmt: skip
        return y

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from . import embedding_kernels

        dy = gradients[0].contiguous()
        length, factor, drop, bias_dtype, dtype = ctx.about
        members, rows, width = dy.shape
        dx = torch.empty_like(dy)
        dpositions = dy.new_empty(members, length, width, dtype=torch.float32)
        grid, shape, warps = _by_steps(members, length, width)
        seed, numbers = drop_arguments(drop, dy)
        launch_kernel(
            embedding_kernels.embed_backward, grid, (dy, seed, dx, dpositions),
            (rows // length, length, factor, *numbers, *shape, drop is not None), warps,
        )  # fmt: skip
        return dx, (dpositions.sum(1) * factor).to(bias_dtype), dpositions.to(dtype), None, None


def _by_steps(
    members: int, length: int, width: int
) -> tuple[tuple[int, int, int], tuple[int, int, int, int], int]:  # fmt: skip
    """Programs, each with some steps of all series; D, BR, BD and STAGES; and warps: eight elements a thread."""
    columns = columns_of(width)
    share = members * length * width // (4 * MULTIPROCESSORS)
    elements = min(1024, max(256, power_of_2(share + 1) // 2))
    tile = max(1, elements // columns)
    warps = max(1, tile * columns // 256)
    return (-(-length // tile), -(-width // columns), members), (width, tile, columns, STAGES), warps
