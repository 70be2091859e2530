"""Scenes as pictures."""

from __future__ import annotations

from functools import cache

import numpy as np

from .growth import SIDE, inside, patches
from .layout import Scenes
from .raster import shrunk
from .strokes import FINER, REACH, strokes

RADIUS = 1.5
"""Of a marker in cells."""
LONG, SHORT, MARKER = 3, 4, 2
"""How bright each is drawn, in halves of its ink: the original's contrasts 0.75 · 2, 2 and 1."""


@cache
def markers() -> np.ndarray:
    """[side, side, side, side], uint8: a picture with a marker at each cell."""
    squares = (np.arange(SIDE * FINER) - FINER * np.arange(SIDE)[:, None]) ** 2
    discs = squares[:, None, :, None] + squares[None, :, None, :] <= (RADIUS * FINER) ** 2
    return shrunk(discs * np.uint8(255), SIDE)


def drawn(scenes: Scenes) -> np.ndarray:
    """[scenes, side, side], uint8: in each place the brightest of what is there, every picture from black to white."""
    count = len(scenes.labels)
    canvas = np.zeros((count, SIDE + 2 * REACH, SIDE + 2 * REACH), dtype=np.uint16)
    for brightness, snakes in ((LONG, scenes.long), (SHORT, scenes.short)):
        ink = brightness * strokes().ink.astype(np.uint16)
        for stroke in np.moveaxis(snakes.reshape(count, -1, 3), 1, 0):
            there = np.flatnonzero(stroke[:, 2] >= 0)
            y, x, which = stroke[there].T
            patches(canvas)[there, y, x] = np.maximum(patches(canvas)[there, y, x], ink[which])
    pictures = inside(canvas).astype(np.int64)
    for y, x in np.moveaxis(scenes.markers, (1, 2), (0, 1)):
        pictures = np.maximum(pictures, MARKER * markers()[y, x].astype(np.int64))
    darkest, brightest = pictures.min(axis=(1, 2), keepdims=True), pictures.max(axis=(1, 2), keepdims=True)
    span = brightest - darkest
    return ((2 * 255 * (pictures - darkest) + span) // (2 * span)).astype(np.uint8)  # halves rounded up
