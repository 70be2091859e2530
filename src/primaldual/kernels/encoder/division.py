"""Where there are kernels, and how a pass over memory is divided among their programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import launching
from ..launching import MULTIPROCESSORS, power_of_2

TILE, STAGES = 2048, 4
"""Elements of a tile, and tiles that a program has at hand: all but one are on their way."""


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this device and dtype."""
    return dtype != torch.float64 and launching.refusal_of_device(device) is None


class Division(NamedTuple):
    """How [members, rows, width] is divided among programs: rows and columns of a tile, rows of a run."""

    members: int
    rows: int
    width: int
    tile_rows: int
    tile_columns: int
    span: int

    @property
    def runs(self) -> int:
        return -(-self.rows // self.span)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.runs, -(-self.width // self.tile_columns), self.members

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What a kernel is compiled for: D, BR, BD and STAGES."""
        return self.width, self.tile_rows, self.tile_columns, STAGES


def divided(x: Tensor, each: int, whole_rows: bool = False) -> Division:
    """For a kernel of which a multiprocessor holds `each` programs: more would wait, and run when others idle."""
    members, rows, width = x.shape
    columns = power_of_2(width) if whole_rows else columns_of(width)
    tile = max(1, TILE // columns)
    programs = max(1, each * MULTIPROCESSORS // (members * -(-width // columns)))
    span = -(-rows // programs)
    return Division(members, rows, width, tile, columns, -(-span // tile) * tile)


def columns_of(width: int) -> int:
    """A power of 2: a divisor of the width unless that is small."""
    divisor = width & -width
    return min(divisor, 256) if divisor >= 64 else min(power_of_2(width), 64)
