# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Hashes of member, row and column, by which entries are dropped: the backward pass finds the mask again."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import mix


@triton.jit
def member_seed(seed_ptr, member):
    """A seed for each member from one for all."""
    return mix(tl.load(seed_ptr).to(tl.uint32) + member.to(tl.uint32) * 0x9E3779B1)


@triton.jit
def hash_rows(seed, row):
    """Odd, as `drop` takes them."""
    return mix(seed + row.to(tl.uint32) * 0x9E3779B1) | 1


@triton.jit
def hash_columns(seed, column):
    """Odd, and others than those of rows."""
    return mix((seed ^ 0x9E3779B9) + column.to(tl.uint32) * 0x85EBCA77) | 1
