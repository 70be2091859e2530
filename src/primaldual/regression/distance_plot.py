"""The picture of distances between heads: for each layer a heat map of every two heads, and the means beside."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Patch
from torch import Tensor

from ..base.style import INK, SOFT, bare, figure, png, style
from .diagnose_plot import BLUE, ERROR, GREEN

if TYPE_CHECKING:
    from .distances import HeadDistances, LayerDistances
    from .maps import Pooling

COLOURS = {"shared": GREEN, "repeated": BLUE}
TITLES = {"shared": "weight of a window shared", "repeated": "weight of a window repeated"}
MAP = "magma"
WRITTEN = 4
"""Heads up to which the numbers stand in the heat map."""


def draw(found: HeadDistances) -> bytes:
    """A PNG. Heat maps of one column share their colours, so that layers compare."""
    layers = found.named()
    pooled = any(layer.shared is not layer.repeated for layer in layers.values())
    columns: tuple[Pooling, ...] = ("shared", "repeated") if pooled else ("repeated",)
    with style():
        drawing = figure(2.2 + 2.3 * len(columns) + 2.6, 1.3 + 1.95 * len(layers))
        drawing.suptitle("L2 distance between heads' attention maps", x=0.01, ha="left", fontweight="bold")
        widths = (*(1.0 for _ in columns), 1.5)
        grid = drawing.subplots(len(layers), len(widths), squeeze=False, width_ratios=widths)
        for column, pooling in enumerate(columns):
            means = [_mean(layer, pooling) for layer in layers.values()]
            top = max([float(mean.max()) for mean in means if mean is not None], default=0.0)
            grid[0, column].set_title(TITLES[pooling] if pooled else "heads", fontsize=9, fontweight="normal")
            for axes, mean, layer in zip(grid[:, column], means, layers.values(), strict=True):
                _heat(axes, mean, layer, top or 1.0)
            shades = ScalarMappable(Normalize(0.0, top or 1.0), MAP)
            drawing.colorbar(shades, ax=grid[:, column], location="bottom", shrink=0.7, aspect=18)
        drawing.align_ylabels(grid[:, 0])
        grid[0, -1].set_title("mean ± standard deviation", fontsize=9, fontweight="normal")
        longest = max(_reach(layer, pooling) for layer in layers.values() for pooling in columns)
        for line, (name, layer) in zip(grid, layers.items(), strict=True):
            line[0].set_ylabel("\n".join(textwrap.wrap(name.replace(".", ". "), 14)).replace(". ", "."), color=INK)
            _bars(line[-1], layer, columns)
            line[-1].set_xlim(0, 1.05 * longest or 1.0)
        if pooled:
            handles = [Patch(color=COLOURS[pooling], label=pooling) for pooling in columns]
            drawing.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=9)
        return png(drawing, 150)


def _mean(layer: LayerDistances, pooling: Pooling) -> Tensor | None:
    """[heads, heads], over the cases."""
    distances = layer.shared if pooling == "shared" else layer.repeated
    return None if distances is None else distances.mean(0)


def _reach(layer: LayerDistances, pooling: Pooling) -> float:
    pairs = layer.pairs(pooling)
    return 0.0 if pairs is None else pairs.mean + (pairs.std or 0.0)


def _heat(axes: Axes, mean: Tensor | None, layer: LayerDistances, top: float) -> None:
    if mean is None:
        bare(axes)
        axes.set_box_aspect(1)
        text = "\n".join(textwrap.wrap(layer.note, 24))
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=SOFT, fontsize=7)
        return
    axes.imshow(mean.numpy(), cmap=MAP, vmin=0.0, vmax=top, interpolation="nearest")
    heads = len(layer.scales)
    labels = [str(head) if scale == 1 else f"{head}\n÷{scale}" for head, scale in enumerate(layer.scales)]
    shown = range(heads) if heads <= 8 else (0, heads - 1)
    axes.set_xticks(shown, [labels[head] for head in shown], fontsize=7)
    axes.set_yticks(shown, map(str, shown), fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for first in range(heads if heads <= WRITTEN else 0):
        for second in range(heads):
            value = float(mean[first, second])
            colour = INK if value > 0.6 * top else "white"
            axes.text(second, first, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=8)


def _bars(axes: Axes, layer: LayerDistances, columns: tuple[Pooling, ...]) -> None:
    for place, pooling in enumerate(columns):
        if (pairs := layer.pairs(pooling)) is not None:
            axes.barh(place, pairs.mean, 0.6, color=COLOURS[pooling], xerr=pairs.std, error_kw=ERROR)
    axes.set_ylim(len(columns) - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
