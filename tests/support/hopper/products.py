"""Matrix products of warps (`mma`), of groups of four warps (`wgmma`), and the moves that lay out their operands.

A thread's share of a matrix: thread t of a warp holds, of every 8 × 8 block, the two neighbours (t / 4, 2 (t % 4)) and
(t / 4, 2 (t % 4) + 1) where numbers have two bytes, and one where they have four.
"""

from __future__ import annotations

import functools

import numpy as np

from .memory import Array, HopperError, Shared

_LANE = np.arange(32)
_ROW, _COLUMN = _LANE // 4, _LANE % 4


def numbers(bits: Array, kind: str) -> Array:
    """What bits mean, in float64. Of tf32 the last 13 are not looked at."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def halves(words: Array) -> Array:
    """[..., n] words as [..., n, 2] of 16 bits."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)


def left(words: Array, kind: str) -> Array:
    """[4, warps, 32] words as the left matrices, [warps, 16, K]."""
    warps, four = words.shape[1], kind == "tf32"
    share = numbers(words if four else halves(words), kind).reshape(4, warps, 32, -1)  # [register, warp, lane, part]
    parts = share.shape[-1]
    matrix = np.empty((warps, 16, 8 * parts))
    for register in range(4):
        rows = _ROW + 8 * (register % 2)
        for part in range(parts):
            matrix[:, rows, parts * _COLUMN + part + 4 * parts * (register // 2)] = share[register, :, :, part]
    return matrix


def right(words: Array, kind: str) -> Array:
    """[2, warps, 32] words as the right matrices, [warps, K, 8]."""
    warps, four = words.shape[1], kind == "tf32"
    share = numbers(words if four else halves(words), kind).reshape(2, warps, 32, -1)
    parts = share.shape[-1]
    matrix = np.empty((warps, 8 * parts, 8))
    for register in range(2):
        for part in range(parts):
            matrix[:, parts * _COLUMN + part + 4 * parts * register, _ROW] = share[register, :, :, part]
    return matrix


def shares(matrix: Array) -> Array:
    """[warps, 16, N] sums as [N / 2, warps, 32] registers."""
    warps, _, columns = matrix.shape
    out = np.empty((columns // 2, warps, 32))
    for register in range(columns // 2):
        rows = _ROW + 8 * (register // 2 % 2)
        out[register] = matrix[:, rows, register // 4 * 8 + 2 * _COLUMN + register % 2]
    return out


def mma(a: Array, b: Array, c: Array, kind: str) -> Array:
    """a b + c of every warp: [4, threads] words, [2, threads] words, [4, threads] floats."""
    product = left(a.reshape(4, -1, 32), kind) @ right(b.reshape(2, -1, 32), kind)
    return (shares(product).reshape(4, -1) + c).astype(np.float32)


@functools.lru_cache(maxsize=1024)
def _offsets(rows: int, depth: int, size: int, leading: int, stride: int, swizzle: int, turned: bool) -> Array:
    """[rows, depth]: bytes from a matrix's start, before swizzling.

    Blocks of 8 rows of 16 bytes; side by side there are so many of them as the swizzle is wide. `turned`: the rows are
    what lies side by side in memory, and the depth counts the rows of blocks.
    """
    wide = {0: 1, 1: 8, 2: 4, 3: 2}[swizzle]
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if not turned:
        chunk, rest = k * size // 16, k * size % 16
        across = chunk * leading if swizzle == 0 else chunk * 16
        return row // 8 * stride + row % 8 * 16 * wide + across + rest
    chunk, rest = row * size // 16, row * size % 16
    if swizzle == 0:
        return chunk * stride + k % 8 * 16 + k // 8 * leading + rest
    return chunk % wide * 16 + chunk // wide * leading + k % 8 * 16 * wide + k // 8 * stride + rest


def described(shared: Shared, descriptor: int, rows: int, depth: int, kind: str, turned: bool) -> tuple[Array, Array]:
    """The matrix [rows, depth] in shared memory that a descriptor tells of, and the places that it takes."""
    size = 4 if kind == "tf32" else 2
    start, leading, stride = (16 * (descriptor >> shift & 0x3FFF) for shift in (0, 16, 32))
    swizzle, base = descriptor >> 62, descriptor >> 49 & 7
    if base:
        raise HopperError("a matrix descriptor with a base offset")
    at = start + _offsets(rows, depth, size, leading, stride, swizzle, turned)
    if swizzle:
        at = at ^ (at >> 3 & {1: 0x70, 2: 0x30, 3: 0x10}[swizzle])
    if at.max() + size > len(shared.bytes):
        raise HopperError(f"a product reads past the {len(shared.bytes)} bytes of shared memory")
    places = at // 2 + np.arange(size // 2)[:, None, None]
    return numbers(shared.views[size][at // size], kind), places.reshape(-1)


class Products:
    """Those of groups of warps, which are on their way until they are waited for."""

    def __init__(self, shared: Shared, registers: dict[str, Array]) -> None:
        self.shared, self.registers = shared, registers
        self.clear()

    def clear(self) -> None:
        self.sums: dict[str, tuple[int, Array]] = {}  # of a register: the group, counted from the start, and the value
        self.reads: list[list[Array]] = [[]]  # in groups; the last is not closed
        self.done = 0

    def begin(
        self, names: tuple[str, ...], a: tuple[str, ...] | str, b: str, adds: bool, kind: str, turned: tuple[bool, bool]
    ) -> None:  # fmt: skip
        """names (+)= a b; both are descriptors, or a is registers."""
        depth, columns = 8 if kind == "tf32" else 16, len(names) * 2
        threads = self.registers[names[0]].shape[0]
        product = []
        for group in range(threads // 128):
            lanes = slice(128 * group, 128 * group + 128)
            second, places = described(self.shared, self._one(b, lanes), columns, depth, kind, turned[1])
            self._reading(places, group)
            if isinstance(a, str):
                first, places = described(self.shared, self._one(a, lanes), 64, depth, kind, turned[0])
                self._reading(places, group)
                first = first.reshape(4, 16, depth)
            else:
                words = np.stack([self.registers[name][lanes] for name in a])
                first = left(words.reshape(4, 4, 32), kind)
            product.append(shares(first @ second.T).reshape(len(names), 128))
        for name, value in zip(names, np.concatenate(product, 1), strict=True):
            register = self.registers[name].view(np.float32)
            before = self.sums[name][1] if name in self.sums else register
            self.sums[name] = self.done + len(self.reads), (value + before if adds else value).astype(np.float32)
            register.fill(np.nan)  # until it is waited for

    def _one(self, name: str, lanes: slice) -> int:
        values = self.registers[name][lanes]
        if (values != values[0]).any():
            raise HopperError("the threads of a product do not agree on a matrix")
        return int(values[0])

    def _reading(self, places: Array, group: int) -> None:
        places = np.unique(places)
        if self.shared.hidden[places].any():
            raise HopperError("a product reads what threads have stored, without a fence between")
        for warp in range(4 * group, 4 * group + 4):
            self.shared.reading(places, np.int64(warp))
        self.shared.flying[places] += 1
        self.reads[-1].append(places)

    def commit(self) -> None:
        self.reads.append([])

    def wait(self, left: int) -> None:
        """For all but so many groups of products."""
        done = max(0, len(self.reads) - 1 - left)
        for group in self.reads[:done]:
            for places in group:
                self.shared.flying[places] -= 1
                self.shared.read[places] = self.shared.epoch << 6 | 63
        del self.reads[:done]
        self.done += done
        for name, (group, value) in list(self.sums.items()):
            if group <= self.done:
                self.registers[name].view(np.float32)[:] = value
                del self.sums[name]


def load_matrices(shared: Shared, at: Array, count: int, turned: bool) -> Array:
    """[count, threads] words of 8 × 8 matrices of 16 bits, whose rows the first 8 · count threads of warps point to."""
    lanes = np.arange(len(at)).reshape(-1, 32)[:, : 8 * count].reshape(-1)
    rows = shared.load(at[lanes], 2, 8, lanes).T.reshape(-1, count, 8, 8)  # a row is 16 bytes
    if turned:
        rows = rows.swapaxes(2, 3)
    low, high = (rows[:, :, _ROW, 2 * _COLUMN + part].astype(np.uint32) for part in (0, 1))
    return (low | high << 16).swapaxes(0, 1).reshape(count, -1)


def store_matrices(shared: Shared, at: Array, words: Array, turned: bool) -> None:
    """The way back."""
    count = len(words)
    lanes = np.arange(len(at)).reshape(-1, 32)[:, : 8 * count].reshape(-1)
    share = halves(words.reshape(count, -1, 32)).swapaxes(0, 1)  # [warp, matrix, lane, part]
    rows = np.empty((share.shape[0], count, 8, 8), dtype=np.uint16)
    for part in (0, 1):
        rows[:, :, _ROW, 2 * _COLUMN + part] = share[..., part]
    if turned:
        rows = rows.swapaxes(2, 3)
    shared.store(at[lanes], rows.reshape(-1, 8).T, 2, lanes)
