"""A residual connection and the norm after it, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launching import launch_kernel
from .division import divided
from .dropout import Dropout, drop_arguments
from .sums import fold

MOMENTUM, EPS = 0.1, 1e-5


class Norm(NamedTuple):
    """What normalises: batch norm where there are running moments, else layer norm."""

    weight: Tensor
    bias: Tensor
    mean: Tensor | None
    variance: Tensor | None


def normalised(
    x: Tensor, a: Tensor, a_bias: Tensor, norm: Norm, drop: Dropout | None, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """norm(x + dropout(a + a_bias)); what was normalised; and its moments."""
    from . import norm_kernels as kernels

    of_batch = norm.mean is not None
    work = divided(x, 4)
    r, y = torch.empty_like(x), torch.empty_like(x)
    seed, numbers = drop_arguments(drop, x)
    sums = x.new_empty(work.members, work.runs, 2, work.width, dtype=torch.float32) if of_batch and training else x
    launch_kernel(
        kernels.add, work.grid, (x, a, a_bias, seed, norm.mean if of_batch else x, r, sums),
        (a_bias.stride(0), work.rows, work.span, *numbers, *work.shape, drop is not None, of_batch and training),
    )  # fmt: skip
    assert norm.weight.stride(0) == norm.bias.stride(0)
    if not of_batch:
        return y, r, layer_normalised(r, norm.weight, norm.bias, y)
    assert norm.mean is not None and norm.variance is not None
    if training:
        moments = x.new_empty(work.members, 2, work.width, dtype=torch.float32)
        launch_kernel(
            kernels.batch_moments, (-(-work.width // 16), work.members, 1), (sums, norm.mean, norm.variance, moments),
            (work.rows, work.runs, MOMENTUM, EPS, work.width, 16, 64),
        )  # fmt: skip
    else:
        moments = torch.stack((norm.mean, (norm.variance + EPS).rsqrt()), 1)
    work = divided(x, 8)
    launch_kernel(
        kernels.batch_normal, work.grid, (r, moments, norm.weight, norm.bias, y),
        (norm.weight.stride(0), work.rows, work.span, *work.shape),
    )  # fmt: skip
    return y, r, moments


def layer_normalised(r: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """Write the layer norm of r into y; its moments, [members, rows, 2]."""
    from . import norm_kernels as kernels

    warps = 8 if r.shape[-1] >= 512 else 4
    work = divided(r, 32 // warps, whole_rows=True)
    moments = r.new_empty(work.members, work.rows, 2, dtype=torch.float32)
    launch_kernel(
        kernels.layer_normal, work.grid, (r, weight, bias, y, moments),
        (weight.stride(0), work.rows, work.span, EPS, *work.shape), warps,
    )  # fmt: skip
    return moments


def normalised_backward(
    dy: Tensor,
    r: Tensor,
    moments: Tensor,
    weight: Tensor,
    of_batch: bool,
    drop: Dropout | None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a, a_bias, and of the norm's weight and bias; `beside` is one of what was normalised, where that
    is used elsewhere (of layer norm alone).
    """
    from . import norm_kernels as kernels

    dr = torch.empty_like(r)
    da = dr if drop is None else torch.empty_like(r)
    seed, numbers = drop_arguments(drop, r)
    if not of_batch:
        warps = 8 if r.shape[-1] >= 512 else 4
        work = divided(r, 16 // warps, whole_rows=True)
        sums = r.new_empty(work.members, work.runs, 3, work.width, dtype=torch.float32)
        launch_kernel(
            kernels.layer_backward, work.grid,
            (dy, r, moments, weight, seed, dy if beside is None else beside, dr, da, sums),
            (weight.stride(0), work.rows, work.span, *numbers, *work.shape, drop is not None, beside is not None),
            warps,
        )  # fmt: skip
        dbias, dweight, da_bias = fold(sums, torch.float32).unbind(1)
        return dr, da, da_bias, dweight, dbias
    work = divided(r, 6)
    sums = r.new_empty(work.members, work.runs, 2, work.width, dtype=torch.float32)
    launch_kernel(kernels.batch_sums, work.grid, (dy, r, moments, sums), (work.rows, work.span, *work.shape))
    found = fold(sums, torch.float32)
    work = divided(r, 4)
    da_sums = r.new_empty(work.members, work.runs, work.width, dtype=torch.float32)
    launch_kernel(
        kernels.batch_backward, work.grid, (dy, r, moments, found, weight, seed, dr, da, da_sums),
        (weight.stride(0), work.rows, work.span, *numbers, *work.shape, drop is not None),
    )  # fmt: skip
    return dr, da, fold(da_sums, r.dtype), found[:, 1], found[:, 0]
