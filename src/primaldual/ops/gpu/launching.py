"""Launching Triton kernels, past Triton's own look at every argument after the first time."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TRITON = find_spec("triton") is not None  # looked up once, and where no compiler traces it
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def without_triton() -> str | None:
    return None if _TRITON else "Triton is not installed"


def interpreted() -> bool:
    return _TRITON and _INTERPRETED


class Ready(NamedTuple):
    """A kernel that is compiled for a kind of call: how to run it, and its arguments after the tensors."""

    run: Callable[..., None]
    rest: tuple[object, ...]
    compiled: Any
    grid: tuple[int, int, int]


class Launch(NamedTuple):
    """A launch that was noted down."""

    name: str
    tensors: tuple[Tensor | None, ...]
    ready: Ready


class Product(NamedTuple):
    """A matrix product that was noted down."""

    out: Tensor
    a: Tensor
    b: Tensor
    add: Tensor | None


class Gather(NamedTuple):
    """Rows in another order, noted down."""

    out: Tensor
    x: Tensor
    order: Tensor


class Fused(NamedTuple):
    """cuDNN's attention, noted down: outputs and log-sum-exps."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    @property
    def given(self) -> tuple[Tensor, ...]:
        """Tensors that torch makes."""
        return self.out, self.lse


class FusedBack(NamedTuple):
    """Its way back."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @property
    def given(self) -> tuple[Tensor, ...]:
        return self.dq, self.dk, self.dv


Noted = Launch | Product | Gather | Fused | FusedBack

_ready: dict[tuple[object, ...], Ready] = {}
_notes = threading.local()


@contextmanager
def noted() -> Iterator[list[Noted]]:
    """Inside, in this thread, kernels are compiled and noted down instead of launched; and so is what follows."""
    steps: list[Noted] = []
    _notes.steps = steps
    try:
        yield steps
    finally:
        del _notes.steps


def product(a: Tensor, b: Tensor, out: Tensor, add: Tensor | None = None) -> None:
    """out = a b, plus a row, or `out` itself, where there is one to add."""
    if (notes := getattr(_notes, "steps", None)) is not None:
        notes.append(Product(out, a, b, add))
    elif add is None:
        torch.mm(a, b, out=out)
    elif add is out:
        out.addmm_(a, b)
    else:
        torch.addmm(add, a, b, out=out)


def gather(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x in another order."""
    out = x.new_empty(order.shape[0], *x.shape[1:])
    if (notes := getattr(_notes, "steps", None)) is not None:
        notes.append(Gather(out, x, order))
    else:
        torch.index_select(x, 0, order, out=out)
    return out


def fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention by cuDNN: outputs, which lie as the queries do, and log-sum-exps [B, H, L, 1]."""
    if (notes := getattr(_notes, "steps", None)) is None:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
        return found[0], found[1]
    out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)
    notes.append(Fused(q, k, v, out, lse))
    return out, lse


def fused_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values. The output's must lie as the output does."""
    if (notes := getattr(_notes, "steps", None)) is None:
        seed = torch.empty(1, dtype=torch.int64, device=q.device)  # of no dropout
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, False
        )
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    notes.append(FusedBack(grad, q, k, v, out, lse, dq, dk, dv))
    return dq, dk, dv


def launch(
    key: tuple[object, ...],
    tensors: tuple[Tensor | None, ...],
    prepare: Callable[[], tuple[Any, tuple[int, int, int], tuple[object, ...], dict[str, int]]],
    early: bool = True,
) -> None:
    """Launch a kernel on tensors; past Triton's own look at every argument when the same kind of call was seen before.

    `key` tells apart whatever the kernel is specialised by, its name first; `prepare` gives the kernel, its grid, the
    arguments after the tensors, and the compiler's options. A kernel that can start `early` has one argument more,
    which says whether it does.
    """
    ready = _ready.get(key)
    notes: list[Noted] | None = getattr(_notes, "steps", None)
    if ready is not None and notes is None:
        ready.run(*tensors, *ready.rest)
        return
    if ready is None:
        kernel, grid, rest, options = prepare()
        if early:
            now = not interpreted() and starts_early(torch.cuda.current_device())
            rest = (*rest, now)
            options = options if interpreted() else options | {"launch_pdl": now}
        if notes is None:
            compiled = kernel[grid](*tensors, *rest, **options)
        else:
            compiled = kernel.warmup(*tensors, *rest, grid=grid, **options)
        if compiled is None:  # the interpreter gives nothing back
            return
        ready = _ready[key] = Ready(compiled[grid], rest, compiled, grid)
    if notes is not None:
        notes.append(Launch(str(key[0]), tensors, ready))


@functools.cache
def starts_early(device: int) -> bool:
    """Whether a launch may get ready while the one before it still runs: from Hopper on."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def options(warps: int, stages: int, registers: int = 0) -> dict[str, int]:
    """For the compiler; 0 registers: as many as it likes."""
    options = {"num_warps": warps, "num_stages": stages}
    return options | {"maxnreg": registers} if registers else options


def kind(*tensors: Tensor | None) -> tuple[object, ...]:
    """What a kernel is specialised by in tensors that a caller gave."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors)


def precision(q: Tensor) -> str:
    """Of products in float32. torch's older setting, `allow_tf32`, cannot be read where this one was set."""
    if q.dtype != torch.float32 or q.device.type != "cuda":
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def three(x: Tensor) -> tuple[int, ...]:
    """The strides of batch, head and row."""
    return x.stride()[:3]


def eights(*tensors: Tensor) -> bool:
    """Whether all strides are multiples of 8, so that 16 bytes can be read at a time, and not all are of 16."""
    strides = [stride for x in tensors for stride in three(x)]
    return all(stride % 8 == 0 for stride in strides) and any(stride % 16 for stride in strides)


def in_rows(x: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, as the kernels need it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def power_of_2(n: int) -> int:
    """The least that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def block_of(dim: int) -> int:
    """The elements of a row as kernels take them: a power of two, and enough for a product."""
    return max(16, power_of_2(dim))
