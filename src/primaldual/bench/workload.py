"""A case made ready to run: ours, its rivals, and the inputs that they share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .case import Case
from .timing import Contestant

MOST_SETS = 4
BACK_ENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Workload:
    """Ours, the fused softmaxes that it is compared with, and softmax with its weights in memory (layers alone)."""

    ours: Contestant
    rivals: tuple[Contestant, ...]
    executor: str | None
    input_sets: int
    in_cache: bool | None
    materialised: Contestant | None = None


def forced(device: torch.device) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """torch's fused back ends, each as a context that allows no other; on a CPU there is no choice."""
    if device.type != "cuda":
        return {"sdpa": nullcontext}
    return {name: partial(sdpa_kernel, back_end) for name, back_end in BACK_ENDS.items()}


def input_sets(size: int, device: torch.device) -> tuple[int, bool | None]:
    """How many sets of inputs to run in turns so that the cache does not hold them all, and whether it still does."""
    if device.type != "cuda":
        return 1, None
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    sets = min(MOST_SETS, max(1, math.ceil(cache / size)))
    return sets, sets * size < cache


def size_of(*tensors: Tensor) -> int:
    """Bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)


def check_dense(case: Case, device: torch.device) -> None:
    """Refuse weights that a CPU's memory does not hold: the system would end the process instead of raising."""
    if device.type == "cuda" or not hasattr(os, "sysconf"):
        return
    needed = 6 * case.batch * case.heads * case.length**2 * case.torch_dtype.itemsize
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise MemoryError(
            f"the dense formula takes about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"
        )
