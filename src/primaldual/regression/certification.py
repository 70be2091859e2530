"""The result of `certify`: measured numbers against their tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Check:
    """A measured number against its tolerance. Without a tolerance it informs; without a value it was skipped."""

    name: str
    value: float | None
    tolerance: float | None = None
    note: str = ""

    @property
    def status(self) -> Literal["ok", "FAILED", "skipped", "info"]:
        if self.value is None:
            return "skipped"
        if self.tolerance is None:
            return "info"
        return "ok" if self.value <= self.tolerance else "FAILED"  # a NaN fails


@dataclass(frozen=True)
class Certification:
    """What was drawn, and what was measured on it.

    queries: the sample of queries, for sparse heads; every check is then the worst over it.
    alpha: how many dual variables are zero, free and at the bound C.
    """

    mechanism: str
    length: int
    heads: int
    head_dim: int
    outputs: int
    seed: int
    epsilon: float
    bias: bool
    queries: tuple[int, ...]
    alpha: dict[str, int]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "FAILED")

    @property
    def ok(self) -> bool:
        """Whether no check exceeds its tolerance."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Plain data that strict JSON takes: numbers that are not finite become text."""
        plain = {name: value for name, value in vars(self).items() if name != "checks"}
        checks = [vars(check) | {"value": _plain(check.value), "status": check.status} for check in self.checks]
        return {"ok": self.ok} | plain | {"checks": checks}


def worst(checks: list[Check]) -> Check:
    """The same check on several problems as one: a failure, the largest value, a value before none."""
    key = {"FAILED": 2, "ok": 1, "info": 1, "skipped": 0}

    def badness(check: Check) -> tuple[int, float]:
        value = check.value if check.value is not None else 0.0
        return key[check.status], math.inf if math.isnan(value) else value

    return max(checks, key=badness)


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
