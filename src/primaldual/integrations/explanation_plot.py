"""The picture of an explanation: the series, what contributes to the prediction, and where heads look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from ..base.files import write_bytes
from ..base.style import LINE, SOFT, figure, png, style

if TYPE_CHECKING:
    from .explanation import Explanation

BLUE = "#0072b2"
LINES, ROWS = 12, 40
"""Channels that are drawn as lines, those that contribute the most; and that have a name each beside the map."""


def draw(explanation: Explanation, path: str | Path | None = None) -> Figure:
    """Panels that share their time axis; a PNG file if a path is given."""
    channels, steps = explanation.series.shape
    maps = [layer for member in explanation.attention for layer in member]
    heads = sum(len(layer) for layer in maps)
    heights = [0.7 + 0.28 * min(channels, LINES), 0.7 + 0.16 * min(channels, ROWS), 0.5 + 0.13 * heads]
    with style():
        drawing = figure(8.6, 1.0 + sum(heights[: 2 + bool(maps)]))
        drawing.suptitle(_title(explanation), x=0.01, ha="left", fontweight="bold")
        rows = drawing.subplots(
            2 + bool(maps), 2, squeeze=False, sharex="col",
            gridspec_kw={"height_ratios": heights[: 2 + bool(maps)], "width_ratios": [5, 1]},
        )  # fmt: skip
        _series(rows[0, 0], explanation)
        _contribution(rows[1], explanation, drawing)
        if maps:
            _attention(rows[2, 0], explanation, drawing)
            rows[2, 1].set_visible(False)
        rows[0, 1].set_visible(False)
        rows[-1, 0].set_xlabel("time step")
        rows[-1, 0].set_xlim(-0.5, steps - 0.5)
        rows[0, 0].tick_params(labelbottom=False)
        if path is not None:
            write_bytes(Path(path), png(drawing, 150))
        return drawing


def _title(explanation: Explanation) -> str:
    if explanation.probabilities is None:
        return f"Predicted: {explanation.predicted:.6g}"
    return f"Predicted: {explanation.predicted}, with a probability of {explanation.probabilities.max():.3f}"


def _series(axes: Axes, explanation: Explanation) -> None:
    """A line for each channel, above one another, each in units of its own range."""
    found = explanation.series
    shown = np.sort(np.abs(explanation.channels).argsort()[::-1][:LINES])
    axes.set_title("series" if len(shown) == len(found) else f"series, {LINES} channels that contribute the most")
    for i, channel in enumerate(found[shown]):
        low, high = channel.min(), channel.max()
        axes.plot((channel - low) / (high - low or 1.0) * 0.8 - i, color=BLUE, lw=1.1)
    axes.set(ylim=(0.8 - len(shown), 1.0), yticks=[0.4 - i for i in range(len(shown))])
    axes.set_yticklabels([str(i) for i in shown], fontsize=8)
    axes.set_ylabel("channel")
    axes.tick_params(axis="y", length=0)


def _contribution(row: np.ndarray, explanation: Explanation, drawing: Figure) -> None:
    found = explanation.contribution
    most = max(float(np.abs(found).max()), 1e-12)
    axes, beside = row
    of = "number" if explanation.probabilities is None else "probability"
    axes.set_title(f"what the {of} loses when a window is hidden")
    image = axes.imshow(
        found, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=TwoSlopeNorm(0.0, -most, most)
    )  # fmt: skip
    _channels(axes, len(found))
    drawing.colorbar(image, ax=axes, pad=0.01, aspect=12 + len(found) / 2)
    beside.set_title("in all")
    beside.barh(range(len(found)), explanation.channels, color=BLUE, height=0.7)
    beside.axvline(0, color=SOFT, lw=0.8)
    beside.set(ylim=(len(found) - 0.5, -0.5), yticks=[])
    beside.grid(axis="x", color=LINE)
    beside.tick_params(labelbottom=True, labelsize=8)


def _channels(axes: Axes, count: int) -> None:
    axes.set_ylabel("channel")
    if count <= ROWS:
        axes.set_yticks(range(count), [str(i) for i in range(count)], fontsize=8)
    axes.tick_params(axis="y", length=0)


def _attention(axes: Axes, explanation: Explanation, drawing: Figure) -> None:
    """A row for each head, in units of an equal weight of all steps; lines between layers, of which each has a name."""
    rows: list[np.ndarray] = []
    places, names = [], []
    for m, member in enumerate(explanation.attention):
        for i, layer in enumerate(member):
            if rows:
                axes.axhline(len(rows) - 0.5, color=SOFT, lw=0.8)
            places.append(len(rows) + (len(layer) - 1) / 2)
            names.append(f"{m}.{i}")
            rows += list(layer)
    axes.set_title("attention of heads, in multiples of an equal weight")
    found = np.stack(rows) * explanation.series.shape[1]
    image = axes.imshow(
        found, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0.0, vmax=np.quantile(found, 0.99)
    )
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylabel("member.layer")
    axes.tick_params(axis="y", length=0)
    drawing.colorbar(image, ax=axes, pad=0.01, aspect=12, extend="max")
