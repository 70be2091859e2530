"""Random numbers from a generator of one's own: the state that a whole process shares is neither asked nor changed.

Torch's layers start, and drop, by the process's generator, so that threads take numbers from each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LENT: dict[torch.device, Any] = defaultdict(RLock)
"""Held by who puts its own numbers in the place of a device's shared ones, until they are put back."""


class DrawingFrom(TorchDispatchMode):
    """Inside, in this thread, whatever torch draws on the CPU comes from one generator.

    Every operation passes through Python then: it is for what is done once, such as the start of a model, or costs
    much by itself.

    >>> own = torch.Generator().manual_seed(0)
    >>> with DrawingFrom(own.clone_state()):
    ...     drawn = torch.rand(3)
    >>> drawn.equal(torch.rand(3, generator=own))
    True
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation, with the generator where it draws on the CPU and is given none."""
        given = dict(kwargs or {})
        draws = torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None
        if not draws or not _on_cpu(args, given):
            return func(*args, **given)
        if (taking := _taking_generator(func)) is None:
            with lent(torch.default_generator, self.generator):
                return func(*args, **given)
        return taking(*args, **given | {"generator": self.generator})


def dropout(x: Tensor, p: float, training: bool, generator: torch.Generator) -> Tensor:
    """torch's dropout to the bit, from this generator where x is the CPU's.

    >>> x = torch.ones(100)
    >>> ours = dropout(x, 0.5, True, torch.Generator().manual_seed(3))
    >>> with torch.random.fork_rng(devices=[]):
    ...     _ = torch.manual_seed(3)
    ...     ours.equal(torch.dropout(x, 0.5, True))
    True
    """
    if not training or p == 0.0 or x.device.type != "cpu":
        return torch.dropout(x, p, training)
    kept = torch.empty_like(x, requires_grad=False)
    return x * kept.bernoulli_(1 - p, generator=generator).div_(1 - p)


@contextmanager
def lent(shared: torch.Generator, own: torch.Generator | None = None) -> Iterator[None]:
    """Inside, the generator that a process shares is left to one thread, and put back as it was.

    For what draws as it likes, such as a model that a user wrote. Others that are lent it wait.

    Args:
        shared: of a device.
        own: whose numbers it gives inside; this one goes on where they end. None for its own.
    """
    with LENT[shared.device]:
        before = shared.get_state()
        if own is not None:
            shared.set_state(own.get_state())
        try:
            yield
        finally:
            if own is not None:
                own.set_state(shared.get_state())
            shared.set_state(before)


@lru_cache
def _taking_generator(func: Any) -> Any:
    """The operation, or the one of its name with these arguments and a generator; None where there is none."""
    names = [argument.name for argument in func._schema.arguments if argument.name != "generator"]
    packet = func.overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        theirs = [argument.name for argument in overload._schema.arguments]
        if "generator" in theirs and [name for name in theirs if name != "generator"] == names:
            return overload
    return None


def _on_cpu(args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Of the first tensor, else of the device that is named."""
    for one in args:
        if isinstance(one, Tensor):
            return one.device.type == "cpu"
    return torch.device(given.get("device") or "cpu").type == "cpu"
