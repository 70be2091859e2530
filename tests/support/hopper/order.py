"""Launches that start before the one in front of them has ended, and what they must not touch until it has.

A launch that may start early starts when every program of the one before it has let it (`launch_dependents`), and knows
that one to have ended only after a program of its own has waited for it. If some program of the one before waited
before it let go, then whatever was further in front has ended.
"""

from __future__ import annotations

import numpy as np

from .memory import Array, Fault, Global


class Trace:
    """What a launch has read and written."""

    def __init__(self, memory: Global, open: list[Trace]) -> None:
        self.memory, self.open = memory, open
        sizes = (memory.ends - memory.starts).astype(np.int64) // 2 + 1
        self.offsets = np.cumsum(sizes) - sizes
        self.read, self.wrote = (np.zeros(int(sizes.sum()), dtype=bool) for _ in range(2))
        self.ordered = False
        """Whether a program has waited before it let the next launch start."""

    def following(self) -> list[Trace]:
        """Launches that may still run when the next one starts."""
        return [self] if self.ordered else [self, *self.open]

    def note(self, marks: Array, at: Array, size: int) -> None:
        span = np.searchsorted(self.memory.starts, at, "right") - 1
        place = self.offsets[span] + (at - self.memory.starts[span]).astype(np.int64) // 2
        marks[place + np.arange(max(1, size // 2))[:, None]] = True

    def touches(self, marks: Array, at: Array, size: int) -> bool:
        span = np.maximum(np.searchsorted(self.memory.starts, at, "right") - 1, 0)
        inside = (at >= self.memory.starts[span]) & (at < self.memory.ends[span])
        at, span = at[inside], span[inside]
        place = self.offsets[span] + (at - self.memory.starts[span]).astype(np.int64) // 2
        places = np.minimum(place + np.arange(max(1, size // 2))[:, None], len(marks) - 1)
        return bool(marks[places].any())

    def reading(self, at: Array, size: int, waited: bool) -> None:
        self.note(self.read, at, size)
        if not waited and any(trace.touches(trace.wrote, at, size) for trace in self.open):
            raise Fault("memory is read that an earlier launch, not known to have ended, writes")

    def writing(self, at: Array, size: int, waited: bool) -> None:
        self.note(self.wrote, at, size)
        if not waited and any(t.touches(t.wrote, at, size) or t.touches(t.read, at, size) for t in self.open):
            raise Fault("memory is written that an earlier launch, not known to have ended, reads or writes")
