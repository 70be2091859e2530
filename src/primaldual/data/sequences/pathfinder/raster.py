"""Thin lines, round brushes and the shrinking of pictures, in bytes."""

from __future__ import annotations

import numpy as np


def line(start: tuple[int, int], end: tuple[int, int], size: int) -> np.ndarray:
    """[size, size], uint8: 255 on the cells nearest to a straight line and on both ends, by Bresenham's algorithm."""
    picture = np.zeros((size, size), dtype=np.uint8)
    (y, x), (to_y, to_x) = start, end
    high, wide = abs(to_y - y), abs(to_x - x)
    down, right = (1 if to_y > y else -1), (1 if to_x > x else -1)
    steps, across = max(high, wide), min(high, wide)
    error = 2 * across - steps
    for _ in range(steps + 1):
        picture[y, x] = 255
        aside = error >= 0
        error += 2 * across - 2 * steps * aside
        if wide > high:
            x, y = x + right, y + down * aside
        else:
            y, x = y + down, x + right * aside
    return picture


def disc(radius: int) -> np.ndarray:
    """[offsets, 2]: those not further than `radius` from (0, 0)."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.argwhere(y**2 + x**2 <= radius**2) - radius


def dilated(pictures: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[..., height, width]: each cell the largest of those at `offsets` [offsets, 2] from it, (0, 0) among them.

    Nothing is outside of a picture.
    """
    result = pictures.copy()
    for offset in offsets:
        (to_y, from_y), (to_x, from_x) = _overlap(offset[0]), _overlap(offset[1])
        into = result[..., to_y, to_x]
        np.maximum(into, pictures[..., from_y, from_x], out=into)
    return result


def _overlap(by: int) -> tuple[slice, slice]:
    """The places along an axis that have one `by` further, and those that are reached so."""
    return (slice(0, -by or None), slice(by, None)) if by >= 0 else (slice(-by, None), slice(0, by))


def shrunk(pictures: np.ndarray, size: int) -> np.ndarray:
    """[..., size, size], uint8, of square pictures of bytes, each new cell a mean with Lanczos's window of three lobes.

    As image libraries do it: weights in fixed point, so that all is exact; rows first, made bytes again, then columns.
    """
    weights = _lanczos(pictures.shape[-1], size)
    rows = _bytes(pictures @ weights.T)
    return _bytes(weights @ rows)


_ONE = 2.0**22
"""In fixed point. Sums of products are integers that a float64 holds exactly."""


def _lanczos(source: int, size: int) -> np.ndarray:
    """[size, source]: what a cell is of the cells that it is made of."""
    scale = source / size
    centres = (np.arange(size)[:, None] + 0.5) * scale
    away = (np.arange(source) + 0.5 - centres) / scale
    weights = np.where(np.abs(away) < 3, np.sinc(away) * np.sinc(away / 3), 0)
    return np.rint(_ONE * weights / weights.sum(axis=1, keepdims=True))


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(values / _ONE + 0.5), 0, 255).astype(np.uint8)
