# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Sums of rows inside Triton kernels, and how many tokens a window holds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of_rows(pointer, first, stop, step, d, D, BD: tl.constexpr, BP: tl.constexpr):
    """The sums, in float32, of the columns d < D of the rows [first, stop), which lie `step` apart; BP at a time."""
    total = tl.zeros((BP, BD), tl.float32)
    for start in range(first, stop, BP):
        row = start + tl.arange(0, BP)
        here = (row[:, None] < stop) & (d[None, :] < D)
        total += tl.load(pointer + row[:, None] * step + d[None, :], mask=here, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def window_size(first, tokens, window):
    """Of the window that begins at a token: the last one may be shorter, and 1 stands for one that is not there."""
    return tl.maximum(tl.minimum(tokens - first, window), 1)
