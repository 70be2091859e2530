"""Snakes that grow stroke by stroke around each other, each in a picture of its own, many pictures at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from .strokes import DEGREES, FULL, PATCH, REACH, strokes

SIDE = 32
"""Cells of a picture."""
BORDER = 1
"""Cells at every edge where no snake goes."""
DRAWS = 3
"""Of a next stroke or of a place, before a snake is given up."""
TOUCHING = 459
"""A stroke does not fit where its room and that taken add up to so much in any cell: 1.8 times full."""
TAKEN = 77
"""A cell with so much room taken is no place for a seed: more than 0.3 times full."""


@dataclass
class Snakes:
    """The last stroke of a snake in each picture, and where it goes on.

    Args:
        start: [snakes, 2]: the cell where the stroke is drawn from.
        stroke: [snakes]: which of `strokes()`.
        pivot: [snakes, 2]: what it turns about.
    """

    start: np.ndarray
    stroke: np.ndarray
    pivot: np.ndarray

    def __getitem__(self, which: np.ndarray) -> Snakes:
        return Snakes(self.start[which], self.stroke[which], self.pivot[which])

    @property
    def record(self) -> np.ndarray:
        """[snakes, 3]: where the stroke is drawn from, and which it is."""
        return np.concatenate([self.start, self.stroke[:, None]], axis=1)


def seeded(tails: np.ndarray, degrees: np.ndarray) -> Snakes:
    """Snakes of one stroke, from their tails."""
    return Snakes(tails, degrees, tails + strokes().pivot[degrees])


def empty(pictures: int) -> np.ndarray:
    """[pictures, ...], uint8: the room taken where nothing but the border is, with cells beyond the edges."""
    room = np.zeros((pictures, SIDE + 2 * REACH, SIDE + 2 * REACH), dtype=np.uint8)
    inside(room)[:] = FULL
    inside(room)[:, BORDER:-BORDER, BORDER:-BORDER] = 0
    return room


def inside(canvas: np.ndarray) -> np.ndarray:
    """[pictures, side, side]: without what is beyond the edges."""
    return canvas[:, REACH:-REACH, REACH:-REACH]


def patches(canvas: np.ndarray) -> np.ndarray:
    """[pictures, side, side, patch, patch]: what is around each cell, to read and to write."""
    return as_strided(canvas, (len(canvas), SIDE, SIDE, PATCH, PATCH), (*canvas.strides, *canvas.strides[1:]))


def settle(room: np.ndarray, snakes: Snakes) -> None:
    """Take the room of the snakes' last strokes."""
    at = (np.arange(len(room)), *snakes.start.T)
    patches(room)[at] = np.maximum(patches(room)[at], strokes().room[snakes.stroke])


def extended(random: np.random.Generator, room: np.ndarray, snakes: Snakes) -> tuple[np.ndarray, Snakes]:
    """Which snakes go on by a stroke, and these alone, longer by it; the room is as it was.

    The next tip is one of the cells around the next pivot that are free with a margin, the likelier the less the snake
    turns. Where the stroke touches what is there, another is drawn.
    """
    table = strokes()
    pivot = snakes.pivot + table.onward[snakes.stroke]
    cells = pivot[:, None] + table.around
    y, x = np.moveaxis(np.clip(cells, 0, SIDE - 1), -1, 0)  # outside it is as full as at the border
    free = FULL - inside(_beside(room))[np.arange(len(room))[:, None], y, x]
    likely = np.cumsum(free * table.weights[snakes.stroke], axis=1)
    chosen = np.full(len(room), -1)
    left = np.flatnonzero(likely[:, -1] >= 1e-4 * FULL)
    for _ in range(DRAWS):
        drawn = np.argmax(likely[left] > random.random((len(left), 1)) * likely[left, -1:], axis=1)
        there = patches(room)[(left, *cells[left, drawn].T)].astype(np.uint16)
        fits = (there + table.room[DEGREES + drawn]).max(axis=(1, 2)) < TOUCHING
        chosen[left[fits]] = drawn[fits]
        left = left[~fits]
    goes = np.flatnonzero(chosen >= 0)
    return goes, Snakes(cells[goes, chosen[goes]], DEGREES + chosen[goes], pivot[goes])


def _beside(room: np.ndarray) -> np.ndarray:
    """The most that is taken in a cell and in the four beside it: all room with the margin of one cell around it."""
    flat = room.reshape(-1)  # in one long row, which is fast; what is beside the last cell of a row is beyond the edges
    most = flat.copy()
    for by in (1, room.shape[2]):
        np.maximum(most[by:], flat[:-by], out=most[by:])
        np.maximum(most[:-by], flat[by:], out=most[:-by])
    return most.reshape(room.shape)


def places(taken: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """[pictures, side, side], bool, as `taken` is: the tails at which a seed of each picture's angle fits."""
    rows = np.zeros((len(taken), SIDE + 2 * REACH), dtype=np.int64)  # a cell is a bit
    rows[:, REACH:-REACH] = (taken << np.arange(REACH, REACH + SIDE)).sum(axis=2)
    shifted = sliding_window_view(rows, SIDE, axis=1)
    hits = np.zeros((len(taken), SIDE), dtype=np.int64)
    for y, x in np.moveaxis(strokes().footprint[degrees], 0, -1):
        hits |= shifted[np.arange(len(taken)), REACH + y] >> (REACH + x)[:, None]
    return (hits[:, :, None] >> np.arange(SIDE)) & 1 == 0


def picked(random: np.random.Generator, possible: np.ndarray) -> np.ndarray:
    """[pictures, 2]: one of the possible cells of each picture, any as likely; each has one."""
    flat = possible.reshape(len(possible), SIDE * SIDE)
    rank = random.integers(0, flat.sum(axis=1))
    cell = np.argmax(np.cumsum(flat, axis=1, dtype=np.int16) > rank[:, None], axis=1)
    return np.stack(np.divmod(cell, SIDE), axis=1)
