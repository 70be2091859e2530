"""Random expressions of nested operators on digits, grown level by level, many at once.

A node is an operator with probability 1/4, of 2 to 10 arguments, and a digit otherwise; on the tenth level all are
digits. An operator gives the least, the largest or the median (rounded down) of its arguments, or their sum modulo 10.
A digit counts 1, and an operator 2 for its two brackets; expressions of more than 500 and less than 2000 are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEVELS = 10
ARGUMENTS = (2, 10)
LENGTHS = (500, 2000)
"""A kept expression lies between them, and is neither."""
NAMES = (*"0123456789", "MIN", "MAX", "MED", "SM", "]")
"""Of the tokens 0, 1, …"""
MIN, MAX, MED, SM, CLOSE = range(10, 15)


class Expressions(NamedTuple):
    """Tokens [tokens], uint8, of expressions one after the other, with brackets; lengths and labels of each, int64."""

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray


class _Level(NamedTuple):
    """Nodes of one depth, those of one parent side by side, parents in the order of the level above."""

    opens: np.ndarray  # [nodes], bool: operators
    arguments: np.ndarray  # [operators]

    @property
    def starts(self) -> np.ndarray:
        """[operators]: where on the next level the arguments of each begin."""
        return np.cumsum(self.arguments) - self.arguments


def grow(random: np.random.Generator, tries: int) -> Expressions:
    """The expressions that are kept of so many tries."""
    levels = _shape(random, tries)
    lengths = _lengths(levels)
    levels, lengths = _kept(levels, lengths, (lengths[0] > LENGTHS[0]) & (lengths[0] < LENGTHS[1]))
    symbols = [_symbols(random, level.opens) for level in levels]
    return Expressions(_written(levels, lengths, symbols), lengths[0], _values(levels, symbols))


def _shape(random: np.random.Generator, nodes: int) -> list[_Level]:
    levels = []
    for depth in range(LEVELS):
        opens = random.random(nodes) < 0.25 if depth < LEVELS - 1 else np.zeros(nodes, bool)
        arguments = random.integers(*ARGUMENTS, int(opens.sum()), endpoint=True)
        levels.append(_Level(opens, arguments))
        nodes = int(arguments.sum())
    return levels


def _lengths(levels: list[_Level]) -> list[np.ndarray]:
    """Of every node's expression, level by level."""
    lengths: list[np.ndarray] = []
    for level in reversed(levels):
        own = np.ones(len(level.opens), dtype=np.int64)
        if len(level.arguments):
            own[level.opens] = 2 + np.add.reduceat(lengths[-1], level.starts)
        lengths.append(own)
    return lengths[::-1]


def _kept(levels: list[_Level], lengths: list[np.ndarray], keep: np.ndarray) -> tuple[list[_Level], list[np.ndarray]]:
    """Those nodes alone whose roots are to be kept."""
    left, long = [], []
    for level, length in zip(levels, lengths, strict=True):
        below = keep[level.opens]
        left.append(_Level(level.opens[keep], level.arguments[below]))
        long.append(length[keep])
        keep = np.repeat(below, level.arguments)
    return left, long


def _symbols(random: np.random.Generator, opens: np.ndarray) -> np.ndarray:
    """A token for each node: an operator or a digit, any as likely as the others."""
    operators = random.integers(MIN, SM, len(opens), np.uint8, endpoint=True)
    return np.where(opens, operators, random.integers(0, 10, len(opens), np.uint8))


def _values(levels: list[_Level], symbols: list[np.ndarray]) -> np.ndarray:
    """Of the roots."""
    below = np.zeros(0, dtype=np.int64)
    for level, symbol in zip(reversed(levels), reversed(symbols), strict=True):
        own = symbol.astype(np.int64)
        if len(level.arguments):
            first, count = level.starts, level.arguments
            tens = 10 * np.repeat(np.arange(len(count)), count)
            ordered = np.sort(tens + below) - tens  # each operator's arguments, the least first
            median = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) // 2
            results = [ordered[first], ordered[first + count - 1], median, np.add.reduceat(ordered, first) % 10]
            own[level.opens] = np.choose(own[level.opens] - MIN, results)
        below = own
    return below


def _written(levels: list[_Level], lengths: list[np.ndarray], symbols: list[np.ndarray]) -> np.ndarray:
    """The tokens: what opens, its arguments, what closes."""
    tokens = np.empty(lengths[0].sum(), dtype=np.uint8)
    places = np.cumsum(lengths[0]) - lengths[0]
    for depth, (level, length, symbol) in enumerate(zip(levels, lengths, symbols, strict=True)):
        tokens[places] = symbol
        if not len(level.arguments):
            break
        opened = places[level.opens]
        tokens[opened + length[level.opens] - 1] = CLOSE
        before = np.cumsum(lengths[depth + 1]) - lengths[depth + 1]
        places = np.repeat(opened + 1 - before[level.starts], level.arguments) + before
    return tokens
