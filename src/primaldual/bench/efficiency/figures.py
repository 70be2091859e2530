"""The ratios as heat maps over dimension and length, a figure per mechanism as in the paper; and speed over length."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from ...base.style import COLOURS, INK, PALETTE, figure, png, style
from ..session import Measurement
from .setting import BASELINES, MECHANISMS, STEPS
from .stated import ratio

_TITLES = {"flops": "FLOPs", "bytes": "memory", "seconds": "time"}
_ROWS = (
    ("materialised", "counted", ("flops", "bytes")), ("materialised", "measured", ("measured_flops", "measured_bytes")),
    ("fused", "counted", ("flops", "bytes")), ("fused", "measured", ("seconds", "measured_bytes")),
)  # fmt: skip
"""Of a mechanism's figure: attention, how its ratios were found, and of which figures they are."""

_SPAN = 0.5
"""Ratios so far from 1, where nothing is saved, have the ends of the colours; 1 is white."""

_DARK = 0.34
"""On colours of ratios further from 1 than this numbers are white."""

Ratios = dict[tuple[int, int], float]


def figures(content: dict[str, Any]) -> dict[str, bytes]:
    """PNGs by name: one per mechanism, and one of speed where it was measured."""
    records = content["records"]
    speeds = [r for r in records if r["subject"] == "speed"]
    measured = any("measured_bytes" in found for r in records for found in r["mechanisms"].values())
    device = f", {content['environment']['device']}" if measured else ""
    with style():
        found = {name: png(_maps(records, name, device), 110) for name in BASELINES} if records else {}
        if speeds:
            found["speed"] = png(_speed(speeds, device), 150)
    return found


def _maps(records: list[Measurement], name: str, device: str) -> Figure:
    """Rows as in `_ROWS`, as far as there is something to show; columns of figures, training beside inference."""
    columns = [[_ratios(records, name, at, f, step) for f in of for step in STEPS] for at, _, of in _ROWS]
    shown = [(row, found) for row, found in zip(_ROWS, columns, strict=True) if any(found)]
    dimensions, lengths = (sorted({r[side] for r in records}) for side in ("dimension", "length"))
    drawing = figure(13.0, 0.9 + (0.9 + 0.38 * max(3, len(dimensions))) * len(shown))
    grid = drawing.subplots(len(shown), 2 * len(STEPS), sharex=True, sharey=True, squeeze=False)
    norm = Normalize(1 - _SPAN, 1 + _SPAN)
    for axes_row, ((attention, how, of), found) in zip(grid, shown, strict=True):
        titles = [f"{_TITLES[f.removeprefix('measured_')]}, {step}" for f in of for step in STEPS]
        for axes, title, ratios in zip(axes_row, titles, found, strict=True):
            _map(axes, ratios, dimensions, lengths, norm)
            axes.set_title(title)
        axes_row[0].set_ylabel(f"{attention}, {how}\ndimension")
    for axes in grid[-1]:
        axes.set_xlabel("length")
    bar = drawing.colorbar(ScalarMappable(norm, "RdBu_r"), ax=grid, shrink=0.6, aspect=40, pad=0.01)
    bar.outline.set_visible(False)
    title = f"{name} ÷ {BASELINES[name]}, Retrieval{device}"
    drawing.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return drawing


def _ratios(records: list[Measurement], name: str, attention: str, of: str, step: str) -> Ratios:
    """By dimension and length."""
    here = [r for r in records if r["attention"] == attention and r["step"] == step]
    found = {(r["dimension"], r["length"]): ratio(r, name, of) for r in here if _has(r, of)}
    return {place: value for place, value in found.items() if value is not None}


def _has(record: Measurement, of: str) -> bool:
    return (record["subject"] == "speed") == (of == "seconds")


def _map(axes: Axes, found: Ratios, dimensions: list[int], lengths: list[int], norm: Normalize) -> None:
    values = [[found.get((d, n), float("nan")) for n in lengths] for d in dimensions]
    axes.imshow(values, cmap="RdBu_r", norm=norm, origin="lower", aspect="auto")
    for (d, n), value in found.items():
        ink = "white" if abs(value - 1) > _DARK else INK
        place = lengths.index(n), dimensions.index(d)
        axes.text(*place, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink)
    axes.set_xticks(range(len(lengths)), list(map(str, lengths)))
    axes.set_yticks(range(len(dimensions)), list(map(str, dimensions)))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _speed(records: list[Measurement], device: str) -> Figure:
    """Time over that of fused softmax against length, a panel per step and dimension."""
    panels = list(dict.fromkeys((r["dimension"], r["step"]) for r in records))
    dimensions = sorted({dimension for dimension, _ in panels})
    drawing = figure(9.6, 1.2 + 3.2 * len(dimensions))
    grid = drawing.subplots(len(dimensions), len(STEPS), sharey=True, squeeze=False)
    for axes_row, dimension in zip(grid, dimensions, strict=True):
        for axes, step in zip(axes_row, STEPS, strict=True):
            here = sorted(
                (r for r in records if (r["dimension"], r["step"]) == (dimension, step)), key=lambda r: r["length"]
            )
            _lines(axes, here)
            axes.set_title(f"{step}, dimension {dimension}")
        axes_row[0].set_ylabel("time ÷ fused softmax")
    ratios = [f["ratio_max"] for r in records for f in r["mechanisms"].values() if "ratio" in f]
    grid[0][0].set_ylim(0, 1.05 * max([1.0, *ratios]))
    for axes in grid[-1]:
        axes.set_xlabel("length")
    handles = [grid[0][0].plot([], [], "o-", color=PALETTE[n], ms=4.5, label=n)[0] for n in MECHANISMS]
    drawing.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    title = f"Retrieval, steps of equally many tokens{device}"
    drawing.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return drawing


def _lines(axes: Axes, records: list[Measurement]) -> None:
    axes.axhline(1.0, color=COLOURS["softmax"], lw=1.2, zorder=1)
    for name in MECHANISMS:
        mine = [(r["length"], r["mechanisms"][name]) for r in records if "ratio" in r["mechanisms"][name]]
        lengths, colour = [length for length, _ in mine], PALETTE[name]
        low, high = ([found[f"ratio_{end}"] for _, found in mine] for end in ("min", "max"))
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(lengths, [found["ratio"] for _, found in mine], "o-", color=colour, ms=4.5)
    axes.set_xscale("log", base=2)
    shown = [r["length"] for r in records]
    axes.set_xticks(shown, list(map(str, shown)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(axis="y")
