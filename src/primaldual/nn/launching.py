"""Launching the kernels of `projection_kernels`, past Triton's own look at every argument after the first time."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor

from ..ops.plan import circumstances
from ..ops.ragged import DTYPES
from ..ops.ragged_launch import interpreted, without_triton
from ..ops.streams import Fork

_ready: dict[tuple[object, ...], Any] = {}


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
    key = (name, grid, numbers, *kinds)
    ready = _ready.get(key)
    if ready is not None:
        ready(*tensors, *numbers)
        return
    compiled = getattr(_kernels(), name)[grid](*tensors, *numbers, num_warps=warps)
    if compiled is not None:  # the interpreter gives nothing back
        _ready[key] = compiled[grid]


def captured(x: Tensor) -> bool:
    """Whether the host's work is done once, so that streams cost nothing: elsewhere it is the slower one."""
    return x.is_cuda and circumstances(x)[1]


def forked(x: Tensor, parts: int) -> Fork:
    """Streams for the parts of a work, where they pay."""
    return Fork(parts if captured(x) else 1)


def power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
