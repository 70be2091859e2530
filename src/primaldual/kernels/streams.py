"""Work that is divided among CUDA streams, and joined before anybody else looks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def _stream(device: torch.device, index: int) -> torch.cuda.Stream:
    """The first goes before the others: they fill what the longest work leaves."""
    return torch.cuda.Stream(device, priority=min(index - 3, 0))


class Fork:
    """Parts of a work, each on a stream of its own; the last one, and all where there is one, on the current stream.

    Every stream starts after the current one, and the current one waits for all at the end: so memory that goes back
    to the pool of any of them is free by the time it is used again.
    """

    def __init__(self, parts: int) -> None:
        self.others: list[torch.cuda.Stream] = []
        if parts > 1:
            self.current = torch.cuda.current_stream()
            self.others = [_stream(self.current.device, index) for index in range(parts - 1)]
        for stream in self.others:
            stream.wait_stream(self.current)

    @contextmanager
    def part(self, index: int) -> Iterator[None]:
        if index >= len(self.others):
            yield
            return
        with torch.cuda.stream(self.others[index]):
            yield

    def wait(self, index: int) -> None:
        """Go on, on the current stream, only after this part."""
        if index < len(self.others):
            self.current.wait_stream(self.others[index])

    def join(self) -> None:
        for index in range(len(self.others)):
            self.wait(index)
