"""Attention maps per head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from numpy.typing import NDArray

from ..base.style import INK, SOFT, bare, colour, figure, png, style, svg
from .plots import draw_costs

Maps = Mapping[str, NDArray[np.float32]]
"""For each mechanism [heads, queries, keys]."""


def head_maps(maps: Maps, scales: Mapping[str, Sequence[int]]) -> bytes:
    """A row per mechanism, a column per head."""
    with style():
        heads = next(iter(maps.values())).shape[0]
        drawing = figure(10.4, 1.0 + 1.38 * len(maps))
        grid = drawing.subplots(len(maps), heads, squeeze=False)
        for row, (name, weights) in zip(grid, maps.items(), strict=True):
            _row(row, name, weights, scales[name])
        return svg(drawing)


def heads_picture(
    maps: Maps, scales: Mapping[str, Sequence[int]], accuracy: Mapping[str, str], before: Mapping[str, float],
    after: Mapping[str, float],
) -> bytes:  # fmt: skip
    """The picture of the README: what the heads look at, beside accuracy and cost. A PNG."""
    with style():
        drawing = figure(12, 3.3)
        left, right = drawing.subfigures(1, 2, width_ratios=(3.1, 1), squeeze=False)[0]
        _titled(left, "What each head looks at")
        _titled(right, "Accuracy and cost")
        grid = left.subplots(len(maps), next(iter(maps.values())).shape[0], squeeze=False)
        for row, (name, weights) in zip(grid, maps.items(), strict=True):
            _row(row, name, weights, scales[name])
        axes = right.subplots()
        draw_costs(axes, before, after, "attention MFLOPs per series\n(dashed: before the rewrites)")
        axes.set_yticklabels([f"{name}\n{accuracy[name]} %" for name in after], fontweight="normal")
        return png(drawing, dpi=130)


def _row(row: Sequence[Axes], name: str, weights: NDArray[np.float32], scales: Sequence[int]) -> None:
    for head, (axes, one) in enumerate(zip(row, weights, strict=True)):
        bare(axes)
        # the largest weights are few (such as those of a short last window), and would leave the rest dark
        axes.imshow(one, cmap="magma", vmin=0.0, vmax=float(np.quantile(one, 0.96)), interpolation="nearest")
        scale = "" if scales[head] == 1 else f", scale {scales[head]}"
        axes.set_title(f"head {head + 1}{scale}", fontsize=7, fontweight="normal", color=SOFT, loc="center", pad=3)
    row[0].set_ylabel(name, color=colour(name), fontweight="bold", fontsize=11)


def _titled(part: SubFigure, title: str) -> None:
    part.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11, color=INK)
