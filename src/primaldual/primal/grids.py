"""Sequences of patches: how many rows and columns there are, after how many tokens that are none."""

from __future__ import annotations

import math

import torch


def grid_of(owner: str, length: int, grid: tuple[int, int] | None, prefix: int) -> tuple[int, int]:
    """The grid of a sequence: the one given, checked against the length, or the square that fits."""
    patches = length - prefix
    if grid is None:
        # a compiler knows a length by its name alone, and math.isqrt takes numbers
        compiling = torch.compiler.is_compiling()
        side = int(math.sqrt(patches) + 0.5) if compiling else math.isqrt(max(patches, 0))
        if patches < 1 or side * side != patches:
            class_token = f"prefix={prefix + 1} if the first token is no patch, or " if patches == side**2 + 1 else ""
            raise ValueError(
                f"{owner}: {length} tokens less {prefix} prefix tokens are {patches}, not a square; give {class_token}"
                f"grid=(rows, columns)"
            )
        return side, side
    if (cells := grid[0] * grid[1]) != patches:
        more = f"; give prefix={length - cells} if the first are no patches" if length > cells else ""
        raise ValueError(
            f"{owner}: grid {grid[0]}×{grid[1]} and {prefix} prefix tokens make {prefix + cells} tokens, but the "
            f"sequence has {length}{more}"
        )
    return grid


def check_grid(owner: str, grid: tuple[int, int] | None, prefix: int) -> None:
    """Raise unless `grid` is None or a pair of positive integers, and `prefix` a count."""
    if grid is not None:
        check_pair(owner, "grid", grid)
    if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
        raise ValueError(f"{owner}: prefix must be an integer of at least 0, got {prefix!r}")


def check_pair(owner: str, name: str, value: object) -> None:
    """Raise unless `value` is a pair of positive integers."""
    if not (isinstance(value, tuple) and len(value) == 2 and all(type(v) is int and v > 0 for v in value)):
        raise ValueError(f"{owner}: {name} must be a pair of positive integers, got {value!r}")
