"""What is in a picture: two long snakes, short ones that distract, and two markers at ends of the long ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .growth import DRAWS, SIDE, TAKEN, Snakes, empty, extended, inside, picked, places, seeded, settle
from .strokes import DEGREES, strokes

APART = 7
"""Cells from the tail of one long snake to that of the other."""
TRIES = 5
"""Of a short snake, before there is one less."""
SPARE = 0.01
"""Share of a picture's cells that are free, below which no short snake is begun."""
_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Scenes:
    """A stroke is y and x of the cell where it is drawn from, and its number in `strokes()`.

    Args:
        long: [scenes, 2, length, 3], int64: the strokes of the two long snakes, the tail's first.
        short: [scenes, snakes, length, 3], int64: those of the short ones; -1 for a snake that found no place.
        markers: [scenes, 2, 2], int64: cells: the tail of a long snake, and the far tip of the same or of the other.
        labels: [scenes], int64: 1 where both markers are on one snake.
    """

    long: np.ndarray
    short: np.ndarray
    markers: np.ndarray
    labels: np.ndarray


def grown(random: np.random.Generator, scenes: int, length: int, short: tuple[int, int]) -> Scenes:
    """Scenes with long snakes of `length` strokes, and up to `short[0]` short ones of `short[1]` strokes."""
    long, room = _long(random, scenes, length)
    few = np.stack([_short(random, room, short[1]) for _ in range(short[0])], axis=1)
    labels, first = random.integers(0, 2, (2, scenes))
    second = np.where(labels == 1, first, 1 - first)
    every = np.arange(scenes)
    markers = np.stack([long[every, first, 0, :2], long[every, second, -1, :2]], axis=1)
    return Scenes(long, few, markers, labels)


def _long(random: np.random.Generator, wanted: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The strokes of so many pairs of long snakes, and the room that they take."""
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    tries, found = 0, 0
    while found < wanted:
        more = min(_AT_ONCE, int(1.1 * (wanted - found) * (tries + 2) / (found + 1)) + 1)
        pairs.append(_pairs(random, more, length))
        tries, found = tries + more, found + len(pairs[-1][0])
    long, room = (np.concatenate(arrays)[:wanted] for arrays in zip(*pairs, strict=True))
    return long, room


def _pairs(random: np.random.Generator, tries: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """As many of so many tries as come to their full length, the two snakes growing in turns.

    As in the original, a stroke's room is taken once the next one of its snake is there, and that of the first snake's
    last stroke is not: there snakes may touch.
    """
    snakes = _two_seeds(random, tries)
    room = empty(len(snakes[0].stroke))
    records = [np.stack([snake.record for snake in snakes], axis=1)]
    for _ in range(length - 1):
        for turn in (0, 1):
            goes, longer = extended(random, room, snakes[turn])
            room, snakes = room[goes], [snake[goes] for snake in snakes]
            records = [record[goes] for record in records]
            settle(room, snakes[turn])
            snakes[turn] = longer
        records.append(np.stack([snake.record for snake in snakes], axis=1))
    settle(room, snakes[1])
    return np.stack(records, axis=2), room


def _two_seeds(random: np.random.Generator, tries: int) -> list[Snakes]:
    """The first in the middle of the picture, where it fits at its angle at all; the second on a circle around it."""
    middle = np.ones((tries, SIDE, SIDE), dtype=bool)
    middle[:, 2 * APART : -2 * APART, 2 * APART : -2 * APART] = False
    degrees = random.choice(np.flatnonzero(strokes().begins), tries)
    possible = places(middle, degrees)
    fits = possible.any(axis=(1, 2))
    tails, degrees = picked(random, possible[fits]), degrees[fits]
    away = np.deg2rad(random.integers(0, 360, len(tails)))
    circle = np.round(APART * np.stack([np.sin(away), np.cos(away)], axis=1), 9)
    others = np.rint(tails + circle).astype(np.int64)
    return [seeded(tails, degrees), seeded(others, random.integers(0, DEGREES, len(tails)))]


def _short(random: np.random.Generator, room: np.ndarray, length: int) -> np.ndarray:
    """[scenes, length, 3]: the strokes of a short snake in each picture, whose room is taken, or -1 without one."""
    found = np.full((len(room), length, 3), -1)
    left = np.arange(len(room))
    for _ in range(TRIES):
        begun, snakes = _seed(random, room[left])
        here = left[begun]
        own, records = room[here], [snakes.record]
        for _ in range(length - 1):
            goes, longer = extended(random, own, snakes)
            here, own, snakes = here[goes], own[goes], snakes[goes]
            settle(own, snakes)
            snakes = longer
            records = [*(record[goes] for record in records), snakes.record]
        settle(own, snakes)
        room[here], found[here] = own, np.stack(records, axis=1)
        left = np.setdiff1d(left, here)
    return found


def _seed(random: np.random.Generator, room: np.ndarray) -> tuple[np.ndarray, Snakes]:
    """The pictures in which a short snake begins, and where it does."""
    table, taken = strokes(), inside(room) >= TAKEN
    tails, angles = np.full((len(room), 2), -1), np.zeros(len(room), dtype=np.int64)
    left = np.flatnonzero((~taken).mean(axis=(1, 2)) >= SPARE)
    for _ in range(DRAWS):
        degrees = random.integers(0, DEGREES, len(left))
        left, degrees = left[table.begins[degrees]], degrees[table.begins[degrees]]
        possible = places(taken[left], degrees)
        fits = possible.any(axis=(1, 2))
        left, degrees = left[fits], degrees[fits]
        tail = picked(random, possible[fits])
        ends = np.stack([tail + table.tip[degrees], tail + table.pivot[degrees]])
        within = ((ends >= 0) & (ends < SIDE)).all(axis=(0, 2))
        tails[left[within]], angles[left[within]] = tail[within], degrees[within]
        left = left[~within]
    begun = np.flatnonzero(tails[:, 0] >= 0)
    return begun, seeded(tails[begun], angles[begun])
