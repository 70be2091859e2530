# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""The embedding but for its product, as Triton kernels. A program has some steps of all series of one member."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import drop
from .hashes import hash_rows
from .runs import drops


@triton.jit
def embed(
    x_ptr, bias_ptr, positions_ptr, seed_ptr, y_ptr, bias_member, positions_member, batch, length, factor, threshold,
    boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """y = dropout(factor · (x + bias) + position)."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    steps = tl.program_id(0) * BR + tl.arange(0, BR)
    here = (steps[:, None] < length) & (d[None, :] < D)
    x_ptr += member * batch * length * D
    y_ptr += member * batch * length * D
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    place = steps[:, None] * D + d[None, :]
    add = tl.load(positions_ptr + member * positions_member + place, mask=here, other=0.0).to(tl.float32)
    add = (add + factor * bias[None, :]) * boost
    factor *= boost
    seed, column_bits = drops(seed_ptr, member, d)
    for case in tl.range(0, batch, num_stages=STAGES):
        at = case * length * D + place
        y = factor * tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32) + add
        if DROPOUT:
            y = drop(y, hash_rows(seed, case * length + steps)[:, None], column_bits[None, :], threshold)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def embed_backward(
    dy_ptr, seed_ptr, dx_ptr, dpositions_ptr, batch, length, factor, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dx, and the gradient of the positions, which is also that of the bias but for a sum and the factor."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    steps = tl.program_id(0) * BR + tl.arange(0, BR)
    here = (steps[:, None] < length) & (d[None, :] < D)
    dy_ptr += member * batch * length * D
    dx_ptr += member * batch * length * D
    place = steps[:, None] * D + d[None, :]
    total = tl.zeros((BR, BD), tl.float32)
    factor *= boost
    seed, column_bits = drops(seed_ptr, member, d)
    for case in tl.range(0, batch, num_stages=STAGES):
        at = case * length * D + place
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        if DROPOUT:
            dy = drop(dy, hash_rows(seed, case * length + steps)[:, None], column_bits[None, :], threshold)
        total += dy
        tl.store(dx_ptr + at, (dy * factor).to(dx_ptr.dtype.element_ty), mask=here)
    total *= boost
    tl.store(dpositions_ptr + member * length * D + place, total.to(dpositions_ptr.dtype.element_ty), mask=here)
