# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""A step of the optimiser as a Triton kernel: everything in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(
    matrix_ptr, gradient_ptr, mean_ptr, square_ptr, reduced_ptr, norm_ptr, alive_ptr, table_ptr, done_ptr, decayed_ptr,
    count, exact, steps, clip, second,
    BLOCK: tl.constexpr, HAS_REDUCED: tl.constexpr, SOME_DECAY: tl.constexpr,
):  # fmt: skip
    """A step of RAdam, Adam or AdamW on a gradient cut to a norm, 0 for who is not alive; and the reduced copy."""
    member = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = column < count
    at = member * count + column
    row = table_ptr + tl.minimum(tl.load(done_ptr), steps - 1) * 5
    factor = tl.minimum(clip / (tl.load(norm_ptr + member) + 1e-6), 1.0)
    alive = tl.load(alive_ptr + member) != 0
    gradient = tl.where(alive, tl.load(gradient_ptr + at, mask=here, other=0.0) * factor, 0.0)
    mean = tl.load(mean_ptr + at, mask=here, other=0.0)
    square = tl.load(square_ptr + at, mask=here, other=0.0)
    mean += (gradient - mean) * tl.load(row + 3)
    square += (gradient * gradient - square) * second
    x = tl.load(matrix_ptr + at, mask=here, other=0.0)
    shrink = tl.load(row + 4)
    if SOME_DECAY:
        x *= tl.where(tl.load(decayed_ptr + column, mask=here, other=0) != 0, shrink, 1.0)
    else:
        x *= shrink
    x -= mean * tl.load(row) / (tl.sqrt(square) * tl.load(row + 1) + tl.load(row + 2))
    tl.store(mean_ptr + at, mean, mask=here)
    tl.store(square_ptr + at, square, mask=here)
    tl.store(matrix_ptr + at, x, mask=here)
    if HAS_REDUCED:
        at = member * (count - exact) + column - exact
        tl.store(reduced_ptr + at, x.to(reduced_ptr.dtype.element_ty), mask=here & (column >= exact))
