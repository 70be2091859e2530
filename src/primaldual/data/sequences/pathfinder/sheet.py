"""A sheet of samples: pictures of every level, those with a connection under those without."""

from __future__ import annotations

import numpy as np

from ....base.style import SOFT, bare, figure, png, style
from . import LEVELS, drawn, scenes

_GAP = 2  # pixels between pictures


def sheet(seed: int = 0, columns: int = 6) -> bytes:
    """A PNG of the first pictures of each label and level; docs/images/pathfinder.png is that of seed 0."""
    with style():
        drawing = figure(1.15 * columns, 2.55 * len(LEVELS))
        for axes, level in zip(drawing.subplots(len(LEVELS), 1), sorted(LEVELS, key=LEVELS.__getitem__), strict=True):
            here = scenes(seed, level=level)
            pictures = drawn(here)
            rows = [_row(pictures[here.labels == label][:columns]) for label in (0, 1)]
            axes.imshow(np.concatenate(rows), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            bare(axes)
            axes.set_title(f"{level}: {LEVELS[level]} strokes")
            middle, step = (rows[0].shape[0] - _GAP) / 2, rows[0].shape[0]
            for place, text in enumerate(("not connected", "connected")):
                axes.text(-_GAP, middle + place * step, text, rotation=90, ha="right", va="center", color=SOFT)
        return png(drawing, 150)


def _row(pictures: np.ndarray) -> np.ndarray:
    """Side by side on white."""
    padded = np.pad(pictures, ((0, 0), (0, _GAP), (0, _GAP)), constant_values=255)
    return np.concatenate([*padded], axis=1)
