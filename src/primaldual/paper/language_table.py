"""Language models as measured: bits per byte of IMDb, how long a step takes, what a token costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from ..base.spread import spread, spread_text
from ..models import LanguageConfig
from ..models.language_flops import LanguageFlops, flops
from ..training import Record, text_recipe
from . import render
from .engine import Failure
from .job import Job, Recorded, recorded
from .language import BASELINE, NAME
from .notes import notes
from .paired import outcome
from .render import Grid

COLUMNS = (
    "size", "mechanism", "kind", "seeds", "failed", "mean", "std", "gain_percent", "wins", "ties", "losses",
    "seconds_per_step", "tokens_per_second", "flops_forward", "flops_training", "flops_attention", "parameters",
    "device",
)  # fmt: skip
KINDS = ("last", "selected")
LEGEND = (
    "Bits per byte of the test folder, less is better: mean ± std (n − 1) over the seeds that came to the end. last: "
    "of the last weights. selected: of those that did best on validation, a twentieth of the train folder. Every byte "
    "is predicted once, in windows of the model's context, side by side. gain: by how much less than softmax needs, of "
    "the same seeds.",
    "ms: of a step of one model on the device that is named, the median. FLOPs: of a token, in closed form; those of "
    "attention are a part of the forward pass, and training is three times that.",
)


@dataclass(frozen=True)
class LanguageCell:
    """One mechanism at one size: the model, and its records by seed."""

    config: LanguageConfig
    records: Mapping[int, Record]

    @property
    def ended(self) -> dict[int, Record]:
        """Those of members that did not fail."""
        return {seed: record for seed, record in sorted(self.records.items()) if record.failure is None}

    def values(self, kind: str) -> dict[int, float]:
        """`last` or `selected`, by seed."""
        scores = {seed: getattr(record, kind) for seed, record in self.ended.items()}
        return {seed: score.value for seed, score in scores.items() if score}

    def speed(self, name: str) -> float | None:
        """The median over the seeds."""
        found = [record.speed[name] for record in self.ended.values() if name in record.speed]
        return median(found) if found else None

    @property
    def flops(self) -> LanguageFlops:
        """Of a token."""
        return flops(self.config)

    @property
    def parameters(self) -> int | None:
        """Of the model, once one is trained."""
        return next((record.parameters for record in self.records.values()), None)

    @property
    def devices(self) -> tuple[str, ...]:
        """That it was trained on."""
        return tuple(dict.fromkeys(record.environment["device"] for record in self.ended.values()))


@dataclass(frozen=True)
class LanguageTable:
    """What was measured.

    Args:
        cells: by size and mechanism.
        seeds: that there should be.
        notes: what is missing, what failed, what is not as in the recipe.
    """

    cells: dict[tuple[str, str], LanguageCell]
    seeds: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[str, ...]:
        """Of the models."""
        return tuple(dict.fromkeys(size for size, _ in self.cells))

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Its columns."""
        return tuple(dict.fromkeys(column for _, column in self.cells))

    def pairs(self, size: str, column: str, kind: str) -> list[tuple[float, float]]:
        """Of every seed that both have: bits per byte, and those of softmax."""
        if (size, BASELINE) not in self.cells or column == BASELINE:
            return []
        mine, base = (self.cells[size, name].values(kind) for name in (column, BASELINE))
        return [(mine[seed], base[seed]) for seed in mine if seed in base]

    def gain(self, size: str, column: str, kind: str) -> float | None:
        """By how many percent less than softmax's, in the mean."""
        pairs = self.pairs(size, column, kind)
        return 100 * (1 - fmean(mine for mine, _ in pairs) / fmean(base for _, base in pairs)) if pairs else None

    def grids(self) -> tuple[Grid, ...]:
        """The numbers as text: a grid for each size."""
        return tuple(Grid(self._title(size), ("", "", *self.mechanisms), self._rows(size)) for size in self.sizes)

    def _title(self, size: str) -> str:
        devices = tuple(dict.fromkeys(d for (s, _), cell in self.cells.items() if s == size for d in cell.devices))
        return ", ".join([f"{NAME}: {size}", "bits per byte of IMDb", *devices])

    def _rows(self, size: str) -> tuple[tuple[str, ...], ...]:
        cells = {column: self.cells[size, column] for column in self.mechanisms}
        rows: list[tuple[str, ...]] = []
        for kind in KINDS:
            texts = (spread_text(cell.values(kind).values(), len(self.seeds), 4) for cell in cells.values())
            rows.append(("bits per byte" if kind == KINDS[0] else "", kind, *texts))
        for kind in KINDS:
            gains = (_number(self.gain(size, column, kind), "+.2f") for column in cells)
            rows.append(("gain, %" if kind == KINDS[0] else "", kind, *gains))
        speeds = {"ms": ("seconds_per_step", 1e3, ".1f"), "tokens / s": ("tokens_per_second", 1.0, ",.0f")}
        for title, (name, unit, form) in speeds.items():
            found = [cell.speed(name) for cell in cells.values()]
            rows.append(("step" if title == "ms" else "", title, *(_number(x and unit * x, form) for x in found)))
        for title in ("forward", "attention"):
            counted = (getattr(cell.flops, title) / 1e6 for cell in cells.values())
            rows.append(("FLOPs, millions" if title == "forward" else "", title, *(f"{x:.2f}" for x in counted)))
        counts = ("–" if cell.parameters is None else f"{cell.parameters:,}" for cell in cells.values())
        return (*rows, ("parameters", "", *counts))

    def rows(self) -> Iterator[dict[str, Any]]:
        """For CSV: a row per size, mechanism and kind."""
        for (size, column), cell in self.cells.items():
            for kind in KINDS:
                values, compared = list(cell.values(kind).values()), self.pairs(size, column, kind)
                won = outcome(base - mine for mine, base in compared)._asdict() if compared else {}
                yield {
                    "size": size, "mechanism": column, "kind": kind, "seeds": len(values),
                    "failed": len(cell.records) - len(cell.ended), "gain_percent": self.gain(size, column, kind),
                    "seconds_per_step": cell.speed("seconds_per_step"), "parameters": cell.parameters,
                    "tokens_per_second": cell.speed("tokens_per_second"), "flops_forward": cell.flops.forward,
                    "flops_training": cell.flops.training, "flops_attention": cell.flops.attention,
                    "device": ", ".join(cell.devices),
                } | (spread(values)._asdict() if values else {}) | won  # fmt: skip

    def markdown(self) -> str:
        """For reading."""
        return render.markdown(self.grids(), self.notes, LEGEND)

    def csv(self) -> str:
        """For computing."""
        return render.csv(COLUMNS, self.rows())

    def latex(self) -> str:
        """For a paper; needs booktabs."""
        return render.latex(self.grids(), self.notes, LEGEND)


def measured(
    wanted: Mapping[tuple[str, str], Job], records: Iterable[Record], failures: Sequence[Failure] = ()
) -> LanguageTable:
    """The table from records; those of other jobs are left aside.

    Args:
        wanted: as `jobs` gives it.
        records: of anything.
        failures: what an engine said about jobs without a record.
    """
    found: Recorded = recorded(wanted.values(), records)
    sizes = {job: size for (size, _), job in wanted.items()}
    cells: dict[tuple[str, str], LanguageCell] = {}
    for place, job in wanted.items():
        config = job.config()
        assert isinstance(config, LanguageConfig)
        cells[place] = LanguageCell(config, found[job])
    seeds = next(iter(wanted.values())).seeds
    said = notes(found, failures, lambda job: text_recipe(sizes[job]))
    return LanguageTable(cells, seeds, tuple(said))


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}".replace("-", "−")
