"""How the work of the ragged kernels is divided: where points lie, tile shapes, and which piece comes first."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from itertools import product
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..kept import on_device
from ..launching import MULTIPROCESSORS, block_of
from .layout import HeadLayout, Layout, table_of


class Tiles(NamedTuple):
    """Rows and columns of a block, warps and pipeline stages: forward; backward over keys and over queries.

    Where `registers` is set the backward pass can go over whole heads in one sweep, with at most so many to a thread.
    Where `adding` is set (rows, columns, warps, stages, registers) its blocks of keys can add their shares of dq.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    key_rows: int
    key_columns: int
    query_rows: int
    query_columns: int
    back_warps: int
    back_stages: int
    registers: int = 0
    adding: tuple[int, ...] = ()


def tiles(head_dim: int, dtype: torch.dtype, queries: int) -> Tiles:
    """Block shapes by head dimension, dtype and length; measured on an H200."""
    wide = block_of(head_dim)
    if dtype == torch.float32:
        found = Tiles(64, 32, 4, 2, 32, 64, 64, 32, 4, 1) if wide <= 64 else Tiles(32, 32, 4, 1, 32, 32, 32, 32, 4, 1)
    elif wide <= 16:
        found = Tiles(64, 64, 4, 3, 32, 128, 128, 32, 4, 4, 168, (64, 128, 4, 3, 0))
    elif wide <= 32:
        found = Tiles(64, 64, 4, 3, 64, 128, 128, 32, 4, 3, 255)
    elif wide <= 64:
        found = Tiles(64, 64, 4, 3, 64 if queries <= 256 else 32, 64, 64, 64, 4, 3)
    else:
        found = Tiles(128, 64, 8, 2, 64, 64, 64, 64, 8, 1)
    most = block_of(queries)
    return found._replace(
        rows=min(found.rows, most), key_rows=min(found.key_rows, most), query_rows=min(found.query_rows, most)
    )


KEYS, QUERIES, WHOLE_HEAD, SWEEP, ADDING = range(5)
"""Kinds of work of a backward pass: a block of points for dk and dv; a block of queries for dq; a block that holds all
points of its head, for all three; a whole head in one sweep; a block of points that adds its share to dq."""


class Back(NamedTuple):
    """How a backward pass is worked through: tile shapes, the order of work on the device, and its kinds of work."""

    tile: Tiles
    tasks: Tensor
    kinds: int  # the sum of 2^kind over those that there are


class Work(NamedTuple):
    """How one layout is worked through: tile shapes, and the table of heads and the order of work on the device."""

    tile: Tiles
    table: Tensor
    forward: Tensor
    back: Back
    reproducible: Back  # the same where everything must be added in the same order every time
    aligned: bool  # rows of keys and values can be read 16 bytes at a time


_FILL = 2 * MULTIPROCESSORS
"""Sweeps that run at a time: two on every multiprocessor."""

_BUSY = 0.95
"""The share of this room that whole heads must keep busy to the end, or smaller pieces are as fast: a sweep of a head
that begins when all others are done leaves the rest of the GPU idle."""

_SWEEP = (32, 3)
"""Rows of a block and pipeline stages of a sweep."""


@on_device(most=1024)
def work(
    layout: Layout, batch: int, queries: int, widest: int, dtype: torch.dtype, causal: bool,
    device: torch.device,
) -> Work:  # fmt: skip
    """Longest pieces first."""
    tile = tiles(widest, dtype, queries)
    blocks = -(-queries // tile.rows)
    order = [(0, row, b, m) for row in range(len(layout)) for b in range(batch) for m in range(blocks)]
    if causal:  # what sees most first; else layouts have the longest heads first
        order.sort(key=lambda task: -_seen(layout[task[1]], (task[3] + 1) * tile.rows))

    def put(data: Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(data, dtype=torch.int32).reshape(len(data), -1).to(device)

    def back(adding: bool) -> Back:
        tile_, tasks = _order(layout, batch, queries, tile, causal, adding)
        return Back(tile_, put(tasks), sum({2 ** task[0] for task in tasks}))

    best = back(dtype != torch.float32)
    reproducible = back(False) if best.kinds == 1 << ADDING else best
    return Work(
        tile,
        table_of(layout, device),
        put(order),
        best,
        reproducible,
        all(head.aligned for head in layout),
    )


def _order(
    layout: Layout, batch: int, queries: int, tile: Tiles, causal: bool, adding: bool
) -> tuple[Tiles, list[tuple[int, int, int, int]]]:
    """Of a backward pass. A head whose points fit in one block gets its dq from there.

    Where some are longer one piece is a block of points that adds to dq if that may be added in any order, `adding`, or
    a whole head, in one sweep, if there are many.
    """
    points = [head.points for head in layout]
    longer = not causal and min(points) > 0 and max(points) > tile.key_columns
    adding = longer and adding and len(tile.adding) > 0
    sweep = longer and not adding and tile.registers > 0 and _sweeps_keep_busy(batch, points)
    if sweep:
        tile = tile._replace(key_rows=min(_SWEEP[0], tile.key_rows), back_stages=_SWEEP[1])
    elif adding:
        most, columns, warps, stages, registers = tile.adding
        tile = tile._replace(
            key_rows=min(most, block_of(queries)), key_columns=columns, back_warps=warps, back_stages=stages,
            registers=registers,
        )  # fmt: skip
    elif causal or max(points) > tile.key_columns:
        tile = tile._replace(registers=0)
    back_blocks = -(-queries // tile.query_rows)
    back: list[tuple[int, tuple[int, int, int, int]]] = []
    whole = [not causal and head.points <= tile.key_columns for head in layout]
    for row, head in enumerate(layout):
        kind, cost = (ADDING, 5) if adding else (WHOLE_HEAD, 5) if whole[row] else (KEYS, 4)
        for b in range(batch):
            key_blocks = max(1, -(-head.points // tile.key_columns))
            if sweep:
                back.append((key_blocks, (SWEEP, row, b, 0)))
                continue
            for n in range(key_blocks):
                before = n * tile.key_columns * head.window if causal else 0  # queries that see none of these
                back.append((cost * tile.key_columns * max(0, queries - before), (kind, row, b, n)))
    for row, head in enumerate(layout):
        if not (whole[row] or sweep or adding):
            for b, m in product(range(batch), range(back_blocks)):
                seen = _seen(head, (m + 1) * tile.query_rows) if causal else head.points
                back.append((3 * tile.query_rows * seen, (QUERIES, row, b, m)))
    back.sort(key=lambda item: -item[0])
    return tile, [task for _, task in back]


def _seen(head: HeadLayout, end: int) -> int:
    """Points that a causal query before token `end` may see."""
    return min(head.points, -(-end // head.window))


def _sweeps_keep_busy(batch: int, points: Sequence[int]) -> bool:
    """Whether sweeps over all heads, longest first and each where there is room next, end at nearly the same time."""
    whole = batch * sum(points)
    if whole < _FILL * max(points):
        return False
    ends = [0] * _FILL
    for length in sorted(points, reverse=True):
        for _ in range(batch):
            heapq.heapreplace(ends, ends[0] + length)
    return whole >= _BUSY * _FILL * max(ends)


@functools.cache
def kernels() -> ModuleType:
    """The Triton kernels; imported when first needed, since a CPU has no use for them."""
    from . import kernels

    return kernels
