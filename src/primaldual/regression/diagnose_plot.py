"""The picture of a diagnosis: four panels for each layer, a bar for each head."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..base.style import INK, LINE, SOFT, figure, style

if TYPE_CHECKING:
    from .diagnosis import Diagnosis, HeadRow

BLUE, ORANGE, GREEN = "#0072b2", "#d9820f", "#009e73"
ERROR: Any = {"ecolor": INK, "elinewidth": 1, "capsize": 2}


def draw(diagnosis: Diagnosis) -> Figure:
    """Columns share their axes, so that layers compare."""
    layers = diagnosis.layers()
    heads = max(len(rows) for rows in layers.values())
    with style():
        drawing = figure(max(10.4, 1.0 * heads), 0.9 + 1.75 * len(layers))
        drawing.suptitle(
            f"The regression behind every head, ε = {diagnosis.epsilon:g}", x=0.01, ha="left", fontweight="bold"
        )
        grid = drawing.subplots(len(layers), 4, squeeze=False, sharey="col")
        for column, title in zip(
            grid[0], ("log C", "support vectors, %", "effective rank", "condition, log₁₀"), strict=True
        ):
            column.set_title(title)
        last = next((rows for rows in reversed(layers.values()) if not _empty(rows)), None)
        every = [row for rows in layers.values() for row in rows]
        top = max([math.log10(row.condition) for row in every if math.isfinite(row.condition)], default=1.0) * 1.15
        for line, (name, rows) in zip(grid, layers.items(), strict=True):
            line[0].set_ylabel("\n".join(textwrap.wrap(name.replace(".", ". "), 14)).replace(". ", "."), color=INK)
            if _empty(rows):
                _refused(line, rows[0].note)
                continue
            _log_c(line[0], rows)
            _support(line[1], rows)
            _ranks(line[2], rows)
            _condition(line[3], rows, max(top, 1.0))
            for axes in line:
                _heads(axes, rows)
                if rows is last:
                    axes.set_xlabel("head")
        handles, labels = [], []
        for axes in grid[:, 1:3].flat:  # the first layer that has numbers explains the colours
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                if label not in labels:
                    handles.append(handle)
                    labels.append(label)
        if handles:
            drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
        return drawing


def _log_c(axes: Axes, rows: Sequence[HeadRow]) -> None:
    axes.bar(_x(rows), [r.log_C for r in rows], 0.66, color=BLUE, yerr=[r.std.log_C for r in rows], error_kw=ERROR)
    axes.axhline(0, color=SOFT, lw=0.8)


def _support(axes: Axes, rows: Sequence[HeadRow]) -> None:
    share, std = [100 * r.support_share for r in rows], [100 * r.std.support_share for r in rows]
    axes.bar(_x(rows), share, 0.66, color=GREEN, yerr=std, error_kw=ERROR, label="support vectors")
    axes.bar(_x(rows), [100 * r.bound_share for r in rows], 0.66, color=ORANGE, label="of these at the bound")
    axes.set(ylim=(0, 104), yticks=(0, 50, 100))


def _ranks(axes: Axes, rows: Sequence[HeadRow]) -> None:
    axes.bar(_x(rows), [r.points for r in rows], 0.66, color=LINE, label="points")
    rank = [r.effective_rank for r in rows]
    axes.bar(_x(rows), rank, 0.66, color=BLUE, yerr=[r.std.effective_rank for r in rows], error_kw=ERROR)
    axes.scatter(_x(rows), [r.rank for r in rows], marker="_", s=150, color=INK, lw=1.6, label="rank", zorder=3)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _condition(axes: Axes, rows: Sequence[HeadRow], top: float) -> None:
    """An infinite condition number is hatched up to the top."""
    for x, row in enumerate(rows):
        if math.isinf(row.condition):
            axes.bar(x, top, 0.66, color="white", edgecolor=SOFT, hatch="////", lw=0.8)
            box = {"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.1"}
            axes.text(x, top / 2, "∞", ha="center", va="center", bbox=box)
        elif not math.isnan(row.condition):
            axes.bar(x, math.log10(row.condition), 0.66, color=BLUE, yerr=row.std.condition, error_kw=ERROR)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _refused(line: Sequence[Axes], note: str) -> None:
    for axes in line[1:]:
        axes.set_visible(False)
    axes = line[0]
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    text = "\n".join(textwrap.wrap(f"no numbers: {note}", 110))
    axes.text(0.0, 0.5, text, transform=axes.transAxes, va="center", color=SOFT, in_layout=False)


def _heads(axes: Axes, rows: Sequence[HeadRow]) -> None:
    """Heads by number; pooled ones with their scale."""
    labels = [str(r.head) if r.scale == 1 else f"{r.head}\n÷{r.scale}" for r in rows]
    axes.set_xticks(_x(rows), labels, fontsize=9 if len(rows) <= 8 else 7)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0)


def _empty(rows: Sequence[HeadRow]) -> bool:
    return all(math.isnan(row.log_C) for row in rows)


def _x(rows: Sequence[HeadRow]) -> list[int]:
    return list(range(len(rows)))
