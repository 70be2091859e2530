"""Everything the demo measured, and its summary."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from ..dual import Expansion
from ..primal import Recenter
from .checks import Check
from .output import MARK
from .recipe import PAPER, Recipe
from .train import Run

MEGA = 1e6


class Spread(NamedTuple):
    """Mean and sample standard deviation; the latter is None for a single value."""

    mean: float
    std: float | None

    def text(self, digits: int = 2) -> str:
        """As "98.50 ± 1.37"."""
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" ± {self.std:.{digits}f}")


def spread(values: list[float]) -> Spread:
    """The mean of `values` and how far they scatter.

    >>> spread([1.0, 3.0]).text()
    '2.00 ± 1.41'
    """
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass
class Results:
    """One demo: what was derived, checked and trained. Mechanisms keep their order throughout."""

    recipe: Recipe
    command: str
    data_sha256: str
    length: int
    classes: tuple[str, ...]
    expansions: dict[str, Expansion]
    started: datetime
    environment: dict[str, str | int]
    checks: list[Check] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    sweep: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, mechanism: str) -> list[Run]:
        """The runs of a mechanism, by seed."""
        return sorted((run for run in self.runs if run.mechanism == mechanism), key=lambda run: run.seed)

    def accuracy(self, mechanism: str) -> Spread:
        """Test accuracy after the last epoch, in percent."""
        return spread([run.accuracy for run in self.of(mechanism)])

    def head_distance(self, mechanism: str) -> Spread:
        """Distance between heads after the last epoch."""
        return spread([run.head_distance for run in self.of(mechanism)])

    def train_seconds(self, mechanism: str) -> Spread:
        """Training time of one run."""
        return spread([run.seconds for run in self.of(mechanism)])

    def by_beta(self) -> dict[float, list[Run]]:
        """The sweep: softmax is β = 0, `bn` its own β; each β with the seeds that all of them share."""
        if not self.sweep:
            return {}
        seeds = {run.seed for run in self.sweep}
        found = [(0.0, run) for run in self.of("softmax")] + [(_beta(run), run) for run in self.of("bn") + self.sweep]
        grouped: dict[float, list[Run]] = {}
        for beta, run in sorted(found, key=lambda pair: (pair[0], pair[1].seed)):
            if run.seed in seeds:
                grouped.setdefault(beta, []).append(run)
        return grouped

    def flops(self, mechanism: str, rewritten: bool) -> int:
        """Forward FLOPs of attention per series, all layers: key and value projections, input maps, the sum."""
        recipe = self.recipe
        expansion = self.expansions[mechanism]
        cost = (expansion if rewritten else expansion.as_written).cost(
            queries=self.length, keys=self.length, heads=recipe.heads, head_dim=recipe.d_model // recipe.heads,
        )  # fmt: skip
        return recipe.layers * cost.total

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; attention maps are left out."""
        return {
            "what": MARK,
            "command": self.command,
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 2),
            "environment": self.environment,
            "recipe": self.recipe.to_dict(),
            "data": {"name": "BasicMotions", "sha256": self.data_sha256, "classes": list(self.classes)},
            "summary": {name: self._summary(name) for name in self.expansions},
            "checks": [check._asdict() for check in self.checks],
            "runs": [_record(run) for run in self.runs],
            "sweep": [_record(run) for run in self.sweep],
            "notes": self.notes,
        }

    def _summary(self, name: str) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy(name)._asdict(),
            "paper": dict(zip(("mean", "std"), PAPER[name], strict=True)),
            "parameters": self.of(name)[0].parameters,
            "flops": {"before": self.flops(name, rewritten=False), "after": self.flops(name, rewritten=True)},
            "train_seconds": self.train_seconds(name)._asdict(),
            "head_distance": self.head_distance(name)._asdict(),
            "rewrites": [rewrite.name for rewrite in self.expansions[name].rewrites],
        }


def _record(run: Run) -> dict[str, Any]:
    record = run._asdict()
    del record["maps"]
    return record | {"primal": run.primal.to_dict(), "losses": list(run.losses), "accuracies": list(run.accuracies)}


def _beta(run: Run) -> float:
    (recentered,) = run.primal.inputs
    assert isinstance(recentered, Recenter)
    return recentered.beta
