"""Steps that are noted down instead of taken, for the compiled part to take them (`replay`).

Triton's launches go through `launching`, matrix products and rows in another order through here, and cuDNN's attention
through `cudnn`: what a walk of the Python path does otherwise is not noted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


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

_notes = threading.local()


def notes() -> list[Noted] | None:
    """Where steps are noted down in this thread; None where they are taken."""
    return getattr(_notes, "steps", None)


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
    if (steps := notes()) is not None:
        steps.append(Product(out, a, b, add))
    elif add is None:
        torch.mm(a, b, out=out)
    elif add is out:
        out.addmm_(a, b)
    else:
        torch.addmm(add, a, b, out=out)


def gather(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x in another order."""
    out = x.new_empty(order.shape[0], *x.shape[1:])
    if (steps := notes()) is not None:
        steps.append(Gather(out, x, order))
    else:
        torch.index_select(x, 0, order, out=out)
    return out
