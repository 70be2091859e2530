"""Records as numbers to compare: per set and method, over the sets, and pair by pair."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from ...base.packages import needed
from ...data.ts import Kind
from ...paper.paired import Outcome, outcome
from .job import Job
from .methods import OURS
from .records import Record

ENOUGH = 6
"""Sets that a Wilcoxon test needs: with fewer it cannot reach 5 %."""


@dataclass
class Cell:
    """A method on a set.

    Args:
        expected: fits that were asked for.
        records: of those that came to their end.
        failures: of the others, by split and seed.
    """

    expected: int = 0
    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def values(self, measure: str) -> list[float]:
        """Of every fit that has it: a score, or seconds and bytes."""
        found = (record["scores"].get(measure, record.get(measure)) for record in self.records)
        return [value for value in found if value is not None]

    def mean(self, measure: str) -> float | None:
        """Over the fits; None where none has it."""
        values = self.values(measure)
        return fmean(values) if values else None


@dataclass(frozen=True)
class Pair:
    """The first method against a rival, on the sets that both have.

    Args:
        gain: by how much the first is better in the mean; None for regression, where sets have units of their own.
        p: of the two-sided Wilcoxon signed-rank test; None with too few sets.
    """

    rival: str
    sets: int
    outcome: Outcome
    gain: float | None
    p: float | None


@dataclass(frozen=True)
class Results:
    """All that was measured on sets of one kind.

    Args:
        sets, methods: in the order of the tables; ours is the first method.
        cells: by set and method.
    """

    kind: Kind
    sets: tuple[str, ...]
    methods: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]

    @property
    def measure(self) -> str:
        """What ranks are made of."""
        return "accuracy" if self.kind == "classification" else "rmse"

    @property
    def lower_is_better(self) -> bool:
        """Of that measure."""
        return self.kind == "regression"

    @property
    def measured(self) -> tuple[str, ...]:
        """The methods that came to their end on any set; the others have no rank, and keep no set out."""
        return tuple(m for m in self.methods if any(self.cells[s, m].records for s in self.sets))

    @property
    def complete(self) -> tuple[str, ...]:
        """The sets on which every one of these came to its end at least once."""
        measured = self.measured
        return tuple(s for s in self.sets if measured and all(self.cells[s, m].records for m in measured))

    def scores(self) -> np.ndarray:
        """[complete sets, measured methods]: means over the fits."""
        rows = [[self.cells[s, m].mean(self.measure) for m in self.measured] for s in self.complete]
        return np.array(rows, dtype=float).reshape(len(rows), len(self.measured))

    def ranks(self) -> dict[str, float]:
        """Mean ranks over the complete sets, 1 the best; equal ones share theirs."""
        if not self.complete:
            return {}
        stats = needed("scipy.stats", "scipy", "ranks of methods")
        ranked = stats.rankdata(self.scores().round(6) * (1 if self.lower_is_better else -1), axis=1)
        return dict(zip(self.measured, ranked.mean(0).tolist(), strict=True))

    def pairs(self) -> list[Pair]:
        """The first method against every other."""
        return [self._pair(rival) for rival in self.methods[1:]]

    def _pair(self, rival: str) -> Pair:
        both = [(self.cells[s, self.methods[0]], self.cells[s, rival]) for s in self.sets]
        means = [(a.mean(self.measure), b.mean(self.measure)) for a, b in both]
        found = np.array([(a, b) for a, b in means if a is not None and b is not None]).reshape(-1, 2)
        gains = (found[:, 0] - found[:, 1]) * (-1 if self.lower_is_better else 1)
        if self.lower_is_better:  # errors have the unit of their set: they are compared as shares of the rival's
            gains = gains / np.maximum(np.abs(found[:, 1]), np.finfo(float).tiny)
        gain = None if self.lower_is_better or not len(gains) else float(gains.mean())
        return Pair(rival, len(gains), outcome(gains.tolist()), gain, _wilcoxon(gains))


def _wilcoxon(gains: np.ndarray) -> float | None:
    if len(gains) < ENOUGH or not gains.any():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ties make the p value an approximation
        return float(needed("scipy.stats", "scipy", "a Wilcoxon test").wilcoxon(gains).pvalue)


def results(wanted: Sequence[Job], records: Mapping[Job, Record | None], methods: Sequence[str]) -> list[Results]:
    """Of the jobs that were asked for, one of each kind of sets."""
    found = []
    ordered = sorted(methods, key=lambda name: name != OURS)  # ours first, the others as they were named
    for kind in ("classification", "regression"):
        cells: dict[tuple[str, str], Cell] = {}
        for job in (job for job in wanted if job.kind == kind):
            cell = cells.setdefault((job.dataset, job.method), Cell())
            cell.expected += 1
            record = records[job]
            if record is not None and "failure" in record:
                cell.failures.append(f"split {job.split}, seed {job.seed}: {record['failure']}")
            elif record is not None:
                cell.records.append(record)
        sets = tuple(dict.fromkeys(name for name, _ in cells))
        if sets:
            of_kind = tuple(name for name in ordered if any(method == name for _, method in cells))
            found.append(Results(kind, sets, of_kind, cells))
    return found


def summary(found: Results) -> list[dict[str, Any]]:
    """A line per method: means over the complete sets, and seconds of one fit of each, in all."""
    lines = []
    ranks = found.ranks()
    score_names = ("accuracy", "macro_f1", "log_loss") if found.kind == "classification" else ()
    for name in found.methods:
        cells = [found.cells[one, name] for one in found.complete if name in ranks]
        line: dict[str, Any] = {"method": name, "sets": sum(bool(found.cells[s, name].records) for s in found.sets)}
        line["rank"] = ranks.get(name)
        for measure in score_names:
            means = [cell.mean(measure) for cell in cells]
            line[measure] = fmean(m for m in means if m is not None) if means and None not in means else None
        for measure in ("fit_seconds", "fit_cpu_seconds", "predict_seconds"):
            line[measure] = sum(cell.mean(measure) or 0.0 for cell in cells) if cells else None
        line["peak_bytes"] = max((max(cell.values("peak_bytes"), default=0) for cell in cells), default=0) or None
        lines.append(line)
    return lines
