# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Hashes of member, row and column, by which entries are dropped: the backward pass finds the mask again."""

from __future__ import annotations

import triton
import triton.language as tl

from ...ops.kernel_dropout import mix


@triton.jit
def member_seed(seed_ptr, member):
    return mix(tl.load(seed_ptr).to(tl.uint32) + member.to(tl.uint32) * 0x9E3779B1)


@triton.jit
def hash_rows(seed, row):
    return mix(seed + row.to(tl.uint32) * 0x9E3779B1) | 1


@triton.jit
def hash_columns(seed, column):
    return mix((seed ^ 0x9E3779B9) + column.to(tl.uint32) * 0x85EBCA77) | 1
