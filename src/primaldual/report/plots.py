"""Curves, points and bars of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..base.style import INK, SOFT, colour, figure, style, svg

Runs = Mapping[str, Sequence[Sequence[float]]]
"""For each mechanism and each seed, a value per epoch."""


def training_curves(losses: Runs, accuracies: Runs) -> bytes:
    """Training loss and test accuracy by epoch: the mean over seeds, and the range from the worst to the best."""
    with style():
        drawing = figure(10.4, 3.6)
        left, right = drawing.subplots(1, 2)
        for axes, runs, title in ((left, losses, "Training loss"), (right, accuracies, "Test accuracy, %")):
            for name, values in runs.items():
                data = np.asarray(values)
                epochs = np.arange(1, data.shape[1] + 1)
                axes.fill_between(epochs, data.min(0), data.max(0), color=colour(name), alpha=0.12, linewidth=0)
                axes.plot(epochs, data.mean(0), color=colour(name), label=name)
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y")
        left.set_yscale("log")
        right.legend(loc="lower right")
        return svg(drawing)


def accuracy_points(accuracies: Mapping[str, Sequence[float]], paper: Mapping[str, tuple[float, float]]) -> bytes:
    """Every seed's accuracy as a point, beside mean ± std, and the paper's mean ± std in grey."""
    with style():
        drawing = figure(10.4, 3.2)
        axes = drawing.subplots()
        for row, (name, values) in enumerate(accuracies.items()):
            data = np.asarray(values)
            if name in paper:
                mean, std = paper[name]
                axes.errorbar(mean, row + 0.24, xerr=std, fmt="D", ms=5, color="#b3b9c2", capsize=3, lw=1.4)
            # equal accuracies are stacked instead of hidden behind each other
            stack = [sum(earlier == value for earlier in values[:i]) for i, value in enumerate(values)]
            axes.scatter(data, row - 0.3 - 0.1 * np.asarray(stack), s=20, color=colour(name), alpha=0.55, linewidth=0)
            std = data.std(ddof=1) if len(data) > 1 else 0.0
            axes.errorbar(data.mean(), row, xerr=std, fmt="o", ms=8, color=colour(name), capsize=4, lw=2)
        _rows(axes, list(accuracies))
        axes.set(xlabel="test accuracy, %")
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 100])
        axes.grid(axis="x")
        return svg(drawing)


def cost_bars(before: Mapping[str, float], after: Mapping[str, float], unit: str) -> bytes:
    """What a mechanism costs as the expansion is written, and after the exact rewrites."""
    with style():
        drawing = figure(10.4, 2.7)
        axes = drawing.subplots()
        draw_costs(axes, before, after, unit)
        return svg(drawing)


def draw_costs(axes: Axes, before: Mapping[str, float], after: Mapping[str, float], unit: str) -> None:
    """The bars of `cost_bars`, into given axes."""
    for row, name in enumerate(after):
        axes.barh(row, after[name], height=0.62, color=colour(name), alpha=0.85)
        if (saved := before[name] - after[name]) > 0:
            edge, dashes = colour(name), (0, (3, 2))
            axes.barh(row, saved, left=after[name], height=0.62, color="none", edgecolor=edge, linestyle=dashes)
        axes.text(max(before[name], after[name]), row, f"  {after[name]:.2f}", va="center", color=INK)
    _rows(axes, list(after))
    axes.set(xlabel=unit)
    axes.margins(x=0.12)


def sweep(values: Mapping[float, Sequence[float]]) -> bytes:
    """Accuracy against β: points for the seeds, a line through the means."""
    with style():
        drawing = figure(10.4, 3.0)
        axes = drawing.subplots()
        betas = list(values)
        axes.plot(betas, [np.mean(values[beta]) for beta in betas], "o-", color=colour("bn"), ms=7)
        for beta in betas:
            axes.scatter([beta] * len(values[beta]), values[beta], s=18, color=colour("bn"), alpha=0.35, linewidth=0)
        axes.set(xlabel="β", ylabel="test accuracy, %", xticks=betas)
        axes.annotate("softmax", (betas[0], 0), (0, 6), xycoords=("data", "axes fraction"),
                      textcoords="offset points", color=SOFT, ha="left", fontsize=9)  # fmt: skip
        axes.grid(axis="y")
        return svg(drawing)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Mechanisms from top to bottom, in their colours."""
    axes.set_yticks(range(len(names)), names)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set(color=colour(name), fontweight="bold")
    axes.set_ylim(len(names) - 0.35, -0.65)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
