"""What is remembered between calls, and for how long: there are two lifetimes.

*Pinned*: a captured CUDA graph reads the tables of its launches again in every replay, and nobody says when the graph
goes. So what is looked up while a graph is captured is kept for good.

*Bounded*: everything else. Where there are `most` of them and one more comes, the older half goes, and work that is on
its way is waited for first. What goes is made again when it is next needed.

Every table on a device is remembered here, and every compiled launch. Layouts and sizes, which hold no tensor and are
quickly computed, have `functools.lru_cache`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar, cast

import torch

Value = TypeVar("Value")

_gpus = functools.cache(torch.cuda.device_count)


def capturing(device: torch.device) -> bool:
    """Whether what is done now is captured in a CUDA graph. The default stream, which eager work has, never is."""
    return on_side_stream(device) and torch.cuda.is_current_stream_capturing()


def on_side_stream(device: torch.device) -> bool:
    """Whether what is done now is on a stream of its own, where a warm-up runs before it is captured."""
    return (
        device.index is not None  # this is asked in every call: what takes longest comes last
        and _gpus() > 0
        and torch._C._cuda_getCurrentRawStream(device.index) != 0
        and device.type == "cuda"
    )


class Kept(dict[tuple[Hashable, ...], Value]):
    """Entries by a key, which names the device where they hold tensors of one. `get` is the dictionary's own."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.pinned: set[tuple[Hashable, ...]] = set()

    def add(self, key: tuple[Hashable, ...], value: Value, captured: bool) -> None:
        """Keep an entry that is new: for good where a graph is captured, else until `most` others have come."""
        if captured:
            return self.pin(key, value)
        if len(self) - len(self.pinned) >= self.most:
            self._drop_older_half()
        self[key] = value
        return None

    def pin(self, key: tuple[Hashable, ...], value: Value) -> None:
        """Keep an entry for good."""
        self[key] = value
        self.pinned.add(key)

    def clear(self) -> None:
        """Forget everything, what graphs read, too: for tests, which have none."""
        super().clear()
        self.pinned.clear()

    def _drop_older_half(self) -> None:
        now = list(self)  # at once: other threads may add to it
        older = [key for key in now if key not in self.pinned][: -(-self.most // 2)]
        gone = [self.pop(key, None) for key in older]
        for device in {part for key in older for part in key if isinstance(part, torch.device)}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # another stream than the one that made a table may still read it
        gone.clear()


class OnDevice(Protocol[Value]):
    """A function whose results lie on a device and are remembered in `kept`."""

    kept: Kept[Value]

    def __call__(self, *arguments: Any) -> Value: ...


def on_device(most: int, from_host: bool = True) -> Callable[[Callable[..., Value]], OnDevice[Value]]:
    """Remember what a function makes on a device; its arguments can be hashed, and the last is that device.

    `from_host`: whether it copies from the host, which cannot be captured. Else what is first asked for in a capture is
    made in the graph, and not remembered.
    """

    def remembering(make: Callable[..., Value]) -> OnDevice[Value]:
        kept: Kept[Value] = Kept(most)
        get = kept.get

        @functools.wraps(make)
        def find(*key: Any) -> Value:
            found = get(key)
            if found is None:
                return first(key)
            if capturing(key[-1]):
                kept.pin(key, found)
            return found

        def first(key: tuple[Any, ...]) -> Value:
            captured = capturing(key[-1])
            if captured and from_host:
                raise RuntimeError(
                    "attention of this shape must run once, on a side stream, before it is captured in a graph"
                )
            with torch.inference_mode(False):  # what is first met in inference serves training later
                found = make(*key)
            if not captured:  # what a graph makes lies in the graph's own memory
                kept.add(key, found, captured=False)
            return found

        function = cast(OnDevice[Value], find)
        function.kept = kept
        return function

    return remembering
