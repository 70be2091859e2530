"""What `primaldual data` shows of time series."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..base.terminal import titled
from .main import _escape

if TYPE_CHECKING:
    from ..data import Dataset


def series_table(store: Path, directory: Path | None) -> Table:
    """A line per set of known size, and per set that is here, with where it is."""
    from ..data import manifest
    from ..data.cache import cached_names
    from ..data.sources import in_aeon, names_in

    cached, found = cached_names(store), names_in(directory) if directory else []
    table = titled("time series of the UEA and TSER archives")
    table.add_column("set", style="bold cyan", no_wrap=True)
    for heading in ("cases", "shape", "classes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    for name in sorted({*manifest(), *cached, *found}, key=str.lower):
        sizes = ["–"] * 3
        if entry := manifest().get(name):
            cases = ("~" if entry.approximate else "") + "+".join(map(str, entry.cases[0]))
            sizes = [cases, f"{entry.length}×{entry.channels}", str(entry.classes or "–")]
        places = {"cache": name in cached, "data": name in found, "aeon": in_aeon(name) is not None}
        table.add_row(name, *sizes, ", ".join(place for place, there in places.items() if there) or "[dim]–[/]")
    return table


def series_line(data: Dataset) -> str:
    """A set in short."""
    what = f", {len(data.classes)} classes" if data.classes else ", regression"
    return _escape(f"{data.name}: {len(data.train)} + {len(data.test)} series, {data.length} × {data.channels}{what}")


def series_info(data: Dataset) -> dict[str, str]:
    """What a set holds."""
    ends = data.train.lengths
    lengths = f"{data.length}" if int(ends.min()) == data.length else f"{int(ends.min())} to {data.length}"
    rows = {"kind": data.kind, "cases": f"{len(data.train)} training, {len(data.test)} test", "length": lengths}
    rows |= {"channels": str(data.channels)}
    if data.classes:
        counts = data.train.y.bincount(minlength=len(data.classes)).tolist()
        rows |= {"classes": ", ".join(f"{c} ({n})" for c, n in zip(data.classes, counts, strict=True))}
    else:
        y = data.train.y
        rows |= {"targets": f"{y.min():.4g} to {y.max():.4g}, mean {y.mean():.4g}, std {y.std():.4g}"}
    return rows | {"from": data.origin, "hash": data.hash}
