"""Launching the kernels of `projection_kernels`, on streams of their own where that pays."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..ops.gpu import launching
from ..ops.gpu.launching import interpreted, without_triton
from ..ops.gpu.streams import Fork
from ..ops.plan import circumstances
from ..ops.ragged import DTYPES


@functools.cache
def _kernels() -> ModuleType:
    from . import projection_kernels

    return projection_kernels


def launches(x: Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return x.dtype in DTYPES and without_triton() is None and (x.is_cuda or interpreted())


def launch(
    name: str, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[object, ...],
    warps: int = 4,
) -> None:  # fmt: skip
    """Run a kernel; its arguments are the tensors, then the numbers."""
    kinds = (None if x is None else (x.dtype, x.device, x.data_ptr() % 16 == 0) for x in tensors)

    def prepare() -> tuple[Any, tuple[int, int, int], tuple[object, ...], dict[str, int]]:
        return getattr(_kernels(), name), grid, numbers, {"num_warps": warps}

    launching.launch((name, grid, numbers, *kinds), tensors, prepare, early=False)


def seed_of(x: Tensor, dropout_p: float) -> Tensor | None:
    """Drawn on the device, so that a replayed CUDA graph drops other weights each time."""
    if not dropout_p:
        return None
    return torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=x.device)


def captured(x: Tensor) -> bool:
    """Whether the host's work is done once, so that streams cost nothing: elsewhere it is the slower one."""
    return x.is_cuda and circumstances(x)[1]


def forked(x: Tensor, parts: int) -> Fork:
    """Streams for the parts of a work, where they pay."""
    return Fork(parts if captured(x) else 1)
