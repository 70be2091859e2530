"""Dropout at one place of the model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Dropout(NamedTuple):
    """A share, and the seed [1] of one place in the model."""

    p: float
    seed: Tensor


def drop_arguments(drop: Dropout | None, x: Tensor) -> tuple[Tensor, tuple[int, float]]:
    """The seed (x stands in for none); the hash below which an entry is dropped, and the factor of the others."""
    return (x, (0, 1.0)) if drop is None else (drop.seed, (round(drop.p * 2**32), 1.0 / (1.0 - drop.p)))
