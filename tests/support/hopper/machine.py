"""Running a kernel's programs one after the other, in some order."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .memory import POISON, Array, Global, HopperError, Shared
from .order import Trace
from .products import Products, load_matrices, mma, store_matrices
from .ptx import meeting, read
from .translation import Translation, function, name

Masks = Array | None
Block = Callable[[], Any]


class Program:
    """A kernel that was compiled for Hopper, ready to run."""

    def __init__(self, text: str, shared: int) -> None:
        self.text, self.kernel = text, read(text)
        self.lanes = np.arange(self.kernel.threads)
        self.registers: dict[str, Array] = {}
        self.active = np.ones(self.kernel.threads, dtype=bool)
        names: dict[str, Any] = {"program": self, "active": self.active} | _NAMES
        for register, width in self.kernel.registers.items():
            called = name(register)
            array = self.registers[register] = np.zeros(self.kernel.threads, dtype=bool if width == 1 else f"u{width}")
            names[called] = array
            if width > 1:
                names[f"{called}s"] = array.view(f"i{width}")
                names[f"{called}f"] = array.view(f"f{width}")
        self.shared = Shared(shared, self.kernel.threads)
        self.products = Products(self.shared, self.registers)
        self.names, self.lines = names, {}
        self.translated: dict[bool, list[Block]] = {}
        self.places = {block: n for n, block in enumerate([*map(function, self.kernel.blocks), "end"])}
        self.translate(parted=False)

    def translate(self, parted: bool) -> list[Block]:
        """Blocks in their order, and the end."""
        if parted not in self.translated:
            translation = Translation(self.kernel, parted)
            names = self.names | translation.constants
            exec(compile(translation.source, f"{self.kernel.name} {parted}", "exec"), names)
            self.lines[parted] = translation.lines
            self.translated[parted] = [*(names[function(block)] for block in self.kernel.blocks), names["end"]]
        return self.translated[parted]

    def run(self, grid: tuple[int, int, int], arguments: Sequence[Any], open: list[Trace]) -> list[Trace]:
        """All programs of a grid, and the launches that may still run after; the last two parameters are Triton's own.

        `open`: those that may still run now, where this one starts early.
        """
        self.parameters = dict(zip(self.kernel.parameters, [*arguments, 0, 0], strict=True))
        self.memory = Global(x for x in arguments if isinstance(x, Tensor))
        self.trace = Trace(self.memory, open)
        sizes = {f"%nctaid.{axis}": np.uint32(n) for axis, n in zip("xyz", grid, strict=True)}
        programs = list(itertools.product(*(range(n) for n in grid)))
        random.Random(0).shuffle(programs)
        with np.errstate(all="ignore"):
            for x, y, z in programs:
                places = {f"%ctaid.{axis}": np.uint32(n) for axis, n in zip("xyz", (x, y, z), strict=True)}
                self.special = {"%tid.x": self.lanes.astype(np.uint32)} | sizes | places
                self.one((x, y, z))
        return self.trace.following()

    def one(self, at: tuple[int, int, int]) -> None:
        for array in self.registers.values():
            array.fill(POISON & (1 << 8 * array.itemsize) - 1 if array.dtype != bool else False)
        self.shared.clear()
        self.products.clear()
        self.trace.begin()
        block, end = self.translate(False)[0], self.translate(False)[-1]
        try:
            while block is not end:
                block = block()
            self.trace.release()
        except HopperError as fault:
            raise HopperError(f"{self.kernel.name}, program {at}, {self.place(fault)}: {fault}") from fault

    def place(self, fault: HopperError) -> str:
        """Where in the kernel's source a fault lies: the compiler's last word on that before the line of PTX."""
        line, frame = 0, fault.__traceback__
        files = {f"{self.kernel.name} {parted}": lines for parted, lines in self.lines.items()}
        while frame is not None:
            if lines := files.get(frame.tb_frame.f_code.co_filename):
                line = lines[frame.tb_lineno - 1]
            frame = frame.tb_next
        said = re.findall(r"\.loc\s.*?//\s*(\S+)", "\n".join(self.text.split("\n")[:line]))
        return f"{said[-1] if said else 'somewhere'} (line {line} of the PTX)"

    def parameter(self, called: str, signed: bool) -> int:
        value = self.parameters[called]
        size = self.kernel.parameters[called]
        if isinstance(value, Tensor):
            return value.data_ptr()
        if isinstance(value, float):
            return int(np.float32(value).view(np.uint32))
        value = 0 if value is None else int(value)
        return value if signed else value & (1 << 8 * size) - 1

    # memory

    def load_global(self, out: tuple[Array, ...], at: Array, width: int, mask: Masks) -> None:
        lanes = self.lanes if mask is None else self.lanes[mask]
        found = self.memory.load(at[lanes], width, len(out))
        self.trace.reading(at[lanes], width * len(out))
        for register, values in zip(out, found, strict=True):
            register[lanes] = values

    def store_global(self, at: Array, values: tuple[Array, ...], width: int, mask: Masks) -> None:
        lanes = self.lanes if mask is None else self.lanes[mask]
        self.memory.reach(at[lanes], width * len(values))
        self.trace.writing(at[lanes], width * len(values))
        self.memory.store(at[lanes], np.stack([self.full(x)[lanes] for x in values]), width)

    def add_global(self, out: tuple[Array, ...], at: Array, values: tuple[Array, ...], mask: Masks) -> None:
        lanes = self.lanes if mask is None else self.lanes[mask]
        before = self.memory.add(at[lanes], np.stack([x[lanes] for x in values]))
        self.trace.writing(at[lanes], 4 * len(values), adding=True)
        for register, value in zip(out, before, strict=True):
            register[lanes] = value

    def load_shared(self, out: tuple[Array, ...], at: Array, width: int, mask: Masks) -> None:
        lanes = self.lanes if mask is None else self.lanes[mask]
        for register, values in zip(out, self.shared.load(self.full(at)[lanes], width, len(out), lanes), strict=True):
            register[lanes] = values

    def store_shared(self, at: Array, values: tuple[Array, ...], width: int, mask: Masks) -> None:
        lanes = self.lanes if mask is None else self.lanes[mask]
        self.shared.store(self.full(at)[lanes], np.stack([self.full(x)[lanes] for x in values]), width, lanes)

    def copy(self, to: Array, of: Array, size: int, given: Array | None, mask: Masks) -> None:
        """From global to shared memory, on its way until it is waited for; past the bytes given come zeros."""
        lanes = self.lanes if mask is None else self.lanes[mask]
        values = np.zeros((size // 2, len(lanes)), dtype=np.uint16)
        counts = np.full(len(lanes), size) if given is None else self.full(given)[lanes]
        if not np.isin(counts, (0, size)).all():
            raise HopperError("a copy of a part")
        there = of[lanes[counts > 0]]
        values[:, counts > 0] = self.memory.load(there, 2, size // 2)
        self.trace.reading(there, size)
        self.shared.copy(self.full(to)[lanes], values, lanes)

    def full(self, x: Array) -> Array:
        """A number for every thread."""
        return np.broadcast_to(x, self.lanes.shape)

    # threads together

    def agreed(self, which: Array) -> bool:
        if which.all() != which.any():
            raise HopperError("the threads of a program do not agree")
        return bool(which[0])

    def branch(self, which: Array, to: Block, following: Block) -> Block | tuple[Array, Block, Block]:
        """Where a program goes on; where its threads part, when they have met again."""
        if to is not self.translate(False)[self.place_of(to)]:  # they have parted already
            return which, to, following
        if which.all() or not which.any():
            return to if which[0] else following
        blocks = self.translate(True)
        at = np.where(which, self.place_of(to), self.place_of(following))
        meet = meeting(self.kernel, self.place_of(following) - 1)
        while (at != meet).any():
            first = at[at != meet].min()
            self.active[:] = at == first
            found = blocks[first]()
            if isinstance(found, tuple):
                mask, to, following = found
                at[self.active] = np.where(mask, self.place_of(to), self.place_of(following))[self.active]
            else:
                at[self.active] = self.place_of(found)
        return self.translate(False)[meet]

    def place_of(self, block: Block) -> int:
        return self.places[block.__name__]

    def parted(self) -> None:
        raise HopperError("the threads of a program have parted where all must be")

    def shuffled(self, x: Array, lane: Array, how: str) -> Array:
        within = self.lanes % 32
        source = within ^ self.full(lane).astype(np.int64) if how == "bfly" else self.full(lane).astype(np.int64) & 31
        return x[self.lanes - within + source]

    def load_matrices(self, out: tuple[Array, ...], at: Array, turned: bool) -> None:
        for register, values in zip(out, load_matrices(self.shared, self.full(at), len(out), turned), strict=True):
            register[:] = values

    def store_matrices(self, at: Array, values: tuple[Array, ...], turned: bool) -> None:
        store_matrices(self.shared, self.full(at), np.stack(values), turned)

    def mma(
        self, out: tuple[Array, ...], a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...], kind: str
    ) -> None:  # fmt: skip
        sums = mma(np.stack(a), np.stack(b), np.stack([self.full(x) for x in c]), kind)
        for register, values in zip(out, sums, strict=True):
            register[:] = values


def _bf16(x: Array) -> Array:
    """To the nearest, ties to even; in the low half of a word."""
    bits = np.asarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)


def _f16(x: Array) -> Array:
    return np.asarray(x).astype(np.float16).view(np.uint16).astype(np.uint32)


def _picked(a: Array, b: Array, which: Array) -> Array:
    """Four of the eight bytes of a and b, by the nibbles of a number; the highest bit of one asks for a sign alone."""
    both = np.asarray(b).astype(np.uint64) << 32 | a
    found = np.zeros(both.shape, dtype=np.uint32)
    for place in range(4):
        nibble = np.asarray(which).astype(np.uint64) >> 4 * place & 15
        byte = (both >> 8 * (nibble & 7) & 255).astype(np.uint32)
        found |= np.where(nibble > 7, np.where(byte > 127, np.uint32(255), np.uint32(0)), byte) << 8 * place
    return found


_NAMES = {
    **{word: getattr(np, word) for word in (
        "absolute", "add", "bitwise_and", "bitwise_or", "bitwise_xor", "copyto", "divide", "equal", "exp2", "fmax",
        "fmin", "fmod", "greater", "greater_equal", "invert", "left_shift", "less", "less_equal", "log2", "logical_and",
        "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "multiply", "negative", "not_equal",
        "reciprocal", "right_shift", "sqrt", "subtract",
    )},
    "choose": np.where, "u4": np.uint32, "u8": np.uint64, "i4": np.int32, "i8": np.int64, "f8": np.float64,
    "bf16": _bf16, "f16": _f16, "single": lambda x: np.asarray(x).astype(np.float32),
    "from_bf16": lambda x: (x.astype(np.uint32) << 16).view(np.float32),
    "from_f16": lambda x: x.astype(np.uint16).view(np.float16).astype(np.float32),
    "inverse_root": lambda x, out, where=True: np.divide(1, np.sqrt(x), out, where=where),
    "picked": _picked,
    "quotient": lambda a, b: np.trunc(np.divide(a, b, dtype=np.float64)),
}  # fmt: skip
