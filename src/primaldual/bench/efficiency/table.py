"""What was counted and measured, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from ...base.terminal import titled
from ..session import Content, Measurement
from .setting import MECHANISMS, STEPS
from .stated import PAPER

LEGEND = """materialised, where nothing else is said: every score in memory, float32, one document after the other.
fused: no score in memory; both documents at once. counted: closed forms (docs/efficiency.md). measured: FLOPs as torch
counts operators; memory: weights, tokens and the most that one step allocates beyond them."""
_FIGURES = {"flops": "FLOPs", "bytes": "memory"}


def tables(content: Content) -> list[Table]:
    """The stated point; what it depends on; speed."""
    stated = content["stated"]
    return [_stated(stated), _assumptions(stated), *_speeds(content["records"])] if stated else []


def _stated(stated: dict[str, Any]) -> Table:
    """Changes of FLOPs and memory."""
    table = titled(f"÷ softmax or sparse at dimension {stated['dimension']}, length {stated['length']}: change in %")
    table.add_column("mechanism", style="bold cyan", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    table.add_column("step", no_wrap=True)
    for heading in ("counted", "measured", "paper", "fused\ncounted", "fused\nmeasured"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = None
    for row in stated["rows"]:
        name = row["mechanism"]
        if shown not in (None, name):
            table.add_section()
        cells = [_percent(row[f"materialised_{kind}"]) for kind in ("counted", "measured")]
        cells += [_percent(row.get("paper")), *(_percent(row[f"fused_{kind}"]) for kind in ("counted", "measured"))]
        table.add_row("" if shown == name else name, _FIGURES[row["figure"]], row["step"], *cells)
        shown = name
    return table


def _assumptions(stated: dict[str, Any]) -> Table:
    """Counted memory under other assumptions."""
    table = titled("bn+sh ÷ softmax, 64 × 4096, materialised, on a GPU: change of memory in %")
    table.add_column("", no_wrap=True)
    for step in STEPS:
        table.add_column(step, justify="right", no_wrap=True)
    for row in stated["assumptions"]:
        table.add_row(row["what"], *(_percent(row[step]) for step in STEPS))
    table.add_row("the paper", *(_percent(PAPER["bn+sh", "bytes", step]) for step in STEPS), style="bold")
    return table


def _speeds(records: list[Measurement]) -> Iterator[Table]:
    """A table per step and dimension, with a column per length."""
    speeds = [r for r in records if r["subject"] == "speed"]
    for step, dimension in dict.fromkeys((r["step"], r["dimension"]) for r in speeds):
        here = sorted(
            (r for r in speeds if (r["step"], r["dimension"]) == (step, dimension)), key=lambda r: r["length"]
        )
        table = titled(f"{step}, dimension {dimension}, {here[0]['dtype']}: ms per step (million tokens per second)")
        table.add_column("pairs × length", style="bold cyan", no_wrap=True)
        for r in here:
            table.add_column(f"{r['pairs']} × {r['length']}", justify="right", no_wrap=True)
        for name in MECHANISMS:
            table.add_row(name, *(_speed(r["mechanisms"][name]) for r in here))
        yield table


def _speed(found: Measurement) -> str:
    if "error" in found:
        return "–"
    return f"{1e3 * found['seconds']:.3g} ({found['tokens_per_second'] / 1e6:.3g})"


def errors(content: Content) -> list[str]:
    """What could not be measured, a line each."""
    return [
        f"{r['subject']}, {r['attention']}, {r['step']}, {r['dimension']} × {r['length']}, {name}: {found['error']}"
        for r in content["records"]
        for name, found in r["mechanisms"].items()
        if "error" in found
    ]


def _percent(change: float | None) -> str:
    """A change, with a sign.

    >>> _percent(-0.2388), _percent(0.0)
    ('−23.9', '0.0')
    """
    if change is None:
        return "–"
    text = f"{100 * change:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")
