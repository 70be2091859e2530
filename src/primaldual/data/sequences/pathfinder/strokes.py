"""The strokes that snakes are made of: what each looks like, what it occupies, and where a snake goes on from it.

A snake's first stroke, its seed, is drawn from its tail at any whole degree. Every other one is drawn backwards from
its tip, at one of the few angles at which cells lie around the pivot that it turns about. So there are few, drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .raster import dilated, disc, line, shrunk

LENGTH, MARGIN, FINER = 2, 1, 2
"""Of a stroke in cells; what is kept free around it; how much finer the grid is that it is drawn on."""
REACH = LENGTH + MARGIN + 1
"""Cells of a stroke's patch to each side of the cell where it is drawn from."""
PATCH = 2 * REACH + 1
DEGREES = 360
FULL = 255


@dataclass(frozen=True)
class Strokes:
    """The first `DEGREES` are seeds, at -180 to 179 degrees from the axis of x to that of y; the others go on.

    Args:
        ink: [strokes, patch, patch], uint8: what is drawn, around the cell where it is drawn from.
        room: [strokes, patch, patch], uint8: what it occupies, its margin included.
        tip: [DEGREES, 2]: a seed's tip from its tail.
        pivot: [DEGREES, 2]: what a seed turns about, from its tail.
        onward: [strokes, 2]: the next pivot from the pivot.
        around: [candidates, 2]: cells around a pivot; the stroke `DEGREES + i` has its tip at the i-th.
        weights: [strokes, candidates]: how likely the next stroke is, by the angle that it turns: cos², and 0 from a
            right angle on.
        footprint: [DEGREES, offsets, 2]: a seed fits where none of the cells at these is taken; short lists repeat.
        begins: [DEGREES], bool: the angles at which a place is ever found for a seed.
    """

    ink: np.ndarray
    room: np.ndarray
    tip: np.ndarray
    pivot: np.ndarray
    onward: np.ndarray
    around: np.ndarray
    weights: np.ndarray
    footprint: np.ndarray
    begins: np.ndarray


@cache
def strokes() -> Strokes:
    """All of them."""
    radius = LENGTH + MARGIN
    arc = np.arange(np.ceil(2 * np.pi * radius)) / radius  # a cell apart
    around = np.unique(np.floor(radius * np.stack([np.sin(arc), np.cos(arc)], axis=1)).astype(np.int64), axis=0)
    seeds = np.deg2rad(np.arange(DEGREES) - 180)
    others = np.arctan2(around[:, 0], around[:, 1])
    headings = np.concatenate([seeds, others])
    drawn = [_drawn(angle) for angle in [*seeds, *(others + np.pi)]]
    room = np.stack([room for _, room in drawn])
    turns = np.abs(headings[:, None] - others)
    turns = np.minimum(np.minimum(turns, 2 * np.pi - turns), np.pi / 2)
    tip = _ahead(seeds, LENGTH)
    footprint = _footprint(room[:DEGREES])
    return Strokes(
        ink=np.stack([ink for ink, _ in drawn]),
        room=room,
        tip=tip,
        pivot=tip + _ahead(seeds + np.pi, radius),
        onward=_ahead(headings, LENGTH + 2 * MARGIN),
        around=around,
        weights=np.round(np.cos(turns) ** 2, 12),  # alike on every machine
        footprint=footprint,
        begins=_begins(footprint),
    )


def _ahead(angles: np.ndarray, distance: int) -> np.ndarray:
    """[angles, 2]: y and x of the cell at `distance`, each rounded up."""
    ahead = distance * np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return np.ceil(np.round(ahead, 9)).astype(np.int64)


def _drawn(angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Ink and room of a stroke: a line that is one fine cell wide, and the same with its margin, both shrunk."""
    middle = REACH * FINER
    y, x = middle + _ahead(np.array(angle), LENGTH * FINER)
    thin = line((middle, middle), (int(y), int(x)), 2 * middle + 1)
    return shrunk(thin, PATCH), shrunk(dilated(thin, disc(MARGIN * FINER)), PATCH)


def _footprint(room: np.ndarray) -> np.ndarray:
    """The cells that are fully a seed's, but one further down and to the right.

    The original looks them up in a window of 7 cells, with the tail at the index 4.
    """
    window = room[:, : PATCH - 2, : PATCH - 2]
    cells = [np.argwhere(one == FULL) - (REACH - 1) for one in window]
    most = max(map(len, cells))
    return np.stack([np.resize(one, (most, 2)) for one in cells])


def _begins(footprint: np.ndarray) -> np.ndarray:
    """[DEGREES]: whether a cell of the footprint is in the picture wherever in the picture the seed is.

    Where that is not so, the original finds no place at all: OpenCV's dilation gives the least number there is for
    cells that have all of the footprint outside, and the search for a place refuses numbers below zero. From -150 to
    -120 degrees are left.
    """
    corners = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    return (footprint[:, None] * corners[:, None] >= 0).all(axis=-1).any(axis=-1).all(axis=-1)
