# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Sums over rows, as Triton kernels: first one partial sum per run of rows, then the sum of those."""

from __future__ import annotations

import triton
import triton.language as tl

from ..sums import sum_of_rows
from .runs import begin, leave


@triton.jit
def column_sums(
    x_ptr, sums_ptr, rows, span, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Partial sums of x, [members, runs, D]."""
    member, d, first = begin(span, BD)
    x_ptr += member * rows * D
    total = tl.zeros((BR, BD), tl.float32)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        total += tl.load(x_ptr + row[:, None] * D + d[None, :], mask=here, other=0.0).to(tl.float32)
    leave(sums_ptr, total, member, d, 0, 1, D)


@triton.jit
def fold(x_ptr, y_ptr, runs, width, BD: tl.constexpr, BP: tl.constexpr):
    """The sums over the runs of [members, runs, width]."""
    member = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    total = sum_of_rows(x_ptr + member * runs * width, 0, runs, width, d, width, BD, BP)
    tl.store(y_ptr + member * width + d, total.to(y_ptr.dtype.element_ty), mask=d < width)
