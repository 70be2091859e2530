# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""A residual connection and the norm after it, as Triton kernels: batch norm, or layer norm."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import drop
from .hashes import hash_columns, hash_rows, member_seed
from .sum_kernels import sum_rows


@triton.jit
def add(
    x_ptr, a_ptr, bias_ptr, seed_ptr, centre_ptr, r_ptr, sums_ptr, bias_member, rows, span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """r = x + dropout(a + bias); and partial sums of r − centre and its square, [members, runs, 2, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    x_ptr += member * rows * D
    a_ptr += member * rows * D
    r_ptr += member * rows * D
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32) * boost
    centre = tl.zeros((BD,), tl.float32)
    if SUMS:
        centre = tl.load(centre_ptr + member * D + d, mask=d < D, other=0.0)
    once = tl.zeros((BR, BD), tl.float32)
    twice = tl.zeros((BR, BD), tl.float32)
    seed = member_seed(seed_ptr, member)
    column_bits = hash_columns(seed, d)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = row[:, None] * D + d[None, :]
        a = tl.load(a_ptr + at, mask=here, other=0.0).to(tl.float32) * boost + bias[None, :]
        if DROPOUT:
            a = drop(a, hash_rows(seed, row)[:, None], column_bits[None, :], threshold)
        r = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32) + a
        tl.store(r_ptr + at, r.to(r_ptr.dtype.element_ty), mask=here)
        if SUMS:
            away = tl.where(here, r - centre[None, :], 0.0)
            once += away
            twice += away * away
    if SUMS:
        at = (member * tl.num_programs(0) + tl.program_id(0)) * 2 * D + d
        tl.store(sums_ptr + at, tl.sum(once, 0), mask=d < D)
        tl.store(sums_ptr + at + D, tl.sum(twice, 0), mask=d < D)


@triton.jit
def batch_moments(
    sums_ptr, mean_ptr, variance_ptr, moments_ptr, rows, runs, momentum, eps,
    D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Mean and 1/deviation, [members, 2, D], from the partial sums about the running mean; and the running moments."""
    member = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    here = d < D
    sums_ptr += member * runs * 2 * D
    once = sum_rows(sums_ptr, runs, 2 * D, d, D, BD, BP) / rows
    twice = sum_rows(sums_ptr + D, runs, 2 * D, d, D, BD, BP) / rows
    old_mean = tl.load(mean_ptr + member * D + d, mask=here, other=0.0)
    old_variance = tl.load(variance_ptr + member * D + d, mask=here, other=0.0)
    mean = old_mean + once
    variance = tl.maximum(twice - once * once, 0.0)
    unbiased = variance * rows / tl.maximum(rows - 1, 1)
    tl.store(mean_ptr + member * D + d, old_mean + momentum * once, mask=here)
    tl.store(variance_ptr + member * D + d, old_variance + momentum * (unbiased - old_variance), mask=here)
    tl.store(moments_ptr + member * 2 * D + d, mean, mask=here)
    tl.store(moments_ptr + member * 2 * D + D + d, tl.rsqrt(variance + eps), mask=here)


@triton.jit
def batch_normal(
    r_ptr, moments_ptr, weight_ptr, bias_ptr, y_ptr, weight_member, rows, span,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = (r − mean) / deviation · weight + bias."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    r_ptr += member * rows * D
    y_ptr += member * rows * D
    mean = tl.load(moments_ptr + member * 2 * D + d, mask=d < D, other=0.0)
    scale = tl.load(moments_ptr + member * 2 * D + D + d, mask=d < D, other=0.0)
    scale *= tl.load(weight_ptr + member * weight_member + d, mask=d < D, other=0.0)
    bias = tl.load(bias_ptr + member * weight_member + d, mask=d < D, other=0.0)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = row[:, None] * D + d[None, :]
        r = tl.load(r_ptr + at, mask=here, other=0.0).to(tl.float32)
        y = (r - mean[None, :]) * scale[None, :] + bias[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def batch_sums(
    dy_ptr, r_ptr, moments_ptr, sums_ptr, rows, span,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums of dy and of dy · (r − mean) / deviation, [members, runs, 2, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    dy_ptr += member * rows * D
    r_ptr += member * rows * D
    mean = tl.load(moments_ptr + member * 2 * D + d, mask=d < D, other=0.0)
    scale = tl.load(moments_ptr + member * 2 * D + D + d, mask=d < D, other=0.0)
    once = tl.zeros((BR, BD), tl.float32)
    product = tl.zeros((BR, BD), tl.float32)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = row[:, None] * D + d[None, :]
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + at, mask=here, other=0.0).to(tl.float32)
        once += dy
        product += dy * ((r - mean[None, :]) * scale[None, :])
    at = (member * tl.num_programs(0) + tl.program_id(0)) * 2 * D + d
    tl.store(sums_ptr + at, tl.sum(once, 0), mask=d < D)
    tl.store(sums_ptr + at + D, tl.sum(product, 0), mask=d < D)


@triton.jit
def batch_backward(
    dy_ptr, r_ptr, moments_ptr, gradients_ptr, weight_ptr, seed_ptr, dr_ptr, da_ptr, dbias_ptr, weight_member, rows,
    span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dr of the sum that was normalised; da of the branch that was dropped out, and partial sums of it.

    It takes the gradients of bias and weight, [members, 2, D]: the sums of what `batch_sums` gives.
    """
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    dy_ptr += member * rows * D
    r_ptr += member * rows * D
    dr_ptr += member * rows * D
    da_ptr += member * rows * D
    mean = tl.load(moments_ptr + member * 2 * D + d, mask=d < D, other=0.0)
    rate = tl.load(moments_ptr + member * 2 * D + D + d, mask=d < D, other=0.0)
    scale = rate * tl.load(weight_ptr + member * weight_member + d, mask=d < D, other=0.0)
    shift = tl.load(gradients_ptr + member * 2 * D + d, mask=d < D, other=0.0) / rows * scale
    slope = tl.load(gradients_ptr + member * 2 * D + D + d, mask=d < D, other=0.0) / rows * rate * scale
    total = tl.zeros((BR, BD), tl.float32)
    seed = member_seed(seed_ptr, member)
    column_bits = hash_columns(seed, d)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = row[:, None] * D + d[None, :]
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + at, mask=here, other=0.0).to(tl.float32)
        dr = dy * scale[None, :] - shift[None, :] - (r - mean[None, :]) * slope[None, :]
        tl.store(dr_ptr + at, dr.to(dr_ptr.dtype.element_ty), mask=here)
        if DROPOUT:
            dr = drop(dr * boost, hash_rows(seed, row)[:, None], column_bits[None, :], threshold)
            tl.store(da_ptr + at, dr.to(da_ptr.dtype.element_ty), mask=here)
        total += tl.where(here, dr, 0.0)
    at = (member * tl.num_programs(0) + tl.program_id(0)) * D + d
    tl.store(dbias_ptr + at, tl.sum(total, 0), mask=d < D)


@triton.jit
def layer_normal(
    r_ptr, weight_ptr, bias_ptr, y_ptr, moments_ptr, weight_member, rows, span, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `batch_normal`, with the moments of each row, [members, rows, 2], over its D ≤ BD columns."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BD)
    first = tl.program_id(0) * span
    weight = tl.load(weight_ptr + member * weight_member + d, mask=d < D, other=0.0)
    bias = tl.load(bias_ptr + member * weight_member + d, mask=d < D, other=0.0)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = member * rows * D + row[:, None] * D + d[None, :]
        r = tl.load(r_ptr + at, mask=here, other=0.0).to(tl.float32)
        mean = tl.sum(r, 1) / D
        away = tl.where(here, r - mean[:, None], 0.0)
        rate = tl.rsqrt(tl.sum(away * away, 1) / D + eps)
        tl.store(y_ptr + at, (away * rate[:, None] * weight[None, :] + bias[None, :]).to(y_ptr.dtype.element_ty), here)
        tl.store(moments_ptr + (member * rows + row) * 2, mean, mask=row < rows)
        tl.store(moments_ptr + (member * rows + row) * 2 + 1, rate, mask=row < rows)


@triton.jit
def layer_backward(
    dy_ptr, r_ptr, moments_ptr, weight_ptr, seed_ptr, beside_ptr, dr_ptr, da_ptr, sums_ptr, weight_member, rows, span,
    threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """As `batch_backward`, with a gradient of r itself beside; partial sums for bias, weight and the branch's bias,
    [members, runs, 3, D].
    """
    member = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BD)
    first = tl.program_id(0) * span
    seed = member_seed(seed_ptr, member)
    column_bits = hash_columns(seed, d)
    weight = tl.load(weight_ptr + member * weight_member + d, mask=d < D, other=0.0)
    once = tl.zeros((BR, BD), tl.float32)
    product = tl.zeros((BR, BD), tl.float32)
    total = tl.zeros((BR, BD), tl.float32)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = member * rows * D + row[:, None] * D + d[None, :]
        mean = tl.load(moments_ptr + (member * rows + row) * 2, mask=row < rows, other=0.0)
        rate = tl.load(moments_ptr + (member * rows + row) * 2 + 1, mask=row < rows, other=0.0)
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        normal = (tl.load(r_ptr + at, mask=here, other=0.0).to(tl.float32) - mean[:, None]) * rate[:, None]
        normal = tl.where(here, normal, 0.0)
        once += dy
        product += dy * normal
        dy *= weight[None, :]
        dr = (dy - tl.sum(dy, 1)[:, None] / D - normal * (tl.sum(dy * normal, 1)[:, None] / D)) * rate[:, None]
        if BESIDE:
            dr += tl.load(beside_ptr + at, mask=here, other=0.0).to(tl.float32)
        dr = tl.where(here, dr, 0.0)
        tl.store(dr_ptr + at, dr.to(dr_ptr.dtype.element_ty), mask=here)
        if DROPOUT:
            dr = drop(dr * boost, hash_rows(seed, row)[:, None], column_bits[None, :], threshold)
            tl.store(da_ptr + at, dr.to(da_ptr.dtype.element_ty), mask=here)
        total += dr
    at = (member * tl.num_programs(0) + tl.program_id(0)) * 3 * D + d
    tl.store(sums_ptr + at, tl.sum(once, 0), mask=d < D)
    tl.store(sums_ptr + at + D, tl.sum(product, 0), mask=d < D)
    tl.store(sums_ptr + at + 2 * D, tl.sum(total, 0), mask=d < D)
