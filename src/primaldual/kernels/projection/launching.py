"""Launching the kernels of the projections, on streams of their own where that pays."""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from ..launching import captured
from ..streams import Fork


@functools.cache
def kernels() -> ModuleType:
    """Imported where they are launched: not everybody has Triton."""
    from . import kernels as found

    return found


def forked(x: Tensor, parts: int) -> Fork:
    """Streams for the parts of a work, where they pay: elsewhere the host is the slower one."""
    return Fork(parts if captured(x) else 1)
