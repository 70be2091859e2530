"""Learning-rate schedules as values: what a step's rate is a multiple of, and β₁ where it cycles.

A schedule is asked for every step ahead of the training, in float64; each is torch's scheduler of that name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..primal import Spec
from ..primal._spec import check_count, is_number

BETA = 0.9
"""β₁ where it does not cycle."""


@dataclass(frozen=True)
class Schedule(Spec):
    """The learning rate over the steps of a training, as a multiple of the recipe's."""

    def rate(self, step: int, steps: int) -> float:
        """At a step, the first of which is 0, of so many."""
        raise NotImplementedError

    def beta(self, step: int, steps: int) -> float:
        """β₁ at a step."""
        return BETA

    @property
    def cycles_beta(self) -> bool:
        """Whether β₁ differs between steps."""
        return type(self).beta is not Schedule.beta


@dataclass(frozen=True)
class Constant(Schedule):
    """The recipe's rate, always."""

    def rate(self, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class _Decay(Schedule):
    """A rise by equal parts to the recipe's rate, then a decay to `floor` times it.

    Args:
        warmup: steps of the rise: their rates are 1/warmup, 2/warmup, …, 1.
        floor: what the decay ends at, as a multiple of the recipe's rate.
    """

    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_count(owner, "warmup", self.warmup, least=0)
        if not is_number(self.floor) or not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"{owner}: floor must be in [0, 1], got {self.floor!r}")

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, steps - self.warmup)
        return self.floor + (1 - self.floor) * self._left(share)

    def _left(self, share: float) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Cosine(_Decay):
    """Warm-up, then half a cosine: torch's `LinearLR`, and `CosineAnnealingLR` after it."""

    def _left(self, share: float) -> float:
        return (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Linear(_Decay):
    """Warm-up, then a straight line: torch's `LinearLR` twice."""

    def _left(self, share: float) -> float:
        return 1 - share


@dataclass(frozen=True)
class OneCycle(Schedule):
    """torch's `OneCycleLR`, whose max_lr is the recipe's rate: up and down once, while β₁ goes down and up.

    Args:
        rise: share of the steps that go up (pct_start).
        start, end: the first rate is 1/start of the recipe's (div_factor), the last 1/end of the first
            (final_div_factor).
        low, high: β₁ at the highest rate and at both ends (base_momentum, max_momentum); equal for a constant β₁.
        anneal: "cos" or "linear".
    """

    rise: float = 0.3
    start: float = 25.0
    end: float = 1e4
    low: float = 0.85
    high: float = 0.95
    anneal: str = "cos"

    def __post_init__(self) -> None:
        for name, least, most in (("rise", 0.0, 1.0), ("low", 0.0, 1.0), ("high", 0.0, 1.0)):
            value = getattr(self, name)
            if not is_number(value) or not least < value < most:
                raise ValueError(f"OneCycle: {name} must be in (0, 1), got {value!r}")
        for name in ("start", "end"):
            if not is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise ValueError(f"OneCycle: {name} must be a positive number, got {getattr(self, name)!r}")
        if self.anneal not in ("cos", "linear"):
            raise ValueError(f"OneCycle: anneal must be one of cos, linear; got {self.anneal!r}")

    def rate(self, step: int, steps: int) -> float:
        first = 1 / self.start
        return self._between(step, steps, first, 1.0, first / self.end)

    def beta(self, step: int, steps: int) -> float:
        return self._between(step, steps, self.high, self.low, self.high)

    @property
    def cycles_beta(self) -> bool:
        return self.low != self.high or self.high != BETA

    def _between(self, step: int, steps: int, first: float, middle: float, last: float) -> float:
        top = self.rise * steps - 1
        if step <= top:
            return self._anneal(first, middle, step / top if top else 1.0)
        return self._anneal(middle, last, (step - top) / (steps - 1 - top))

    def _anneal(self, a: float, b: float, share: float) -> float:
        if self.anneal == "linear":
            return (b - a) * share + a
        return b + (a - b) / 2 * (1 + math.cos(math.pi * share))
