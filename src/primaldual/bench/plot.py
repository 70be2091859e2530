"""The ratio to the best fused softmax against length, with what the arithmetic allows; targets beside their bounds."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from ..base.style import COLOURS, INK, PALETTE, SOFT, figure, png, style

_PANEL = ("dtype", "head_dim", "step", "mode")


def ratio_plot(content: dict[str, Any]) -> bytes | None:
    """A PNG with a panel per dtype, head dimension, step and mode; None when no record has a ratio."""
    records = [r for r in content["records"] if r["error"] is None and "ratio" in r]
    if not records:
        return None
    rows = list(dict.fromkeys((r["dtype"], r["head_dim"]) for r in records))
    columns = list(dict.fromkeys((r["step"], r["mode"]) for r in records))
    names = list(dict.fromkeys(r["mechanism"] for r in records))
    with style():
        drawing = figure(3.6 * len(columns) + 1.4, 3.1 * len(rows) + 0.9)
        grid = drawing.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
        for axes_row, (dtype, head_dim) in zip(grid, rows, strict=True):
            for axes, (step, mode) in zip(axes_row, columns, strict=True):
                here = (dtype, head_dim, step, mode)
                _panel(axes, [r for r in records if tuple(r[k] for k in _PANEL) == here], names)
                axes.set_title(f"{step.replace('+', ' + ')}, {mode}")
            axes_row[0].set_ylabel(f"time ÷ best fused softmax\n{dtype}, head dim {head_dim}")
        for axes in grid[-1]:
            axes.set_xlabel("length")
        _ticks(grid[0][0], records)
        handles = [grid[0][0].plot([], [], "o-", color=PALETTE.get(n, INK), ms=5, label=n)[0] for n in names]
        handles += grid[0][0].plot([], [], color=COLOURS["softmax"], lw=1.2, label="best fused softmax")
        handles += grid[0][0].plot([], [], "--", color=SOFT, lw=1.2, label="arithmetic limit")
        drawing.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 3 * len(columns)))
        subject, device = records[0]["subject"], content["environment"]["device"]
        drawing.suptitle(
            f"{subject}, {records[0]['heads']} heads, {device}", x=0.01, ha="left", fontsize=12, fontweight="bold"
        )
        return png(drawing, 150)


def _panel(axes: Axes, records: list[dict[str, Any]], names: list[str]) -> None:
    axes.axhline(1.0, color=COLOURS["softmax"], lw=1.2, zorder=1)
    for place, name in enumerate(names):
        mine = sorted((r for r in records if r["mechanism"] == name), key=lambda r: r["length"])
        lengths, colour = [r["length"] for r in mine], PALETTE.get(name, INK)
        axes.fill_between(
            lengths, [r["ratio_min"] for r in mine], [r["ratio_max"] for r in mine], color=colour, alpha=0.15, lw=0
        )
        axes.plot(lengths, [r["ratio"] for r in mine], "o-", color=colour, ms=4.5)
        # dashes start at different places, so that limits which coincide show both colours
        limits = [(r["length"], r["arithmetic_limit"]) for r in mine if r["arithmetic_limit"] is not None]
        axes.plot([x for x, _ in limits], [y for _, y in limits], color=colour, lw=1.2, linestyle=(4 * place, (4, 4)))
    axes.grid(axis="y")


def _ticks(axes: Axes, records: list[dict[str, Any]]) -> None:
    """Both axes logarithmic (shared by all panels); lengths and plain numbers instead of powers."""
    low = min(1.0, *(r["ratio_min"] for r in records))
    high = max(1.0, *(r["ratio_max"] for r in records))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.6 * low, 1.25 * high)
    lengths = sorted({r["length"] for r in records})
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths])
    ticks = [10.0**e * m for e in range(-5, 4) for m in ((1, 2, 5) if low > 0.02 else (1,))]
    axes.set_yticks([t for t in ticks if 0.6 * low <= t <= 1.25 * high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def targets_plot(content: dict[str, Any]) -> bytes | None:
    """A PNG with a line per target: what was measured, what must be reached, and the dream."""
    targets = content["targets"]
    if not targets:
        return None
    with style():
        drawing = figure(9.6, 0.27 * len(targets) + 1.3)
        axes = drawing.subplots()
        names = []
        for row, target in enumerate(targets):
            record = content["records"][target["record"]]
            names.append(f"{target['name']}, {record['mode']}, {record['length']} × {record['batch']}")
            ok, bad = COLOURS["bn+sh"], "#c0392b"
            axes.plot([target["must"]] * 2, [row - 0.36, row + 0.36], color=INK, lw=2)
            if target["dream"] is not None:
                axes.plot([target["dream"]] * 2, [row - 0.36, row + 0.36], color=SOFT, lw=1.2, linestyle=(0, (2, 1.5)))
            if target["value"] is not None:
                axes.plot(target["value"], row, "o", color=ok if target["met"] else bad, ms=6.5)
        axes.set_yticks(range(len(names)), names, fontsize=8.5)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_title(f"Targets, {content['environment']['device']}")
        axes.set_xlabel("measured (dot), must (line), dream (dashed)")
        return png(drawing, 150)
