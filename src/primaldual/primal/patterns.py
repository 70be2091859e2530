"""Which keys a query of a sparse head sees, in the head's own (pooled) coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ._spec import Spec, check_count

DEFAULT_SIZE = 32
"""Of a stride, a block and a radius: neither padding nor a longer sequence changes what a query sees."""

_ROOT = r"\mathrm{round}\sqrt{N}"


@dataclass(frozen=True)
class Band:
    """|i − j| ≤ reach; without j = i unless `own`."""

    reach: int
    own: bool = True

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        near = (i - j).abs() <= self.reach
        return near if self.own else near & (i != j)


@dataclass(frozen=True)
class Residues:
    """(i − j) mod stride = 0: a dense attention inside each residue class."""

    stride: int
    own: ClassVar[bool] = True

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.stride == 0


@dataclass(frozen=True)
class Block:
    """⌊i/size⌋ = ⌊j/size⌋: a dense attention inside each block."""

    size: int
    own: ClassVar[bool] = True

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        return i // self.size == j // self.size


@dataclass(frozen=True)
class Summary:
    """j mod size ≥ size − count, in every block but the query's own."""

    size: int
    count: int
    own: ClassVar[bool] = False

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        return (i // self.size != j // self.size) & (j % self.size >= self.size - self.count)


Piece = Band | Residues | Block | Summary
"""Keys that lie regularly, so that an executor can compute their scores and no others; `own`: whether j = i is one."""


@dataclass(frozen=True)
class Pattern(Spec):
    """Base class: a rule i, j ↦ whether query i sees key j.

    A rule that looks at the length depends on the padding of the batch, and must say so in `causal_refusal`.
    """

    def causal_refusal(self) -> str | None:
        """Why this pattern has no causal form; None when what a query sees depends on no later token."""
        return None

    def pieces(self, length: int) -> tuple[Piece, ...] | None:
        """Disjoint pieces whose union is what is kept; None when that is not known."""
        return None

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        """Boolean, broadcast over integer coordinates i (queries) and j (keys) of a head with `length` keys."""
        raise NotImplementedError(f"{type(self).__name__} must implement allows(i, j, length)")


@dataclass(frozen=True)
class Strided(Pattern):
    """|i − j| < l or (i − j) mod l = 0; with the stride l None, it is round(√N) of the padded, pooled length."""

    stride: int | None = DEFAULT_SIZE

    def __post_init__(self) -> None:
        if self.stride is not None:
            check_count("Strided", "stride", self.stride)

    def causal_refusal(self) -> str | None:
        return _length_refusal(self, self.stride)

    def pieces(self, length: int) -> tuple[Piece, ...]:
        stride = _size(self.stride, length)
        return (Residues(stride), Band(stride - 1, own=False)) if stride > 1 else (Residues(1),)

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        stride = _size(self.stride, length)
        return ((i - j).abs() < stride) | ((i - j) % stride == 0)

    def text(self, x: str = "x") -> str:
        return f"|i − j| < l or (i − j) mod l = 0, l = {_size_text(self.stride)}"

    def latex(self, x: str = "x") -> str:
        return rf"|i-j|<l \lor (i-j)\bmod l=0,\; l={_size_text(self.stride, _ROOT)}"


@dataclass(frozen=True)
class Fixed(Pattern):
    """Same block of l, or j mod l ≥ l − c: the last c keys of every block are seen by all.

    With `block` None, l is round(√N) of the padded, pooled length.
    """

    block: int | None = DEFAULT_SIZE
    summary: int = 1

    def __post_init__(self) -> None:
        check_count("Fixed", "summary", self.summary)
        if self.block is not None:
            check_count("Fixed", "block", self.block, least=self.summary)

    def causal_refusal(self) -> str | None:
        return _length_refusal(self, self.block)

    def pieces(self, length: int) -> tuple[Piece, ...]:
        block = _size(self.block, length)
        return Block(block), Summary(block, min(self.summary, block))

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        block = _size(self.block, length)
        return (i // block == j // block) | (j % block >= block - self.summary)

    def text(self, x: str = "x") -> str:
        return f"same block of l, or j mod l ≥ l − {self.summary}, l = {_size_text(self.block)}"

    def latex(self, x: str = "x") -> str:
        return (
            rf"\lfloor i/l\rfloor=\lfloor j/l\rfloor \lor j\bmod l\ge l-{self.summary},\; "
            rf"l={_size_text(self.block, _ROOT)}"
        )


@dataclass(frozen=True)
class Window(Pattern):
    """|i − j| ≤ w: a sliding window; with the radius w None, it is round(√N) of the padded, pooled length."""

    radius: int | None = DEFAULT_SIZE

    def __post_init__(self) -> None:
        if self.radius is not None:
            check_count("Window", "radius", self.radius, least=0)

    def causal_refusal(self) -> str | None:
        return _length_refusal(self, self.radius)

    def pieces(self, length: int) -> tuple[Piece, ...]:
        return (Band(_size(self.radius, length)),)

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return (i - j).abs() <= _size(self.radius, length)

    def text(self, x: str = "x") -> str:
        return f"|i − j| ≤ {_size_text(self.radius)}"

    def latex(self, x: str = "x") -> str:
        return rf"|i-j|\le {_size_text(self.radius, _ROOT)}"


def near_root(length: int) -> int:
    """The integer nearest to √length, at least 1."""
    return max(1, round(math.sqrt(length)))


def _size(given: int | None, length: int) -> int:
    return near_root(length) if given is None else given


def _size_text(size: int | None, root: str = "round(√N)") -> str:
    return root if size is None else str(size)


def _length_refusal(pattern: Pattern, size: int | None) -> str | None:
    if size is not None:
        return None
    return (
        f"{pattern!r} takes round(√N) of the whole length, so what a query sees changes with every later token; give "
        f"a number, such as {type(pattern).__name__}({DEFAULT_SIZE})"
    )
