"""Sums over rows, and products that are such sums."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launching import MULTIPROCESSORS, launch_kernel, power_of_2
from .division import divided


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """[members, out, in] from [members, rows, out] and [members, rows, in].

    A product of few entries over many rows is divided among multiprocessors by rows.
    """
    members, rows, out = dy.shape
    tiles = members * -(-out // 64) * -(-x.shape[-1] // 64)
    parts = 1
    while parts * tiles < MULTIPROCESSORS and rows % (2 * parts) == 0 and rows // (2 * parts) >= 256:
        parts *= 2
    if parts == 1:
        return torch.bmm(dy.mT, x)
    dy, x = (t.reshape(members * parts, rows // parts, -1) for t in (dy, x))
    return fold(torch.bmm(dy.mT, x).unflatten(0, (members, parts)), x.dtype)


def row_sum(x: Tensor) -> Tensor:
    """[members, width], the sum over rows."""
    from . import sum_kernels

    work = divided(x, 8)
    sums = x.new_empty(work.members, work.runs, work.width, dtype=torch.float32)
    launch_kernel(sum_kernels.column_sums, work.grid, (x, sums), (work.rows, work.span, *work.shape))
    return fold(sums, x.dtype)


def fold(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the second dimension."""
    from . import sum_kernels

    members, runs = x.shape[:2]
    y = x.new_empty(members, *x.shape[2:], dtype=dtype)
    width = y[0].numel()
    columns, tile = (16, 64) if runs > 16 else (256, power_of_2(runs))
    launch_kernel(sum_kernels.fold, (-(-width // columns), members, 1), (x, y), (runs, width, columns, tile))
    return y
