"""Launching the kernels of the projections, on streams of their own where that pays."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor

from .. import launching
from ..launching import captured
from ..streams import Fork


@functools.cache
def _kernels() -> ModuleType:
    from . import kernels

    return kernels


def launch(
    name: str, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[object, ...],
    warps: int = 4,
) -> None:  # fmt: skip
    """Run a kernel; its arguments are the tensors, then the numbers."""
    kinds = (None if x is None else (x.dtype, x.device, x.data_ptr() % 16 == 0) for x in tensors)

    def prepare() -> tuple[Any, tuple[int, int, int], tuple[object, ...], dict[str, int]]:
        return getattr(_kernels(), name), grid, numbers, {"num_warps": warps}

    launching.launch((name, grid, numbers, *kinds), tensors, prepare, early=False)


def forked(x: Tensor, parts: int) -> Fork:
    """Streams for the parts of a work, where they pay: elsewhere the host is the slower one."""
    return Fork(parts if captured(x) else 1)
