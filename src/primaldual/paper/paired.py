"""The paired test: the exact sign test."""

from __future__ import annotations

from collections.abc import Iterable
from math import comb
from typing import NamedTuple

TIE = 1e-4
"""Differences below it are none: metrics are counted in float32, whose steps are 8e-6 near 100 %."""


class Outcome(NamedTuple):
    """How often a mechanism was better than, like, and worse than the baseline."""

    wins: int
    ties: int
    losses: int

    @property
    def p(self) -> float | None:
        """Two-sided exact sign test: how often a fair coin would be as one-sided; ties are left out.

        It needs nothing but the pairs, and no common scale of the sets; None without a win or loss.

        >>> Outcome(9, 0, 1).p
        0.021484375
        """
        n = self.wins + self.losses
        if n == 0:
            return None
        return min(1.0, 2 * sum(comb(n, k) for k in range(max(self.wins, self.losses), n + 1)) / 2**n)


def outcome(gains: Iterable[float]) -> Outcome:
    """From by how much each pair is better."""
    found = list(gains)
    wins, losses = sum(gain > TIE for gain in found), sum(gain < -TIE for gain in found)
    return Outcome(wins, len(found) - wins - losses, losses)
