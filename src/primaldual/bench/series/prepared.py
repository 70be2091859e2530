"""Series as a rival takes them: what it can do by its own tags is left to it, the rest is done alike for all.

Missing values are interpolated within a series. Series are padded by the training mean of their channel to the longest
training series, and longer ones are cut there. Classes of scikit-learn get one row of numbers for each series, every
column standardised by the training rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...data import fill_gaps
from .methods import class_of


@dataclass
class Preparation:
    """Learned from training series, applied to any.

    Args:
        path: the class of the estimator.
    """

    path: str
    notes: list[str] = field(default_factory=list)

    def fit(self, series: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
        """Training series as the estimator takes them."""
        self.rows = not hasattr(class_of(self.path), "get_class_tag")
        self.length = max(x.shape[1] for x in series)
        total = np.sum([np.nansum(x, axis=1) for x in series], axis=0)
        known = np.sum([(~np.isnan(x)).sum(1) for x in series], axis=0)
        self.mean = total / np.maximum(known, 1)
        made = self.apply(series)
        if not self.rows:
            return made
        assert isinstance(made, np.ndarray)
        self.centre, spread = made.mean(0), made.std(0)
        self.spread = np.where(spread > 1e-12 * np.abs(self.centre), spread, 1.0)
        self._note("one row of standardised numbers for each series")
        return (made - self.centre) / self.spread

    def apply(self, series: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
        """[cases, channels, steps], [cases, numbers], or the series as they are where they are unequal."""
        if any(np.isnan(x).any() for x in series) and not self._takes("missing_values"):
            self._note("missing values interpolated")
            series = [self._filled(x) for x in series]
        if any(x.shape[1] != self.length for x in series) and not self._takes("unequal_length"):
            self._note("padded or cut to the longest training series")
            series = [self._padded(x) for x in series]
        if len({x.shape for x in series}) > 1:
            return series
        made = np.stack(series)
        if not self.rows:
            return made
        flat = made.reshape(len(made), -1)
        return (flat - self.centre) / self.spread if hasattr(self, "centre") else flat

    def _takes(self, what: str) -> bool:
        cls: Any = class_of(self.path)
        return not self.rows and bool(cls.get_class_tag(f"capability:{what}", tag_value_default=False))

    def _filled(self, x: np.ndarray) -> np.ndarray:
        filled = fill_gaps(x.T).T
        known = np.where(np.isnan(filled), self.mean[:, None], filled)  # a channel without any value
        return np.ascontiguousarray(known)  # as numba's distances of lists take them

    def _padded(self, x: np.ndarray) -> np.ndarray:
        more = self.length - x.shape[1]
        return x[:, : self.length] if more <= 0 else np.hstack([x, np.repeat(self.mean[:, None], more, axis=1)])

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
