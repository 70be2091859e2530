# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""GELU with bias and dropout, as Triton kernels, and the normal distribution that it is made of."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import COMPILED, drop
from .hashes import hash_rows
from .runs import begin, drops, leave, tile


@triton.jit
def _power_of_2(x):
    """2^x, or 0 where that is less than a normal number: to look for these costs three instructions more."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _tail(x):
    """The normal distribution function of −|x|, to 1.2e-4 of itself where that times |x| is over 1e-4.

    Its logarithm is close to a polynomial: the one of least largest error for |x| ≤ 6 has degree 5 here.
    """
    x = tl.abs(x)
    exponent = -0.047287003 + x * (0.0055549713 + x * -0.00029354251)
    return _power_of_2(-1.0001686826 + x * (-1.1485361080 + x * (-0.4654526115 + x * exponent)))


@triton.jit
def normal(x, EXACT: tl.constexpr):
    """The normal distribution function and its density; EXACT is for results that are not rounded to 16 bits."""
    if EXACT:
        below = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
    else:
        tail = _tail(x)
        below = tl.where(x < 0.0, tail, 1.0 - tail)
    return below, _power_of_2(-0.7213475204444817 * x * x - 1.3257480647361593)


@triton.jit
def gelu(x, EXACT: tl.constexpr):
    if EXACT:
        below, _ = normal(x, EXACT)
        return x * below
    else:
        return tl.maximum(x, 0.0) - tl.abs(x) * _tail(x)


@triton.jit
def activate(
    h_ptr, bias_ptr, seed_ptr, y_ptr, bias_member, rows, span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """y = dropout(gelu(h + bias))."""
    member, d, first = begin(span, BD)
    h_ptr += member * rows * D
    y_ptr += member * rows * D
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    seed, column_bits = drops(seed_ptr, member, d)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row, here, at = tile(start, rows, d, D, BR)
        h = tl.load(h_ptr + at, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        y = gelu(h, y_ptr.dtype.element_ty == tl.float32)
        if DROPOUT:
            y = drop(y * boost, hash_rows(seed, row)[:, None], column_bits[None, :], threshold)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def activate_backward(
    dy_ptr, h_ptr, bias_ptr, seed_ptr, dh_ptr, dbias_ptr, bias_member, rows, span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dh, and partial sums of it, [members, runs, D]."""
    member, d, first = begin(span, BD)
    dy_ptr += member * rows * D
    h_ptr += member * rows * D
    dh_ptr += member * rows * D
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.zeros((BR, BD), tl.float32)
    seed, column_bits = drops(seed_ptr, member, d)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row, here, at = tile(start, rows, d, D, BR)
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + at, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        below, density = normal(h, dh_ptr.dtype.element_ty == tl.float32)
        dh = dy * (below + h * density)
        if DROPOUT:
            dh = drop(dh * boost, hash_rows(seed, row)[:, None], column_bits[None, :], threshold)
        total += dh
        tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=here)
    leave(dbias_ptr, total, member, d, 0, 1, D)
