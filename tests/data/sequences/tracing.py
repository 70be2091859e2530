"""A reader of Pathfinder's pictures: it sees pixels alone, finds the markers, and follows strokes between them."""

from functools import cache

import numpy as np

from primaldual.data.sequences.pathfinder.drawing import LONG, MARKER, SHORT, markers
from primaldual.data.sequences.pathfinder.strokes import DEGREES, PATCH, REACH, strokes

SIDE = 32


def as_bright(units: np.ndarray, white: int) -> np.ndarray:
    """Bytes of a picture of which `white` units are the brightest."""
    return ((2 * 255 * units.astype(int) + white) // (2 * white)).astype(np.uint8)


@cache
def shapes(white: int) -> tuple[np.ndarray, np.ndarray]:
    """How bright a marker in each cell and each stroke of a long snake are."""
    return as_bright(MARKER * markers().astype(int), white), as_bright(LONG * strokes().ink.astype(int), white)


def marked(picture: np.ndarray) -> tuple[list[tuple[int, int]], int]:
    """The cells with a marker, and the units that are white: those of a marker, or of a stroke that outshines it."""
    ink = SHORT * strokes().ink.max(axis=(1, 2)).astype(int)
    for white in sorted({MARKER * 255, *ink[ink > MARKER * 255].tolist()}):
        cells = np.argwhere((picture >= shapes(white)[0]).all(axis=(2, 3)))
        if len(cells) >= 2:
            break
    return [(int(y), int(x)) for y, x in cells], white


def ends(picture: np.ndarray, white: int, tail: tuple[int, int], length: int) -> set[tuple[int, int]]:
    """Tips of all chains of `length` strokes from a tail, each where the picture is at least as bright as a stroke."""
    table, ink = strokes(), shapes(white)[1]
    around = np.pad(picture, REACH, constant_values=255)  # beyond its edges a picture hides all

    def seen(y: int, x: int, some: slice) -> np.ndarray:
        return (around[y : y + PATCH, x : x + PATCH] >= ink[some]).all(axis=(1, 2))

    y, x = tail
    seeds = np.flatnonzero(seen(y, x, slice(DEGREES))).tolist()
    chains = {(*(tail + table.pivot[seed]).tolist(), seed): tail for seed in seeds}
    for _ in range(length - 1):
        longer = {}
        for y, x, stroke in chains:
            pivot = (y, x) + table.onward[stroke]
            for turn in np.flatnonzero(table.weights[stroke]).tolist():
                tip = (pivot + table.around[turn]).tolist()
                number = DEGREES + turn
                if min(tip) >= 0 and max(tip) < SIDE and seen(*tip, slice(number, number + 1))[0]:
                    longer[(*pivot.tolist(), number)] = tuple(tip)
        chains = longer
    return set(chains.values())


def connected(picture: np.ndarray, length: int) -> bool:
    """Whether a chain of so many strokes goes from one marker to another."""
    cells, white = marked(picture)
    return any((set(cells) - {cell}) & ends(picture, white, cell, length) for cell in cells)
