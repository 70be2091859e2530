"""Bits per byte on validation against the FLOPs of the training so far: a panel for each size, a line per mechanism."""

from __future__ import annotations

from statistics import fmean

from matplotlib.axes import Axes

from ..base.style import INK, PALETTE, figure, png, style
from .language_table import LanguageCell, LanguageTable


def language_plot(found: LanguageTable) -> bytes | None:
    """A PNG; None when nothing is measured."""
    sizes = [size for size in found.sizes if any(found.cells[size, name].ended for name in found.mechanisms)]
    if not sizes:
        return None
    with style():
        drawing = figure(1.0 + 5.2 * len(sizes), 4.6)
        for axes, size in zip(drawing.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
            _panel(axes, {name: found.cells[size, name] for name in found.mechanisms})
            axes.set_title(size)
            axes.set_xlabel("FLOPs of the training so far")
        drawing.axes[0].set_ylabel("bits per byte, validation")
        handles = [drawing.axes[0].plot([], [], color=_colour(name), label=name)[0] for name in found.mechanisms]
        drawing.legend(handles=handles, loc="outside lower center", ncols=6)
        many = len(found.seeds)
        drawing.suptitle(
            f"Language models of IMDb, byte by byte\n{f'mean and range of {many} seeds' if many > 1 else 'one seed'}",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
        return png(drawing, 150)


def _panel(axes: Axes, cells: dict[str, LanguageCell]) -> None:
    late, first = [], []
    for name, cell in cells.items():
        if not cell.ended:
            continue
        flops, low, middle, high = curve(cell)
        axes.fill_between(flops, low, high, color=_colour(name), alpha=0.15, lw=0)
        axes.plot(flops, middle, color=_colour(name))
        late += middle[len(middle) // 6 :]
        first.append(flops[len(flops) // 6])
    axes.set_xscale("log")
    top, bottom = max(late), min(late)  # without the fall of the first steps, which is the same for all
    axes.set_ylim(bottom - 0.08 * (top - bottom or 1), top + 0.08 * (top - bottom or 1))
    axes.set_xlim(left=0.95 * min(first))
    axes.grid(axis="y")


def curve(cell: LanguageCell) -> tuple[list[float], list[float], list[float], list[float]]:
    """FLOPs at every evaluation, and there the lowest, the mean and the highest bits per byte of the seeds."""
    records = list(cell.ended.values())
    recipe = records[0].recipe
    for_step = recipe["batch_size"] * recipe["model"]["context"] * cell.flops.training
    at = [step for step in records[0].history["step"] if all(step in r.history["step"] for r in records)]
    values = [[r.history["validation"][r.history["step"].index(step)] for r in records] for step in at]
    flops = [step * for_step for step in at]
    return flops, [min(v) for v in values], [fmean(v) for v in values], [max(v) for v in values]


def _colour(name: str) -> str:
    return MORE.get(name, PALETTE.get(name, INK))


MORE = {
    "conv": "#56b4e9", "gate": "#cc79a7", "gate+sh": "#7d4465", "conv+gate+sh": "#000000",
}  # fmt: skip
"""Of columns that are not the name of a mechanism, or have none in other figures."""
