"""What this machine can do at best, measured: a large copy, and a large matrix product in each dtype."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .case import DTYPES
from .timing import Step, elapsed

REPEATS = 10
COPIED = {"cuda": 2**31, "cpu": 2**27}
"""Bytes of the copy, by the kind of device."""

SIDE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices that are multiplied."""


class Ceilings(NamedTuple):
    """Bytes per second of a copy (read + written), and FLOP/s of a matrix product by arithmetic (a dtype, or tf32)."""

    bytes_per_second: float
    flops_per_second: dict[str, float]


def measure_ceilings(arithmetics: Iterable[str], device: torch.device) -> Ceilings:
    """Both ceilings, on random data, each the median of ten runs after two."""
    return Ceilings(_copy(device), {name: _product(name, device) for name in dict.fromkeys(arithmetics)})


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Float32 matrix products inside may (or may not) round to tf32."""
    before = torch.backends.cuda.matmul.allow_tf32
    _set_tf32(allowed)
    try:
        yield
    finally:
        _set_tf32(before)


def _set_tf32(allowed: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather be told otherwise, but kernels read this setting
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _copy(device: torch.device) -> float:
    size = COPIED[device.type]
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median(lambda: target.copy_(source), device)


def _product(name: str, device: torch.device) -> float:
    n = SIDE[device.type]
    dtype = torch.float32 if name == "tf32" else DTYPES[name]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    with tf32(name == "tf32"):
        return 2 * n**3 / _median(lambda: torch.mm(a, b, out=out), device)


def _median(run: Step, device: torch.device) -> float:
    for _ in range(2):
        run()
    return statistics.median(elapsed(run, device) for _ in range(REPEATS))
