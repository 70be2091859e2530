"""Passes over memory around the attention of heads: means over windows, sums over rows, and putting in place."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import launching
from ..kept import on_device
from ..launching import MULTIPROCESSORS, block_of, in_rows, options, power_of_2, specialised_by, strides_of
from . import work as ragged_work
from .layout import Layout

BLOCKS, _SPAN = 16, 128
"""The most blocks of rows that `sum_rows` adds up, and the rows that a block has at least."""

ROOM = 2 * MULTIPROCESSORS
"""Programs of a pass beside which others have room: two a multiprocessor."""

_TILE = 64 * 128
"""Numbers that such a program of `pool` reads at a time, at most: larger ones leave no room."""


class Shift(NamedTuple):
    """What is taken off all rows of a head alike: factor · β · the sum over the blocks of `sums`."""

    sums: Tensor  # [B, H, blocks, D], float32 and contiguous
    factor: float = 1.0
    beta: Tensor | None = None  # [H], float32; None for 1
    table: Tensor | None = None  # of heads with windows: a row has its share in the mean over the windows' means

    @staticmethod
    def parts(shift: Shift | None) -> tuple[Tensor | None, float, Tensor | None, Tensor | None, int]:
        """Sums, factor, β as kernels read it, table, and the number of blocks; of no shift none, and 1."""
        if shift is None:
            return None, 0.0, None, None, 1
        beta = None if shift.beta is None else shift.beta.contiguous()
        return shift.sums, shift.factor, beta, shift.table, shift.sums.shape[2]

    @staticmethod
    def of(shift: Tensor | None) -> Shift | None:
        """One that is known, [B, H, D]."""
        return None if shift is None else Shift(shift.contiguous().unsqueeze(2))


@functools.lru_cache(maxsize=256)
def _pool_blocks(layout: Layout, size: int) -> int:
    """The most blocks of so many tokens, or windows that are longer, that a head has."""
    return max(-(-head.points // max(1, size // head.window)) for head in layout)


def pool(
    k: Tensor, v: Tensor, layout: Layout, want_mean: bool, skipped: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values of the points, flat; and the mean of the keys, [B, H, D], where it is wanted.

    The `skipped` first heads of the layout have no place there.
    """
    B, H, S, D = k.shape
    DV = v.shape[-1]
    rows = B * sum(head.points for head in layout[skipped:])
    keys, values = k.new_empty(rows * D), v.new_empty(rows * DV)
    short = k.element_size() == 2
    size = 64 if short else 16  # float32 has no fast products
    blocks, long = _pool_blocks(layout[skipped:], size), max(head.window for head in layout) > size
    sums = torch.empty(B, H, blocks, D, device=k.device, dtype=torch.float32) if want_mean else None

    def prepare() -> Any:
        work = ragged_work.work(layout, B, S, max(D, DV), k.dtype, False, k.device)
        numbers = (
            *strides_of(k),
            *strides_of(v),
            H,
            S,
            blocks,
            skipped,
            D,
            DV,
            block_of(D),
            block_of(DV),
            size,
            long,
            want_mean,
        )
        heads, programs, compiled_with = H - skipped, blocks if short else -(-blocks // 4), options(4, 1)
        if short and size * (block_of(D) + block_of(DV)) <= _TILE:
            programs, compiled_with = max(1, min(blocks, ROOM // (heads * B))), options(4, 3, 128)
        return ragged_work.kernels().pool, (programs, heads, B), (work.table, *numbers, work.aligned), compiled_with

    launching.launch(
        ("pool", layout, want_mean, skipped, k.device, *specialised_by(k, v)), (k, v, keys, values, sums), prepare
    )
    if sums is None:
        return keys, values, None
    return keys, values, sums.sum(2) / _points_per_head(layout, k.device)


@on_device(most=256)
def _points_per_head(layout: Layout, device: torch.device) -> Tensor:
    in_order = sorted(layout, key=lambda entry: entry.head)
    return torch.tensor([float(entry.points) for entry in in_order], device=device)[:, None]


def place(x: Tensor, to: Tensor, *, window: int = 1, shift: Shift | None = None) -> None:
    """to[b, h, i] = x[b, h, ⌊i/window⌋] / window, less a shift, for [B, H, N, D]; it may be x itself."""
    B, H, N, D = to.shape
    x = in_rows(x)
    sums, factor, beta, table, blocks = Shift.parts(shift)
    launching.launch(
        ("place", window, factor, _address(table), to.device, *specialised_by(x, sums, beta, to)),
        (x, sums, beta, to),
        lambda: (
            ragged_work.kernels().place, (-(-N // 128), H, B),
            (table, *strides_of(x, to), H, N, window, blocks, factor, D, block_of(D), 128, power_of_2(blocks)),
            options(4, 1),
        ),
    )  # fmt: skip


def place_three(
    found: tuple[Tensor, Tensor, Tensor], to: tuple[Tensor, Tensor, Tensor], *, window: int, shift: Shift | None = None
) -> None:  # fmt: skip
    """`place` dq, and over windows dk, less a shift, and dv, in one launch."""
    dq, dk, dv = found = in_rows(found[0]), in_rows(found[1]), in_rows(found[2])
    B, H, N, D = to[1].shape
    L, DV = dq.shape[2], dv.shape[3]
    sums, factor, beta, _, blocks = Shift.parts(shift)
    numbers = (
        *strides_of(dq),
        *strides_of(dk),
        *strides_of(dv),
        *strides_of(to[0]),
        *strides_of(to[1]),
        *strides_of(to[2]),
    )
    launching.launch(
        ("place_three", window, factor, dq.device, *specialised_by(*found, sums, beta, *to)),
        (*found, sums, beta, *to),
        lambda: (
            ragged_work.kernels().place_three, (-(-L // 128) + 2 * -(-N // 128), H, B),
            (*numbers, H, L, N, window, blocks, factor, D, DV, block_of(D), block_of(DV), 128, power_of_2(blocks)),
            options(4, 1),
        ),
    )  # fmt: skip


def blocks_of(rows: int) -> tuple[int, int]:
    """Rows of a block that `sum_rows` adds up, and how many blocks there are."""
    span = _SPAN * -(-rows // (_SPAN * BLOCKS))
    return span, -(-rows // span)


def sum_rows(x: Tensor, table: Tensor | None = None) -> Tensor:
    """Σ x[b, h, i] over blocks of rows, [B, H, blocks, D], float32.

    With the table of heads with windows each row is multiplied by its share in the mean over the windows' means.
    """
    B, H, N, D = x.shape
    x = in_rows(x)
    span, blocks = blocks_of(N)
    sums = torch.empty(B, H, blocks, D, device=x.device, dtype=torch.float32)
    launching.launch(
        ("sum_rows", _address(table), x.device, *specialised_by(x)),
        (x, sums),
        lambda: (
            ragged_work.kernels().sum_rows, (blocks, H, B),
            (table, *strides_of(x), H, N, span, D, block_of(D), min(128, 8192 // block_of(D))), options(4, 1),
        ),
    )  # fmt: skip
    return sums


def dot_sums(a: Tensor, b: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """factor · Σ over batches and d of (Σ_i a[b, h, i, d]) (Σ_j b[b, h, j, d]), [H], for sums of blocks in float32.

    β's gradient, from sums over the gradients of queries and over keys.
    """
    B, H, _, D = a.shape
    out = torch.empty(H, dtype=dtype, device=a.device)
    blocks = min(16, power_of_2(max(a.shape[2], b.shape[2])))
    batches = max(1, min(power_of_2(B), 8192 // (blocks * block_of(D))))
    launching.launch(
        ("dot_sums", factor, a.device, *specialised_by(a, b, out)),
        (a, b, out),
        lambda: (
            ragged_work.kernels().dot_sums, (H, 1, 1),
            (*strides_of(a), a.shape[2], *strides_of(b), b.shape[2], B, factor, D, block_of(D), batches, blocks),
            options(4, 1),
        ),
    )  # fmt: skip
    return out


def _address(table: Tensor | None) -> int:
    """Its address: a launch that is remembered keeps its table, so that no other has the same."""
    return 0 if table is None else table.data_ptr()


def unpool(dkeys: Tensor, dvalues: Tensor, dmean: Tensor, dk: Tensor, dv: Tensor, layout: Layout) -> None:
    """Gradients of points, and of the mean of the keys, into those of the tokens."""
    B, H, S, D = dk.shape
    DV = dv.shape[-1]

    def prepare() -> Any:
        work = ragged_work.work(layout, B, S, max(D, DV), dk.dtype, False, dk.device)
        numbers = *strides_of(dk, dv), H, S, D, DV, block_of(D), block_of(DV), 64, work.aligned
        return ragged_work.kernels().unpool, (-(-S // 64), H, B), (work.table, *numbers), options(4, 1)

    launching.launch(("unpool", layout, dk.device, *specialised_by(dk, dv)), (dkeys, dvalues, dmean, dk, dv), prepare)
