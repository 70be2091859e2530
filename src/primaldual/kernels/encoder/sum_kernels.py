# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Sums over rows, as Triton kernels: first one partial sum per run of rows, then the sum of those."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_rows(pointer, runs, step, d, D, BD: tl.constexpr, BP: tl.constexpr):
    """The sums of `runs` rows of D that lie `step` apart."""
    total = tl.zeros((BP, BD), tl.float32)
    for start in range(0, runs, BP):
        run = start + tl.arange(0, BP)
        here = (run[:, None] < runs) & (d[None, :] < D)
        total += tl.load(pointer + run[:, None] * step + d[None, :], mask=here, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def column_sums(
    x_ptr, sums_ptr, rows, span, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Partial sums of x, [members, runs, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    x_ptr += member * rows * D
    total = tl.zeros((BR, BD), tl.float32)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        total += tl.load(x_ptr + row[:, None] * D + d[None, :], mask=here, other=0.0).to(tl.float32)
    at = (member * tl.num_programs(0) + tl.program_id(0)) * D + d
    tl.store(sums_ptr + at, tl.sum(total, 0), mask=d < D)


@triton.jit
def fold(x_ptr, y_ptr, runs, width, BD: tl.constexpr, BP: tl.constexpr):
    """The sums over the runs of [members, runs, width]."""
    member = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    total = sum_rows(x_ptr + member * runs * width, runs, width, d, width, BD, BP)
    tl.store(y_ptr + member * width + d, total.to(y_ptr.dtype.element_ty), mask=d < width)
