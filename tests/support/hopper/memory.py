"""A program's memory, and what a GPU would not forgive: addresses that are not there, or that warps reach in no order.

Threads run in step here, on a GPU they do not: between two barriers a warp may be anywhere. So whoever writes a place
in shared memory that another warp reads or writes before the next barrier is told so, and whoever touches a place that
a copy is still on its way to, or writes one that a product still reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]
POISON = 0xFFFFC0DE
"""What registers and shared memory hold before they are written: no number."""

_FLOOR = 4096
_VIEWS = {
    width: np.ctypeslib.as_array((kind * ((1 << 47) // width)).from_address(_FLOOR))
    for width, kind in ((1, ctypes.c_uint8), (2, ctypes.c_uint16), (4, ctypes.c_uint32), (8, ctypes.c_uint64))
}
_FLOATS = np.ctypeslib.as_array((ctypes.c_float * (1 << 45)).from_address(_FLOOR))


class HopperError(Exception):
    """What would fail on a GPU, or go wrong now and then."""


class Global:
    """The memory of a launch's tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans = sorted((x.data_ptr(), x.data_ptr() + _bytes(x)) for x in tensors if x.numel())
        merged: list[list[int]] = []
        for start, end in spans:
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        self.starts, self.ends = np.array(merged or [[0, 0]], dtype=np.uint64).T

    def reach(self, at: Array, size: int) -> None:
        """Refuses addresses outside the tensors, and such as are not multiples of what is read there."""
        if (at & np.uint64(size - 1)).any():
            raise HopperError(f"{size} bytes at an address that is not a multiple of it: {int(at[0]):x}")
        span = np.searchsorted(self.starts, at, "right") - 1
        outside = (span < 0) | (at + np.uint64(size) > self.ends[span])
        if outside.any():
            raise HopperError(f"{size} bytes outside of the tensors, at {int(at[outside.argmax()]):x}")

    def load(self, at: Array, width: int, count: int) -> Array:
        """[count, lanes]: numbers of so many bytes, so many in a row."""
        self.reach(at, width * count)
        return _VIEWS[width][self.place(at, width) + np.arange(count)[:, None]]

    def store(self, at: Array, values: Array, width: int) -> None:
        self.reach(at, width * len(values))
        _VIEWS[width][self.place(at, width) + np.arange(len(values))[:, None]] = values

    def add(self, at: Array, values: Array) -> Array:
        """Floats, added to what is there; and that."""
        self.reach(at, 4 * len(values))
        place = self.place(at, 4) + np.arange(len(values))[:, None]
        before = _FLOATS[place]
        places, which = np.unique(place, return_inverse=True)
        _FLOATS[places] += np.bincount(which.reshape(-1), values.reshape(-1)).astype(np.float32)
        return before

    @staticmethod
    def place(at: Array, width: int) -> Array:
        return (at - np.uint64(_FLOOR)).astype(np.int64) // width


def _bytes(x: Tensor) -> int:
    """From the first element to the last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


class Shared:
    """The shared memory of a program, and who was where since the last barrier."""

    def __init__(self, size: int, threads: int) -> None:
        self.bytes = np.zeros(-(-size // 16) * 16, dtype=np.uint8)
        self.views = {width: self.bytes.view(f"u{width}") for width in (1, 2, 4, 8)}
        self.warp = np.arange(threads) // 32
        places = len(self.bytes) // 2
        self.wrote, self.read = np.zeros(places, dtype=np.int64), np.zeros(places, dtype=np.int64)
        self.landing, self.flying = np.zeros(places, dtype=np.int16), np.zeros(places, dtype=np.int16)
        self.hidden = np.zeros(places, dtype=bool)  # from products, which see what threads store after a fence alone
        self.clear()

    def clear(self) -> None:
        """For another program."""
        self.views[4][:] = POISON
        for marks in (self.wrote, self.read):
            marks[:] = -1
        self.landing[:] = self.flying[:] = self.hidden[:] = 0
        self.epoch = 0
        self.copies: list[list[tuple[Array, Array, Array]]] = [[]]  # in groups; the last is not closed

    def barrier(self) -> None:
        self.epoch += 1

    # who was at a place last, and when: epoch · 64 + warp, or + 63 for several

    def _conflict(self, marks: Array, places: Array, warps: Array) -> bool:
        mark = marks[places]
        return bool(((mark >> 6 == self.epoch) & (mark & 63 != warps)).any())

    def reading(self, places: Array, warps: Array) -> None:
        """By these warps, of the two bytes at each of the places."""
        if self.landing[places].any():
            raise HopperError("shared memory is read while a copy to it is on its way")
        if self._conflict(self.wrote, places, warps):
            raise HopperError("shared memory is read that another warp has written since the last barrier")
        mark = self.epoch << 6 | np.broadcast_to(warps, places.shape)
        before = self.read[places]
        mark = np.where((before >> 6 == self.epoch) & (before != mark), self.epoch << 6 | 63, mark)
        self.read[places] = mark
        self.read[places[self.read[places] != mark]] = self.epoch << 6 | 63

    def writing(self, places: Array, warps: Array) -> None:
        if self.landing[places].any() or self.flying[places].any():
            raise HopperError("shared memory is written while a copy or a product is on its way there")
        if self._conflict(self.wrote, places, warps) or self._conflict(self.read, places, warps):
            raise HopperError("shared memory is written where another warp was since the last barrier")
        self.wrote[places] = mark = self.epoch << 6 | np.broadcast_to(warps, places.shape)
        self.wrote[places[self.wrote[places] != mark]] = self.epoch << 6 | 63

    def reach(self, at: Array, size: int) -> None:
        if (at & np.uint32(size - 1)).any():
            raise HopperError(f"{size} bytes of shared memory at an address that is not a multiple of it")
        if len(at) and int(at.max()) + size > len(self.bytes):
            raise HopperError(f"shared memory of {len(self.bytes)} bytes is left: {size} at {int(at.max())}")

    def places(self, at: Array, size: int) -> Array:
        self.reach(at, size)
        return (at >> 1).astype(np.int64) + np.arange(max(1, size // 2))[:, None]

    def load(self, at: Array, width: int, count: int, lanes: Array) -> Array:
        """[count, lanes]"""
        self.reading(self.places(at, width * count), self.warp[lanes])
        return self.views[width][(at // width).astype(np.int64) + np.arange(count)[:, None]]

    def store(self, at: Array, values: Array, width: int, lanes: Array) -> None:
        self.writing(self.places(at, width * len(values)), self.warp[lanes])
        self.hidden[self.places(at, width * len(values))] = True
        self.views[width][(at // width).astype(np.int64) + np.arange(len(values))[:, None]] = values

    def fence(self) -> None:
        self.hidden[:] = False

    def copy(self, at: Array, values: Array, lanes: Array) -> None:
        """Begin to write pairs of bytes, [count, lanes]."""
        places = self.places(at, 2 * len(values))
        warps = self.warp[lanes]
        self.writing(places, warps)
        self.landing[places] += 1
        self.copies[-1].append((places, values, warps))

    def commit(self) -> None:
        self.copies.append([])

    def wait(self, left: int) -> None:
        """For all but so many groups of copies."""
        done = max(0, len(self.copies) - 1 - left)
        for group in self.copies[:done]:
            for places, values, warps in group:
                self.landing[places] -= 1
                self.views[2][places] = values
                self.wrote[places] = self.epoch << 6 | warps
                self.hidden[places] = False
        del self.copies[:done]
