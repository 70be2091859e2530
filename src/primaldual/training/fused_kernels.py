# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""What lies between the matrix products of a training step, as Triton kernels: one pass over memory each.

Activations are [members, rows, width], contiguous; a member's parameters lie `…_member` elements after those of the one
before. A program works on some columns of a run of `span` rows of one member; sums over rows come out as one partial
sum per run. Dropout is a hash of row, column and a seed, so that the backward pass finds the mask again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..ops.kernel_dropout import COMPILED, drop, mix


@triton.jit
def _member_seed(seed_ptr, member):
    return mix(tl.load(seed_ptr).to(tl.uint32) + member.to(tl.uint32) * 0x9E3779B1)


@triton.jit
def _row_bits(seed, row):
    return mix(seed + row.to(tl.uint32) * 0x9E3779B1) | 1


@triton.jit
def _column_bits(seed, column):
    return mix((seed ^ 0x9E3779B9) + column.to(tl.uint32) * 0x85EBCA77) | 1


@triton.jit
def _drop_both(x, y, row_bits, column_bits, threshold):
    """As `drop`, of two. They have one layout then, and what they have in common is computed once."""
    threshold = threshold.to(tl.uint32)
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred kept;
            .reg .u32 bits;
            mul.lo.u32 bits, $4, $5;
            setp.ge.u32 kept, bits, $6;
            selp.f32 $0, $2, 0f00000000, kept;
            selp.f32 $1, $3, 0f00000000, kept;
            }""",
            "=r,=r,r,r,r,r,r", [x, y, row_bits, column_bits, threshold], dtype=(tl.float32, tl.float32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        kept = row_bits * column_bits >= threshold
        return tl.where(kept, x, 0.0), tl.where(kept, y, 0.0)


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
def _normal(x, EXACT: tl.constexpr):
    """The normal distribution function and its density; EXACT is for results that are not rounded to 16 bits."""
    if EXACT:
        below = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
    else:
        tail = _tail(x)
        below = tl.where(x < 0.0, tail, 1.0 - tail)
    return below, _power_of_2(-0.7213475204444817 * x * x - 1.3257480647361593)


@triton.jit
def _gelu(x, EXACT: tl.constexpr):
    if EXACT:
        below, _ = _normal(x, EXACT)
        return x * below
    else:
        return tl.maximum(x, 0.0) - tl.abs(x) * _tail(x)


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
    seed = _member_seed(seed_ptr, member)
    column_bits = _column_bits(seed, d)
    for case in tl.range(0, batch, num_stages=STAGES):
        at = case * length * D + place
        y = factor * tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32) + add
        if DROPOUT:
            y = drop(y, _row_bits(seed, case * length + steps)[:, None], column_bits[None, :], threshold)
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
    seed = _member_seed(seed_ptr, member)
    column_bits = _column_bits(seed, d)
    for case in tl.range(0, batch, num_stages=STAGES):
        at = case * length * D + place
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        if DROPOUT:
            dy = drop(dy, _row_bits(seed, case * length + steps)[:, None], column_bits[None, :], threshold)
        total += dy
        tl.store(dx_ptr + at, (dy * factor).to(dx_ptr.dtype.element_ty), mask=here)
    total *= boost
    tl.store(dpositions_ptr + member * length * D + place, total.to(dpositions_ptr.dtype.element_ty), mask=here)


@triton.jit
def activate(
    h_ptr, bias_ptr, seed_ptr, y_ptr, bias_member, rows, span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """y = dropout(gelu(h + bias))."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    h_ptr += member * rows * D
    y_ptr += member * rows * D
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    seed = _member_seed(seed_ptr, member)
    column_bits = _column_bits(seed, d)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = row[:, None] * D + d[None, :]
        h = tl.load(h_ptr + at, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        y = _gelu(h, y_ptr.dtype.element_ty == tl.float32)
        if DROPOUT:
            y = drop(y * boost, _row_bits(seed, row)[:, None], column_bits[None, :], threshold)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def activate_backward(
    dy_ptr, h_ptr, bias_ptr, seed_ptr, dh_ptr, dbias_ptr, bias_member, rows, span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dh, and partial sums of it, [members, runs, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    dy_ptr += member * rows * D
    h_ptr += member * rows * D
    dh_ptr += member * rows * D
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.zeros((BR, BD), tl.float32)
    seed = _member_seed(seed_ptr, member)
    column_bits = _column_bits(seed, d)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = row[:, None] * D + d[None, :]
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + at, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        below, density = _normal(h, dh_ptr.dtype.element_ty == tl.float32)
        dh = dy * (below + h * density)
        if DROPOUT:
            dh = drop(dh * boost, _row_bits(seed, row)[:, None], column_bits[None, :], threshold)
        total += dh
        tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=here)
    at = (member * tl.num_programs(0) + tl.program_id(0)) * D + d
    tl.store(dbias_ptr + at, tl.sum(total, 0), mask=d < D)


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
    seed = _member_seed(seed_ptr, member)
    column_bits = _column_bits(seed, d)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = row[:, None] * D + d[None, :]
        a = tl.load(a_ptr + at, mask=here, other=0.0).to(tl.float32) * boost + bias[None, :]
        if DROPOUT:
            a = drop(a, _row_bits(seed, row)[:, None], column_bits[None, :], threshold)
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
def _column_sums(pointer, runs, step, d, D, BD: tl.constexpr, BP: tl.constexpr):
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
    total = _column_sums(x_ptr + member * runs * width, runs, width, d, width, BD, BP)
    tl.store(y_ptr + member * width + d, total.to(y_ptr.dtype.element_ty), mask=d < width)


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
    once = _column_sums(sums_ptr, runs, 2 * D, d, D, BD, BP) / rows
    twice = _column_sums(sums_ptr + D, runs, 2 * D, d, D, BD, BP) / rows
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
def batch_gradients(sums_ptr, gradients_ptr, runs, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr):
    """Of bias and weight, [members, 2, D]: the partial sums, added."""
    member = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    sums_ptr += member * runs * 2 * D
    gradients_ptr += member * 2 * D
    tl.store(gradients_ptr + d, _column_sums(sums_ptr, runs, 2 * D, d, D, BD, BP), mask=d < D)
    tl.store(gradients_ptr + D + d, _column_sums(sums_ptr + D, runs, 2 * D, d, D, BD, BP), mask=d < D)


@triton.jit
def batch_backward(
    dy_ptr, r_ptr, moments_ptr, gradients_ptr, weight_ptr, seed_ptr, dr_ptr, da_ptr, dbias_ptr, weight_member, rows,
    span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dr of the sum that was normalised; da of the branch that was dropped out, and partial sums of it."""
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
    seed = _member_seed(seed_ptr, member)
    column_bits = _column_bits(seed, d)
    for start in tl.range(first, tl.minimum(first + span, rows), BR, num_stages=STAGES):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = row[:, None] * D + d[None, :]
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + at, mask=here, other=0.0).to(tl.float32)
        dr = dy * scale[None, :] - shift[None, :] - (r - mean[None, :]) * slope[None, :]
        tl.store(dr_ptr + at, dr.to(dr_ptr.dtype.element_ty), mask=here)
        if DROPOUT:
            dr = drop(dr * boost, _row_bits(seed, row)[:, None], column_bits[None, :], threshold)
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
    dy_ptr, r_ptr, moments_ptr, weight_ptr, seed_ptr, dr_ptr, da_ptr, sums_ptr, weight_member, rows, span, threshold,
    boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """As `batch_backward`; partial sums for bias, weight and the branch's bias, [members, runs, 3, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BD)
    first = tl.program_id(0) * span
    seed = _member_seed(seed_ptr, member)
    column_bits = _column_bits(seed, d)
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
        dr = tl.where(here, dr, 0.0)
        tl.store(dr_ptr + at, dr.to(dr_ptr.dtype.element_ty), mask=here)
        if DROPOUT:
            dr = drop(dr * boost, _row_bits(seed, row)[:, None], column_bits[None, :], threshold)
            tl.store(da_ptr + at, dr.to(da_ptr.dtype.element_ty), mask=here)
        total += dr
    at = (member * tl.num_programs(0) + tl.program_id(0)) * 3 * D + d
    tl.store(sums_ptr + at, tl.sum(once, 0), mask=d < D)
    tl.store(sums_ptr + at + D, tl.sum(product, 0), mask=d < D)
    tl.store(sums_ptr + at + 2 * D, tl.sum(total, 0), mask=d < D)


@triton.jit
def _padded(padding_ptr, case, place, here, length, D: tl.constexpr):
    return tl.load(padding_ptr + case[:, None] * length + place[None, :] // D, mask=here, other=1) != 0


@triton.jit
def head(
    z_ptr, weight_ptr, padding_ptr, seed_ptr, parts_ptr, weight_member, cases, length, outputs, span, threshold, boost,
    D: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of dropout(gelu(z)), 0 at padded steps: [members, runs, cases, outputs], each of a run of the columns."""
    member = tl.program_id(2).to(tl.int64)
    case = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * span
    width = length * D
    output = tl.arange(0, BO)
    z_ptr += member * cases * width
    weight_ptr += member * weight_member
    seed = _member_seed(seed_ptr, member)
    row_bits = _row_bits(seed, case)
    scores = tl.zeros((BC, BO), tl.float32)
    for start in range(first, tl.minimum(first + span, width), BK):
        place = start + tl.arange(0, BK)
        here = (case[:, None] < cases) & (place[None, :] < width)
        z = tl.load(z_ptr + case[:, None].to(tl.int64) * width + place[None, :], mask=here, other=0.0).to(tl.float32)
        if HAS_PADDING:
            z = tl.where(_padded(padding_ptr + member * cases * length, case, place, here, length, D), 0.0, z)
        z = _gelu(z, z_ptr.dtype.element_ty == tl.float32)
        if DROPOUT:
            z = drop(z, row_bits[:, None], _column_bits(seed, place)[None, :], threshold)
        weight = tl.load(
            weight_ptr + output[None, :] * width + place[:, None],
            mask=(output[None, :] < outputs) & (place[:, None] < width), other=0.0,
        )  # fmt: skip
        scores = tl.dot(z.to(weight.dtype), weight, scores, input_precision=PRECISION)
    at = ((member * tl.num_programs(0) + tl.program_id(0)) * cases + case[:, None]) * outputs + output[None, :]
    tl.store(parts_ptr + at, scores * boost, mask=(case[:, None] < cases) & (output[None, :] < outputs))


@triton.jit
def head_backward(
    z_ptr, weight_ptr, padding_ptr, seed_ptr, dscores_ptr, dz_ptr, dweight_ptr, weight_member, cases, length, outputs,
    threshold, boost,
    D: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz, and the weight's gradient [members, outputs, length · D], of some columns."""
    member = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BK + tl.arange(0, BK)
    width = length * D
    output = tl.arange(0, BO)
    z_ptr += member * cases * width
    dz_ptr += member * cases * width
    seed = _member_seed(seed_ptr, member)
    column_bits = _column_bits(seed, place)
    inside = (output[:, None] < outputs) & (place[None, :] < width)
    weight = tl.load(
        weight_ptr + member * weight_member + output[:, None] * width + place[None, :], mask=inside, other=0.0
    )
    dweight = tl.zeros((BO, BK), tl.float32)
    for start in range(0, cases, BC):
        case = start + tl.arange(0, BC)
        here = (case[:, None] < cases) & (place[None, :] < width)
        at = case[:, None].to(tl.int64) * width + place[None, :]
        z = tl.load(z_ptr + at, mask=here, other=0.0).to(tl.float32)
        dscores = tl.load(
            dscores_ptr + (member * cases + case[:, None]) * outputs + output[None, :],
            mask=(case[:, None] < cases) & (output[None, :] < outputs), other=0.0,
        ).to(weight.dtype)  # fmt: skip
        below, density = _normal(z, z_ptr.dtype.element_ty == tl.float32)
        y = z * below
        dz = tl.dot(dscores, weight, input_precision=PRECISION) * ((below + z * density) * boost)
        if DROPOUT:
            y, dz = _drop_both(y, dz, _row_bits(seed, case)[:, None], column_bits[None, :], threshold)
        if HAS_PADDING:
            padded = _padded(padding_ptr + member * cases * length, case, place, here, length, D)
            y = tl.where(padded, 0.0, y)
            dz = tl.where(padded, 0.0, dz)
        dweight = tl.dot(tl.trans(dscores), y.to(weight.dtype), dweight, input_precision=PRECISION)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=here)
    at = (member * outputs + output[:, None]) * width + place[None, :]
    tl.store(dweight_ptr + at, (dweight * boost).to(dweight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def update(
    matrix_ptr, gradient_ptr, mean_ptr, square_ptr, rough_ptr, norm_ptr, alive_ptr, table_ptr, done_ptr, count, exact,
    steps, clip, first, second,
    BLOCK: tl.constexpr, HAS_ROUGH: tl.constexpr,
):  # fmt: skip
    """A step of RAdam or Adam on a gradient cut to a norm, and none for who is not alive; and the working copy."""
    member = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = column < count
    at = member * count + column
    row = table_ptr + tl.minimum(tl.load(done_ptr), steps - 1) * 3
    factor = tl.minimum(clip / (tl.load(norm_ptr + member) + 1e-6), 1.0)
    alive = tl.load(alive_ptr + member) != 0
    gradient = tl.where(alive, tl.load(gradient_ptr + at, mask=here, other=0.0) * factor, 0.0)
    mean = tl.load(mean_ptr + at, mask=here, other=0.0)
    square = tl.load(square_ptr + at, mask=here, other=0.0)
    mean += (gradient - mean) * first
    square += (gradient * gradient - square) * second
    x = tl.load(matrix_ptr + at, mask=here, other=0.0)
    x -= mean * tl.load(row) / (tl.sqrt(square) * tl.load(row + 1) + tl.load(row + 2))
    tl.store(mean_ptr + at, mean, mask=here)
    tl.store(square_ptr + at, square, mask=here)
    tl.store(matrix_ptr + at, x, mask=here)
    if HAS_ROUGH:
        at = member * (count - exact) + column - exact
        tl.store(rough_ptr + at, x.to(rough_ptr.dtype.element_ty), mask=here & (column >= exact))
