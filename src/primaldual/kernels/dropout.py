# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Dropout inside Triton kernels: an entry is kept where the product of its row's and its column's hash is large."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """A 32-bit hash."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


COMPILED = tl.constexpr(isinstance(mix, triton.JITFunction))


@triton.jit
def drop(x, row_bits, column_bits, threshold):
    """The entries that are kept, zero for others: one multiplication each, of odd hashes, so that it is uniform.

    As assembly the comparison stays with the selection. Apart they run out of predicate registers, or select after x
    is rounded, one half of a register at a time: either way twice the instructions.
    """
    threshold = threshold.to(tl.uint32)
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred kept;
            .reg .u32 bits;
            mul.lo.u32 bits, $2, $3;
            setp.ge.u32 kept, bits, $4;
            selp.f32 $0, $1, 0f00000000, kept;
            }""",
            "=r,r,r,r,r", [x, row_bits, column_bits, threshold], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.where(row_bits * column_bits >= threshold, x, 0.0)
