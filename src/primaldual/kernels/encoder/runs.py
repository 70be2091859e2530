# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""What kernels of the encoder begin and end with, on some columns of a run of rows of one member (device code).

Tensors are [members, rows, D], contiguous; a grid is (runs, blocks of BD columns, members). The compiled code is to the
instruction what it is with these lines written out, which they are where it is not: `add` and `batch_backward` in their
loops, and what only loads or stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .hashes import hash_columns, member_seed


@triton.jit
def begin(span, BD: tl.constexpr):
    """The member, the columns, and the first row of the run."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    return member, d, tl.program_id(0) * span


@triton.jit
def tile(start, rows, d, D: tl.constexpr, BR: tl.constexpr):
    """The rows of a tile, which entries there are, and where they lie in a member's own."""
    row = start + tl.arange(0, BR)
    here = (row[:, None] < rows) & (d[None, :] < D)
    return row, here, row[:, None] * D + d[None, :]


@triton.jit
def drops(seed_ptr, member, d):
    """The member's seed, and the hashes of the columns."""
    seed = member_seed(seed_ptr, member)
    return seed, hash_columns(seed, d)


@triton.jit
def leave(sums_ptr, total, member, d, number: tl.constexpr, numbers: tl.constexpr, D: tl.constexpr):
    """The sum over the rows of a tile as that of this run, in [members, runs, numbers, D]."""
    at = (member * tl.num_programs(0) + tl.program_id(0)) * numbers * D + d
    tl.store(sums_ptr + at + number * D, tl.sum(total, 0), mask=d < D)
