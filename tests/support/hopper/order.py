"""Programs and launches, which have no order but the one that they wait for.

The programs of a launch run in any order, and beside each other: one must not read what another writes. And a launch
that may start early starts when every program of the one before has let it (`launch_dependents`), and knows that one to
have ended only after a program of its own has waited for it. If some program of the one before waited before it let go,
then whatever was further in front has ended.
"""

from __future__ import annotations

import numpy as np

from .memory import Array, Global, HopperError

_ADDED = -1


class Trace:
    """Which program of a launch has read and written what, counted from 1; of what several have read, the last."""

    def __init__(self, memory: Global, open: list[Trace]) -> None:
        self.memory, self.open = memory, open
        sizes = (memory.ends - memory.starts).astype(np.int64) // 2 + 1
        self.offsets = np.cumsum(sizes) - sizes
        self.read, self.wrote = (np.zeros(int(sizes.sum()), dtype=np.int32) for _ in range(2))
        self.program = 0
        self.ordered = False
        """Whether a program has waited before it let the next launch start."""

    def following(self) -> list[Trace]:
        """Launches that may still run when the next one starts."""
        return [self] if self.ordered else [self, *self.open]

    def begin(self) -> None:
        """Another program."""
        self.program += 1
        self.waited = self.released = False

    def release(self) -> None:
        """Let the next launch start."""
        self.ordered |= self.waited and not self.released
        self.released = True

    def places(self, at: Array, size: int) -> Array:
        """Of the pairs of bytes that this launch knows."""
        span = np.maximum(np.searchsorted(self.memory.starts, at, "right") - 1, 0)
        inside = (at >= self.memory.starts[span]) & (at < self.memory.ends[span])
        at, span = at[inside], span[inside]
        place = self.offsets[span] + (at - self.memory.starts[span]).astype(np.int64) // 2
        return place + np.arange(max(1, size // 2))[:, None]

    def others(self, marks: Array, places: Array) -> bool:
        return bool(((marks[places] != 0) & (marks[places] != self.program)).any())

    def reading(self, at: Array, size: int) -> None:
        places = self.places(at, size)
        if self.others(self.wrote, places):
            raise HopperError("memory is read that another program of the launch writes")
        self.read[places] = self.program
        if not self.waited and any(trace.wrote[trace.places(at, size)].any() for trace in self.open):
            raise HopperError("memory is read that an earlier launch, not known to have ended, writes")

    def writing(self, at: Array, size: int, adding: bool = False) -> None:
        places = self.places(at, size)
        added = adding and not ((self.wrote[places] != 0) & (self.wrote[places] != _ADDED)).any()
        if self.others(self.read, places) or (not added and self.others(self.wrote, places)):
            raise HopperError("memory is written that another program of the launch reads or writes")
        self.wrote[places] = _ADDED if adding else self.program
        for trace in () if self.waited else self.open:
            theirs = trace.places(at, size)
            if trace.wrote[theirs].any() or trace.read[theirs].any():
                raise HopperError("memory is written that an earlier launch, not known to have ended, reads or writes")
