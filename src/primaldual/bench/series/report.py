"""What was measured, as tables for a terminal and Markdown, as CSV and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...base.spread import spread_text
from ...paper import render
from ...paper.render import Grid
from .protocol import Protocol
from .results import ENOUGH, Cell, Results, summary
from .scores import LEAST

_MEASURES = {
    "classification": {"accuracy": ("Accuracy, %", 2), "macro_f1": ("Macro-F1, %", 2), "log_loss": ("Log loss", 3)},
    "regression": {"rmse": ("RMSE", 3), "mae": ("MAE", 3)},
}


def grids(found: Sequence[Results], *, short: bool = False) -> list[Grid]:
    """For every kind of sets: scores of every set, means, and pairs; `short` has one measure of every set alone."""
    made = []
    for one in found:
        measures = _MEASURES[one.kind]
        for measure in [one.measure] if short else measures:
            made.append(_scores(one, measure, *measures[measure]))
        if not short:
            made.append(_times(one))
        made.append(_summary(one))
        if len(one.methods) > 1:
            made.append(_pairs(one))
    return made


def _scores(found: Results, measure: str, title: str, digits: int) -> Grid:
    rows = []
    for name in found.sets:
        cells = [found.cells.get((name, method), Cell()) for method in found.methods]
        shown = [_cell(cell, measure, digits) for cell in cells]
        rows.append((name, _cases(cells), *shown))
    return Grid(title, ("set", "train", *found.methods), tuple(rows))


def _cases(cells: Sequence[Cell]) -> str:
    """Training series of a fit; those of the largest fold."""
    known = [record["sizes"]["train"] for cell in cells for record in cell.records]
    return str(max(known)) if known else "–"


def _cell(cell: Cell, measure: str, digits: int) -> str:
    if not cell.records and cell.failures:
        return "failed"
    values = cell.values(measure)
    return spread_text(values, cell.expected, digits) if values else "–"


def _times(found: Results) -> Grid:
    rows = []
    for name in found.sets:
        cells = [found.cells[name, method] for method in found.methods]
        shown = [f"{_number(c.mean('fit_seconds'), 1)} + {_number(c.mean('predict_seconds'), 1)}" for c in cells]
        rows.append((name, _cases(cells), *shown))
    return Grid("Seconds to fit + predict", ("set", "train", *found.methods), tuple(rows))


def _summary(found: Results) -> Grid:
    columns: dict[str, tuple[str, int]] = {"rank": ("rank", 2)}
    if found.kind == "classification":
        columns |= {"accuracy": ("accuracy", 2), "macro_f1": ("macro-F1", 2), "log_loss": ("log loss", 3)}
    columns |= {
        "fit_seconds": ("fit s", 1), "fit_cpu_seconds": ("fit CPU s", 1), "predict_seconds": ("predict s", 1),
        "peak_bytes": ("MiB", 0),
    }  # fmt: skip
    rows = []
    for line in sorted(summary(found), key=lambda line: line["rank"] or math.inf):
        line["peak_bytes"] = line["peak_bytes"] and line["peak_bytes"] / 2**20
        of = str(line["sets"]) if line["sets"] == len(found.sets) else f"{line['sets']} of {len(found.sets)}"
        rows.append((line["method"], of, *(_number(line[name], digits) for name, (_, digits) in columns.items())))
    title = f"Means over the {len(found.complete)} sets that all have: {found.kind}"
    return Grid(title, ("method", "sets", *(title for title, _ in columns.values())), tuple(rows))


def _pairs(found: Results) -> Grid:
    rows = []
    for pair in found.pairs():
        gain = [] if found.kind == "regression" else ["–" if pair.gain is None else f"{pair.gain:+.2f}"]
        p = "–" if pair.p is None else f"{pair.p:.3f}"
        rows.append((pair.rival, str(pair.sets), *map(str, pair.outcome), *gain, p))
    gain_title = [] if found.kind == "regression" else ["gain"]
    header = ("against", "sets", "wins", "ties", "losses", *gain_title, "p")
    return Grid(f"{found.methods[0]} against each, by {found.measure}", header, tuple(rows))


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def notes(found: Sequence[Results]) -> list[str]:
    """What failed, what is missing, and how series were prepared for those that cannot take them."""
    said = []
    for one in found:
        for (name, method), cell in one.cells.items():
            if cell.failures:
                said.append(f"{name}, {method}: {len(cell.failures)} of {cell.expected} failed; {cell.failures[0]}")
            if missing := cell.expected - len(cell.records) - len(cell.failures):
                said.append(f"{name}, {method}: {missing} of {cell.expected} are not measured yet")
        if left_out := [name for name in one.sets if name not in one.complete]:
            said.append(f"means and ranks are without {', '.join(left_out)}: not all methods have a result there")
        prepared: dict[tuple[str, str], list[str]] = {}
        for (name, method), cell in one.cells.items():
            for note in dict.fromkeys(note for record in cell.records for note in record["notes"]):
                prepared.setdefault((method, note), []).append(name)
        for (method, note), names in prepared.items():
            said.append(f"{method}: {note} ({'all sets' if len(names) == len(one.sets) else ', '.join(names)})")
    return said


def legend(found: Sequence[Results], protocol: Protocol, seeds: int) -> list[str]:
    """What the numbers are."""
    words = [
        f"Split: {protocol.words()}. Seeds: {seeds}; a method without a random state has one.",
        "Scores are mean ± standard deviation over all fits of a set. Rank: 1 is the best; equal ones share theirs.",
        "Seconds are of a fit, and of all predictions after it, summed over the sets; MiB is the most of any process.",
    ]
    if any(one.kind == "classification" for one in found):
        words.append(
            f"Macro-F1: the mean over the classes. Log loss: probabilities below {LEAST:g} count as {LEAST:g}; none "
            f"where a method gives labels alone."
        )
    if any(len(one.methods) > 1 for one in found):
        words.append(
            f"Wins, ties and losses are of means over the fits; p: two-sided Wilcoxon signed-rank test over sets, from "
            f"{ENOUGH} sets on."
        )
    return words


def markdown(found: Sequence[Results], protocol: Protocol, seeds: int, pictures: Sequence[str]) -> str:
    """A page: tables, pictures, notes."""
    named = [Grid("Time series: methods side by side", ("", ""), ()), *grids(found)]
    text = render.markdown(named[1:], notes(found), legend(found, protocol, seeds))
    return "\n\n".join([f"# {named[0].title}", text.replace("# ", "## ", 1).rstrip(), *map(_picture, pictures)]) + "\n"


def _picture(name: str) -> str:
    return f"![{name.removesuffix('.png').replace('-', ' ')}]({name})"


def csv(found: Sequence[Results]) -> str:
    """A line per fit."""
    scores = [name for one in found for name in _MEASURES[one.kind]]
    costs = ["fit_seconds", "fit_cpu_seconds", "predict_seconds", "predict_cpu_seconds", "peak_bytes", "n_jobs"]
    columns = ["set", "method", "split", "seed", *scores, *costs, "key"]
    rows = [
        {name: record["scores"].get(name, record.get(name)) for name in columns}
        for one in found
        for cell in one.cells.values()
        for record in cell.records
    ]
    return render.csv(columns, rows)


def as_json(found: Sequence[Results], protocol: Protocol, seeds: int, about: dict[str, Any]) -> str:
    """The same as data."""
    said: dict[str, Any] = {"protocol": protocol.identity() | {"splits": protocol.count}, "seeds": seeds}
    for one in found:
        sets = {
            name: {
                method: {
                    measure: {"mean": cell.mean(measure), "values": cell.values(measure)}
                    for measure in (*_MEASURES[one.kind], "fit_seconds", "fit_cpu_seconds", "predict_seconds")
                }
                | {"expected": cell.expected, "failures": cell.failures}
                for method in one.methods
                if (cell := one.cells.get((name, method)))
            }
            for name in one.sets
        }
        pairs = [asdict(pair) | {"outcome": pair.outcome._asdict()} for pair in one.pairs()]
        said[one.kind] = {"sets": sets, "complete": one.complete, "summary": summary(one), "pairs": pairs}
    said |= {"notes": notes(found), "environment": about}
    return json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
