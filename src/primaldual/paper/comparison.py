"""What was measured beside what the paper prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..base.spread import spread, spread_text
from ..training import Record
from . import render
from .engine import Failure
from .families import family
from .job import jobs, recorded
from .notes import notes
from .numbers import SEEDS
from .paired import Outcome, outcome
from .render import Grid
from .tables import Table, table

COLUMNS = (
    "set", "mechanism", "kind", "seeds", "failed", "mean", "std", "paper_mean", "paper_std", "wins", "ties", "losses",
    "p",
)  # fmt: skip
KINDS = {
    "best": "best: of all epochs, chosen on the test set, as the paper's code bases do.",
    "selected": "selected: the weights that did best on the validation part, on the test part.",
    "last": "last: after the last epoch, nothing chosen.",
}
"""What is reported of a run, in words."""
LEGEND = (
    "paper: mean ± std of 5 runs, as printed. Measured: mean ± std (n − 1) over the seeds that came to the end. "
    "Averages, and the paper's wins: of the sets that are measured for every mechanism here, all if none is.",
    "wins / ties / losses, p: of the two-sided exact sign test, ties left out. sets: means over the seeds. seeds: "
    "every seed of every set, paired with the baseline's of the same seed; as pairs of one set are much alike, p then "
    "says something about these sets, not about others.",
)


@dataclass(frozen=True)
class Cell:
    """One mechanism on one set, by seed: the values of members that came to the end, and why others did not."""

    best: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    selected: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def values(self, kind: str) -> dict[int, float]:
        """`best`, `last` or `selected`."""
        return {"best": self.best, "last": self.last, "selected": self.selected}[kind]


@dataclass(frozen=True)
class Comparison:
    """A table, or a part of it, as measured.

    Args:
        table: of the paper.
        datasets, mechanisms, seeds: the part.
        cells: by set and mechanism; every one of the part is there, if empty.
        notes: what is missing, what failed, what is not as in the paper.
    """

    table: Table
    datasets: tuple[str, ...]
    mechanisms: tuple[str, ...]
    seeds: tuple[int, ...]
    cells: dict[tuple[str, str], Cell]
    notes: tuple[str, ...] = ()

    @property
    def rivals(self) -> tuple[str, ...]:
        """What is compared with the baseline."""
        return tuple(name for name in self.mechanisms if name != self.table.baseline)

    def gains(self, dataset: str, mechanism: str, kind: str) -> list[float]:
        """By how much a mechanism is better than the baseline, for each seed that both have."""
        mine = self.cells[dataset, mechanism].values(kind)
        base = self.cells.get((dataset, self.table.baseline), Cell()).values(kind)
        return [self.table.gain(mine[seed], base[seed]) for seed in self.seeds if seed in mine and seed in base]

    def by_seed(self, mechanism: str, kind: str) -> Outcome:
        """Every seed of every set against the baseline's."""
        return outcome(gain for name in self.datasets for gain in self.gains(name, mechanism, kind))

    def by_set(self, mechanism: str, kind: str) -> Outcome:
        """The means of every set against the baseline's; `kind` may be "paper"."""
        if kind != "paper":
            found = (self.gains(name, mechanism, kind) for name in self.datasets)
            return outcome(fmean(gains) for gains in found if gains)
        pairs = ([self.table.printed(name, one) for one in (mechanism, self.table.baseline)] for name in self.averaged)
        return outcome(self.table.gain(mine.mean, base.mean) for mine, base in pairs if mine and base)

    @property
    def averaged(self) -> tuple[str, ...]:
        """The paper's sets that every mechanism has a value for; all of them when there is none."""
        paper = [name for name in self.datasets if name not in self.table.also] or list(self.datasets)
        return tuple(name for name in paper if all(self.cells[name, m].last for m in self.mechanisms)) or tuple(paper)

    def mean(self, dataset: str, mechanism: str, kind: str) -> float | None:
        """Over the seeds, or as the paper has it."""
        if kind == "paper":
            number = self.table.printed(dataset, mechanism)
            return number and number.mean
        values = self.cells[dataset, mechanism].values(kind)
        return fmean(values.values()) if values else None

    def average(self, mechanism: str, kind: str) -> float | None:
        """Of the means of the sets in `averaged`."""
        means = [self.mean(name, mechanism, kind) for name in self.averaged]
        found = [mean for mean in means if mean is not None]
        return fmean(found) if len(found) == len(means) else None

    def grids(self) -> tuple[Grid, ...]:
        """The numbers, and the comparison with the baseline, as text."""
        kinds = self.table.kinds
        numbers = [
            (
                family(name).title(name) if kind == "paper" else "",
                kind,
                *(self._text(name, m, kind) for m in self.mechanisms),
            )
            for name in self.datasets
            for kind in ("paper", *kinds)
        ]
        for kind in ("paper", *kinds):
            label = f"Average of {len(self.averaged)}" if kind == "paper" else ""
            numbers.append((label, kind, *(_number(self.average(m, kind)) for m in self.mechanisms)))
        found = (Grid(f"{self.table.name}: {self.table.title}", ("set", "", *self.mechanisms), tuple(numbers)),)
        if not self.rivals or self.table.baseline not in self.mechanisms:
            return found
        compared = [
            ("sets" if kind == "paper" else "", kind, *(_outcome(self.by_set(m, kind)) for m in self.rivals))
            for kind in ("paper", *kinds)
        ]
        compared += [
            ("seeds" if kind == kinds[0] else "", kind, *(_outcome(self.by_seed(m, kind)) for m in self.rivals))
            for kind in kinds
        ]
        title = f"against {self.table.baseline}: wins / ties / losses (p)"
        return (*found, Grid(title, ("pairs", "", *self.rivals), tuple(compared)))

    def _text(self, dataset: str, mechanism: str, kind: str) -> str:
        if kind == "paper":
            number = self.table.printed(dataset, mechanism)
            return f"{number.mean:.2f} ± {number.std:.2f}" if number else "–"
        return spread_text(self.cells[dataset, mechanism].values(kind).values(), len(self.seeds))

    def rows(self) -> Iterator[dict[str, Any]]:
        """For CSV: a row per set, mechanism and kind, then the averages and the two tests over all sets."""
        for name in self.datasets:
            for m in self.mechanisms:
                cell, paper = self.cells[name, m], self.table.printed(name, m)
                for kind in self.table.kinds:
                    values = list(cell.values(kind).values())
                    yield {
                        "set": name, "mechanism": m, "kind": kind, "seeds": len(values), "failed": len(cell.failed),
                        **(spread(values)._asdict() if values else {}),
                        "paper_mean": paper and paper.mean, "paper_std": paper and paper.std,
                    } | self._compared(m, outcome(self.gains(name, m, kind)))  # fmt: skip
        for m in self.mechanisms:
            for kind in self.table.kinds:
                means = {"mean": self.average(m, kind), "paper_mean": self.average(m, "paper")}
                row = {"set": "all, by set", "mechanism": m, "kind": kind} | means
                yield row | self._compared(m, self.by_set(m, kind))
                yield row | {"set": "all, by seed"} | self._compared(m, self.by_seed(m, kind))

    def _compared(self, mechanism: str, found: Outcome) -> dict[str, Any]:
        return found._asdict() | {"p": found.p} if mechanism in self.rivals and any(found) else {}

    @property
    def legend(self) -> tuple[str, ...]:
        """What the words in it mean."""
        beside = [f"{family(name).title(name)} stands in no average." for name in self.table.also]
        return (" ".join([LEGEND[0], *beside]), " ".join(KINDS[kind] for kind in self.table.kinds), *LEGEND[1:])

    def markdown(self) -> str:
        """For reading."""
        return render.markdown(self.grids(), self.notes, self.legend)

    def csv(self) -> str:
        """For computing."""
        return render.csv(COLUMNS, self.rows())

    def latex(self) -> str:
        """For a paper; needs booktabs."""
        return render.latex(self.grids(), self.notes, self.legend)


def compare(
    of: str | Table,
    records: Iterable[Record],
    only: Sequence[str] | None = None,
    mechanisms: Sequence[str] | None = None,
    seeds: Sequence[int] = tuple(range(SEEDS)),
    failures: Sequence[Failure] = (),
    **changes: Any,
) -> Comparison:
    """A table from records, such as `Store(folder).records()`; those of other jobs are left aside.

    Args:
        of, only, mechanisms, seeds, changes: as in `jobs`.
        records: of anything.
        failures: what an engine said about jobs without a record.
    """
    of = table(of) if isinstance(of, str) else of
    wanted = jobs(of, only, mechanisms, seeds, **changes)
    found = recorded(wanted, records)
    datasets = tuple(dict.fromkeys(job.dataset for job in wanted))
    columns = tuple(dict.fromkeys(job.mechanism for job in wanted))
    cells = {(job.dataset, job.mechanism): _cell(records) for job, records in found.items()}
    return Comparison(of, datasets, columns, tuple(seeds), cells, tuple(notes(found, failures)))


def _cell(records: dict[int, Record]) -> Cell:
    """A member that failed counts neither as `best` nor as `last`."""
    ended = {seed: record for seed, record in sorted(records.items()) if record.failure is None}
    return Cell(
        {seed: record.best.value for seed, record in ended.items() if record.best},
        {seed: record.last.value for seed, record in ended.items() if record.last},
        {seed: record.selected.value for seed, record in ended.items() if record.selected},
        {seed: record.failure for seed, record in sorted(records.items()) if record.failure},
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _outcome(found: Outcome) -> str:
    if not any(found):
        return "–"
    text = " / ".join(map(str, found))
    return text if found.p is None else f"{text} ({found.p:.3g})"
