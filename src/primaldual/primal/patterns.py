"""Which keys a query of a sparse head sees, in the head's own (pooled) coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ._spec import Spec, check_count

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
    """Base class: a rule i, j ↦ whether query i sees key j."""

    def pieces(self, length: int) -> tuple[Piece, ...] | None:
        """Disjoint pieces whose union is what is kept; None when that is not known."""
        return None

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        """Boolean, broadcast over integer coordinates i (queries) and j (keys) of a head with `length` keys."""
        raise NotImplementedError(f"{type(self).__name__} must implement allows(i, j, length)")


@dataclass(frozen=True)
class Strided(Pattern):
    """|i − j| < l or (i − j) mod l = 0; the stride l is round(√N) of the pooled length unless given."""

    stride: int | None = None

    def __post_init__(self) -> None:
        if self.stride is not None:
            check_count("Strided", "stride", self.stride)

    def pieces(self, length: int) -> tuple[Piece, ...]:
        stride = self.stride or near_root(length)
        return (Residues(stride), Band(stride - 1, own=False)) if stride > 1 else (Residues(1),)

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        stride = self.stride or near_root(length)
        return ((i - j).abs() < stride) | ((i - j) % stride == 0)

    def text(self, x: str = "x") -> str:
        return f"|i − j| < l or (i − j) mod l = 0, l = {self.stride or 'round(√N)'}"

    def latex(self, x: str = "x") -> str:
        return rf"|i-j|<l \lor (i-j)\bmod l=0,\; l={self.stride or _ROOT}"


@dataclass(frozen=True)
class Fixed(Pattern):
    """Same block of l, or j mod l ≥ l − c: the last c keys of every block are seen by all."""

    block: int | None = None
    summary: int = 1

    def __post_init__(self) -> None:
        check_count("Fixed", "summary", self.summary)
        if self.block is not None:
            check_count("Fixed", "block", self.block, least=self.summary)

    def pieces(self, length: int) -> tuple[Piece, ...]:
        block = self.block or near_root(length)
        return Block(block), Summary(block, min(self.summary, block))

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        block = self.block or near_root(length)
        return (i // block == j // block) | (j % block >= block - self.summary)

    def text(self, x: str = "x") -> str:
        return f"same block of l, or j mod l ≥ l − {self.summary}, l = {self.block or 'round(√N)'}"

    def latex(self, x: str = "x") -> str:
        return (
            rf"\lfloor i/l\rfloor=\lfloor j/l\rfloor \lor j\bmod l\ge l-{self.summary},\; "
            rf"l={self.block or _ROOT}"
        )


@dataclass(frozen=True)
class Window(Pattern):
    """|i − j| ≤ w: a sliding window; w is round(√N) of the pooled length unless given."""

    radius: int | None = None

    def __post_init__(self) -> None:
        if self.radius is not None:
            check_count("Window", "radius", self.radius, least=0)

    def pieces(self, length: int) -> tuple[Piece, ...]:
        return (Band(near_root(length) if self.radius is None else self.radius),)

    def allows(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return (i - j).abs() <= (near_root(length) if self.radius is None else self.radius)

    def text(self, x: str = "x") -> str:
        return f"|i − j| ≤ {'round(√N)' if self.radius is None else self.radius}"

    def latex(self, x: str = "x") -> str:
        return rf"|i-j|\le {_ROOT if self.radius is None else self.radius}"


def near_root(length: int) -> int:
    """The default stride: the integer nearest to √length, at least 1."""
    return max(1, round(math.sqrt(length)))
