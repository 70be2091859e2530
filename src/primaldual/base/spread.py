"""Mean and standard deviation of a few values."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import NamedTuple


class Spread(NamedTuple):
    """Mean and sample standard deviation; the latter is None for a single value."""

    mean: float
    std: float | None

    def text(self, digits: int = 2) -> str:
        """As "98.50 ± 1.37"."""
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" ± {self.std:.{digits}f}")


def spread(values: Collection[float]) -> Spread:
    """The mean of `values` and how far they scatter.

    >>> spread([1.0, 3.0]).text()
    '2.00 ± 1.41'
    """
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def spread_text(values: Collection[float], of: int, digits: int = 2) -> str:
    """As "98.50 ± 1.37 (4 of 5)", where fewer values are there than there should be; a dash without any.

    >>> spread_text([98.5], of=2), spread_text([], of=2)
    ('98.50 (1 of 2)', '–')
    """
    if not values:
        return "–"
    return spread(values).text(digits) + ("" if len(values) == of else f" ({len(values)} of {of})")
