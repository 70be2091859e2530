"""Where the points of every head lie: the layouts that the ragged kernels are given.

Keys and values lie in flat buffers. A layout has an entry for each head, longest heads first. Custom operators of torch
take lists of integers alone, so on their way through one a layout is `as_integers`, and after it `of_integers`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class HeadLayout(NamedTuple):
    """A head, its points and how many tokens each is the mean of; offset and strides, in elements, of keys and values.

    Point j of sequence b has its key at k_offset + b · k_batch + j · k_row.
    """

    head: int
    points: int
    window: int
    k_offset: int
    k_batch: int
    k_row: int
    v_offset: int
    v_batch: int
    v_row: int

    @property
    def aligned(self) -> bool:
        """Whether offsets and strides are multiples of 8 elements: then rows can be read 16 bytes at a time."""
        return not any(number % 8 for number in self[3:])


Layout: TypeAlias = tuple[HeadLayout, ...]


def as_integers(layout: Iterable[HeadLayout]) -> list[int]:
    """The entries one after the other, for a custom operator."""
    return [number for head in layout for number in head]


def of_integers(numbers: Sequence[int]) -> Layout:
    """The layout that `as_integers` made these of."""
    return _of_integers(tuple(numbers))


@functools.lru_cache(maxsize=256)
def _of_integers(numbers: tuple[int, ...]) -> Layout:
    width = len(HeadLayout._fields)
    return tuple(HeadLayout(*numbers[i : i + width]) for i in range(0, len(numbers), width))


def table_of(layout: Layout, device: torch.device) -> Tensor:
    """The layout as the kernels read it, int64 [heads, 9]."""
    return torch.tensor(layout, dtype=torch.int64).to(device)


@functools.lru_cache(maxsize=256)
def pooled(
    scales: tuple[int, ...], batch: int, tokens: int, dim: int, value_dim: int, tokens_apart: bool = False
) -> Layout:
    """Of pooled heads whose points lie in buffers of their own, one head after the other.

    With `tokens_apart` heads with windows of one token have no place there: the kernels read the tokens themselves.
    """
    heads, before = [], 0
    for head in sorted(range(len(scales)), key=lambda h: scales[h]):
        points = -(-tokens // scales[head])
        at = batch * before
        of_keys, of_values = (at * dim, points * dim, dim), (at * value_dim, points * value_dim, value_dim)
        heads.append(HeadLayout(head, points, scales[head], *of_keys, *of_values))
        before += 0 if tokens_apart and scales[head] == 1 else points
    return tuple(heads)


def of_tokens(k: Tensor, v: Tensor) -> Layout:
    """Of heads that are fitted to the tokens themselves, where these lie in k and v [B, H, S, D]."""

    def place(x: Tensor, head: int) -> tuple[int, int, int]:
        return head * x.stride(1), x.stride(0), x.stride(2)

    return tuple(HeadLayout(head, k.shape[2], 1, *place(k, head), *place(v, head)) for head in range(k.shape[1]))
