"""FlexAttention over what a `Span` shows: its block mask is found in O(tiles kept), and remembered.

out = softmax(q kᵀ / √D + bias) v,   lse_i = log Σ_j exp(q_i·k_j / √D + bias_j),   over the keys j that row i sees
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kept import on_device

TILE = 128
"""Queries and keys to a tile: what is computed or skipped as one."""

SMALLEST_HEAD = 16
"""The least head dimension; smaller heads are padded with zeros."""

DYNAMIC_SHAPES = True
"""One kernel for all lengths; otherwise one is compiled for every length of every piece."""

RECOMPILES = 64
"""Kernels kept: beyond torch's own limit of 8, all N² scores would be computed without a word."""

FAR = 1 << 28
"""Further than any two coordinates lie apart; twice that fits 32 bits."""


class Span(NamedTuple):
    """Row r sees column c where low ≤ ⌊r/per_row⌋ − ⌊c/per_column⌋ ≤ high, and the difference is not `hole`."""

    per_row: int
    per_column: int
    low: int
    high: int
    hole: int = 2 * FAR

    @property
    def empty(self) -> bool:
        return self.low > self.high or self.low == self.high == self.hole

    def allows(self, row: Tensor, column: Tensor) -> Tensor:
        apart = row // self.per_row - column // self.per_column
        return (apart >= self.low) & (apart <= self.high) & (apart != self.hole)

    def transposed(self) -> Span:
        return Span(self.per_column, self.per_row, -self.high, -self.low, -self.hole)


def usable(q: Tensor, dropout_p: float) -> bool:
    """Whether FlexAttention computes such queries."""
    return q.is_cuda and dropout_p == 0 and q.dtype != torch.float64


def whole_tiles(count: int) -> int:
    """So many rows or columns are computed for `count` of them."""
    return -(-count // TILE) * TILE


def attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, span: Span | None) -> tuple[Tensor, Tensor]:
    """Outputs [G, H, R, Dv] and log-sum-exps [G, H, R], over the tiles that the span touches.

    Args:
        q, keys, values: [G, H, R, D], [G, H, C, D], [G, H, C, Dv].
        bias: [G, H or 1, C], added to the scores, −inf where a key is hidden; None for none.
        span: which keys a row sees; None for all.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    rows, columns, wide = q.shape[2], keys.shape[2], values.shape[-1]
    if q.shape[-1] < SMALLEST_HEAD:  # it divides by the root of the padded dimension
        q = _wide_enough(q) * math.sqrt(SMALLEST_HEAD / q.shape[-1])
    options: dict[str, Any] = {
        "score_mod": None if bias is None else _biased(bias),
        "block_mask": _block_mask(span, rows, columns, q.device),
        "return_aux": AuxRequest(lse=True),
        # short pieces would get the kernel for decoding
        "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True},
    }
    keys, values = _wide_enough(keys), _wide_enough(values)
    if torch.compiler.is_compiling():
        out, aux = flex_attention(q, keys, values, **options)
    else:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            out, aux = _compiled_flex(DYNAMIC_SHAPES)(q, keys, values, **options)
    return out[..., :wide], aux.lse


def _wide_enough(x: Tensor) -> Tensor:
    return x if x.shape[-1] >= SMALLEST_HEAD else pad(x, (0, SMALLEST_HEAD - x.shape[-1]))


@cache
def _compiled_flex(dynamic: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic)


def _biased(bias: Tensor) -> Any:
    """score + bias_j, per head where the bias is."""

    def shared(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, 0, j]

    def per_head(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, j]

    return shared if bias.shape[1] == 1 else per_head


def _block_mask(span: Span | None, rows: int, columns: int, device: torch.device) -> Any:
    if span is None:
        return None
    if torch.compiler.is_compiling():
        return build_block_mask(span, rows, columns, device)
    return _remembered(span, rows, columns, device)


@on_device(most=64, from_host=False)
def _remembered(span: Span, rows: int, columns: int, device: torch.device) -> Any:
    return build_block_mask(span, rows, columns, device)


def build_block_mask(span: Span, rows: int, columns: int, device: torch.device) -> Any:
    """The BlockMask of a span, without looking at the pairs: O(tiles kept)."""
    from torch.nn.attention.flex_attention import BlockMask

    # numbers on the device, so that kernels are not compiled anew for each of them
    per_row, per_column, low, high, hole = (torch.full((), x, dtype=torch.int32, device=device) for x in span)

    def kept(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        apart = i // per_row - j // per_column
        return (apart >= low) & (apart <= high) & (apart != hole)

    partial_kv, full_kv = tiles(span, rows, columns, device)
    partial_q, full_q = tiles(span.transposed(), columns, rows, device)
    return BlockMask(
        (rows, columns), *partial_kv, *full_kv, *partial_q, *full_q, BLOCK_SIZE=(TILE, TILE), mask_mod=kept
    )


def tiles(span: Span, rows: int, columns: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """For each tile of rows the tiles of columns that it sees in part, and those that it sees whole.

    With coordinates i₀..i₁ of the rows and j₀..j₁ of the columns, i − j takes every value of i₀ − j₁ .. i₁ − j₀: a tile
    is touched where that meets [low, high], and whole where it lies inside, without the hole. What is touched is an
    interval. Each answer is how many (int32 [1, 1, row tiles]) and which ([1, 1, row tiles, most]).
    """
    last = -(-columns // TILE) - 1
    extent = (TILE - 1) // span.per_row + 2 + min(span.high, columns) - max(span.low, -columns - rows)
    most = max(1, min(last + 1, extent * span.per_column // TILE + 2))
    start = torch.arange(0, rows, TILE, device=device)[:, None]
    stop = start + TILE
    first_i, last_i = start // span.per_row, (stop.clamp(max=rows) - 1) // span.per_row
    begin = ((first_i - span.high) * span.per_column // TILE).clamp(0, last)
    tile = begin + torch.arange(most, device=device)
    first_j, last_j = tile * TILE // span.per_column, ((tile + 1).mul(TILE).clamp(max=columns) - 1) // span.per_column
    lowest, highest = first_i - last_j, last_i - first_j
    touched = (tile <= last) & (highest >= span.low) & (lowest <= span.high)
    inside = (lowest >= span.low) & (highest <= span.high) & ((span.hole < lowest) | (span.hole > highest))
    whole = touched & inside & (stop <= rows) & ((tile + 1) * TILE <= columns)

    def listed(flag: Tensor) -> tuple[Tensor, Tensor]:
        order = (~flag).int().argsort(dim=1, stable=True)
        index = tile.clamp(max=last).gather(1, order)
        return flag.sum(1).int()[None, None], index.int()[None, None].contiguous()

    return listed(touched & ~whole), listed(whole)
