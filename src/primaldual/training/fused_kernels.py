# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""What lies between the matrix products of a training step, as Triton kernels: one pass over memory each.

Activations are [members, rows, width], contiguous; a member's parameters lie `…_member` elements after those of the one
before. A program works on some columns of a run of `span` rows of one member; sums over rows come out as one partial
sum per run. Dropout is a hash of the place and a seed, so that the backward pass finds the mask again.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """A 32-bit hash."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _member_seed(seed_ptr, member):
    return _mix(tl.load(seed_ptr).to(tl.uint32) + member.to(tl.uint32) * 0x9E3779B1)


@triton.jit
def _dropped(x, seed, place, threshold, boost):
    """x with a share of its entries zero, the others larger by `boost`."""
    return tl.where(_mix(seed ^ (place.to(tl.uint32) * 0x9E3779B1)) >= threshold, x * boost, 0.0)


@triton.jit
def _normal(x, EXACT: tl.constexpr):
    """The normal distribution function and its density; where results are rounded to 16 bits, to 1e-7.

    That is formula 7.1.26 of Abramowitz and Stegun: one exponential serves both.
    """
    bell = tl.exp(-0.5 * x * x)
    if EXACT:
        below = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
    else:
        t = 1.0 / (1.0 + 0.2316418882 * tl.abs(x))
        tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        tail *= bell
        below = tl.where(x < 0.0, tail, 1.0 - tail)
    return below, bell * 0.3989422804014327


@triton.jit
def _gelu(x, EXACT: tl.constexpr):
    below, _ = _normal(x, EXACT)
    return x * below


@triton.jit
def _gelu_slope(x, EXACT: tl.constexpr):
    below, density = _normal(x, EXACT)
    return below + x * density


@triton.jit
def embed(
    x_ptr, bias_ptr, positions_ptr, seed_ptr, y_ptr, bias_member, positions_member, batch, length, factor, threshold,
    boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """y = dropout(factor · (x + bias) + position)."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    steps = tl.program_id(0) * BR + tl.arange(0, BR)
    here = (steps[:, None] < length) & (d[None, :] < D)
    start = member * batch * length * D
    seed = _member_seed(seed_ptr, member)
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    place = steps[:, None] * D + d[None, :]
    add = tl.load(positions_ptr + member * positions_member + place, mask=here, other=0.0).to(tl.float32)
    add += factor * bias[None, :]
    for _ in range(batch):
        y = factor * tl.load(x_ptr + start + place, mask=here, other=0.0).to(tl.float32) + add
        if DROPOUT:
            y = _dropped(y, seed, place, threshold, boost)
        tl.store(y_ptr + start + place, y.to(y_ptr.dtype.element_ty), mask=here)
        place += length * D


@triton.jit
def embed_backward(
    dy_ptr, seed_ptr, dx_ptr, dpositions_ptr, batch, length, factor, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dx, and the gradient of the positions, which is also that of the bias but for a sum and the factor."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    steps = tl.program_id(0) * BR + tl.arange(0, BR)
    here = (steps[:, None] < length) & (d[None, :] < D)
    start = member * batch * length * D
    seed = _member_seed(seed_ptr, member)
    place = steps[:, None] * D + d[None, :]
    total = tl.zeros((BR, BD), tl.float32)
    for _ in range(batch):
        dy = tl.load(dy_ptr + start + place, mask=here, other=0.0).to(tl.float32)
        if DROPOUT:
            dy = _dropped(dy, seed, place, threshold, boost)
        total += dy
        tl.store(dx_ptr + start + place, (dy * factor).to(dx_ptr.dtype.element_ty), mask=here)
        place += length * D
    at = member * length * D + steps[:, None] * D + d[None, :]
    tl.store(dpositions_ptr + at, total.to(dpositions_ptr.dtype.element_ty), mask=here)


@triton.jit
def activate(
    h_ptr, bias_ptr, seed_ptr, y_ptr, bias_member, rows, span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """y = dropout(gelu(h + bias))."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    seed = _member_seed(seed_ptr, member)
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    for start in range(first, tl.minimum(first + span, rows), BR):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        place = row[:, None] * D + d[None, :]
        h = tl.load(h_ptr + member * rows * D + place, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        y = _gelu(h, y_ptr.dtype.element_ty == tl.float32)
        if DROPOUT:
            y = _dropped(y, seed, place, threshold, boost)
        tl.store(y_ptr + member * rows * D + place, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def activate_backward(
    dy_ptr, h_ptr, bias_ptr, seed_ptr, dh_ptr, dbias_ptr, bias_member, rows, span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dh, and partial sums of it, [members, runs, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    seed = _member_seed(seed_ptr, member)
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.zeros((BR, BD), tl.float32)
    for start in range(first, tl.minimum(first + span, rows), BR):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        place = row[:, None] * D + d[None, :]
        dy = tl.load(dy_ptr + member * rows * D + place, mask=here, other=0.0).to(tl.float32)
        if DROPOUT:
            dy = _dropped(dy, seed, place, threshold, boost)
        h = tl.load(h_ptr + member * rows * D + place, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        dh = dy * _gelu_slope(h, dh_ptr.dtype.element_ty == tl.float32)
        total += dh
        tl.store(dh_ptr + member * rows * D + place, dh.to(dh_ptr.dtype.element_ty), mask=here)
    at = (member * tl.num_programs(0) + tl.program_id(0)) * D + d
    tl.store(dbias_ptr + at, tl.sum(total, 0), mask=d < D)


@triton.jit
def add(
    x_ptr, a_ptr, bias_ptr, seed_ptr, centre_ptr, r_ptr, sums_ptr, bias_member, rows, span, threshold, boost,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, DROPOUT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """r = x + dropout(a + bias); and partial sums of r − centre and its square, [members, runs, 2, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    seed = _member_seed(seed_ptr, member)
    bias = tl.load(bias_ptr + member * bias_member + d, mask=d < D, other=0.0).to(tl.float32)
    centre = tl.zeros((BD,), tl.float32)
    if SUMS:
        centre = tl.load(centre_ptr + member * D + d, mask=d < D, other=0.0)
    once = tl.zeros((BR, BD), tl.float32)
    twice = tl.zeros((BR, BD), tl.float32)
    for start in range(first, tl.minimum(first + span, rows), BR):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        place = row[:, None] * D + d[None, :]
        a = tl.load(a_ptr + member * rows * D + place, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        if DROPOUT:
            a = _dropped(a, seed, place, threshold, boost)
        r = (tl.load(x_ptr + member * rows * D + place, mask=here, other=0.0).to(tl.float32) + a).to(
            r_ptr.dtype.element_ty
        )
        tl.store(r_ptr + member * rows * D + place, r, mask=here)
        if SUMS:
            away = tl.where(here, r.to(tl.float32) - centre[None, :], 0.0)
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
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y = (r − mean) / deviation · weight + bias."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    mean = tl.load(moments_ptr + member * 2 * D + d, mask=d < D, other=0.0)
    scale = tl.load(moments_ptr + member * 2 * D + D + d, mask=d < D, other=0.0)
    scale *= tl.load(weight_ptr + member * weight_member + d, mask=d < D, other=0.0)
    bias = tl.load(bias_ptr + member * weight_member + d, mask=d < D, other=0.0)
    for start in range(first, tl.minimum(first + span, rows), BR):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = member * rows * D + row[:, None] * D + d[None, :]
        r = tl.load(r_ptr + at, mask=here, other=0.0).to(tl.float32)
        y = (r - mean[None, :]) * scale[None, :] + bias[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def batch_sums(dy_ptr, r_ptr, moments_ptr, sums_ptr, rows, span, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Partial sums of dy and of dy · (r − mean) / deviation, [members, runs, 2, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    mean = tl.load(moments_ptr + member * 2 * D + d, mask=d < D, other=0.0)
    scale = tl.load(moments_ptr + member * 2 * D + D + d, mask=d < D, other=0.0)
    once = tl.zeros((BR, BD), tl.float32)
    product = tl.zeros((BR, BD), tl.float32)
    for start in range(first, tl.minimum(first + span, rows), BR):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        at = member * rows * D + row[:, None] * D + d[None, :]
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
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dr of the sum that was normalised; da of the branch that was dropped out, and partial sums of it."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    first = tl.program_id(0) * span
    seed = _member_seed(seed_ptr, member)
    mean = tl.load(moments_ptr + member * 2 * D + d, mask=d < D, other=0.0)
    rate = tl.load(moments_ptr + member * 2 * D + D + d, mask=d < D, other=0.0)
    shift = tl.load(gradients_ptr + member * 2 * D + d, mask=d < D, other=0.0) / rows
    slope = tl.load(gradients_ptr + member * 2 * D + D + d, mask=d < D, other=0.0) / rows * rate
    scale = rate * tl.load(weight_ptr + member * weight_member + d, mask=d < D, other=0.0)
    total = tl.zeros((BR, BD), tl.float32)
    for start in range(first, tl.minimum(first + span, rows), BR):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        place = row[:, None] * D + d[None, :]
        at = member * rows * D + place
        dy = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + at, mask=here, other=0.0).to(tl.float32)
        dr = tl.where(here, (dy - shift[None, :] - (r - mean[None, :]) * slope[None, :]) * scale[None, :], 0.0)
        tl.store(dr_ptr + at, dr.to(dr_ptr.dtype.element_ty), mask=here)
        if DROPOUT:
            dr = _dropped(dr, seed, place, threshold, boost)
            tl.store(da_ptr + at, dr.to(da_ptr.dtype.element_ty), mask=here)
        total += dr
    at = (member * tl.num_programs(0) + tl.program_id(0)) * D + d
    tl.store(dbias_ptr + at, tl.sum(total, 0), mask=d < D)


@triton.jit
def layer_normal(
    r_ptr, weight_ptr, bias_ptr, y_ptr, moments_ptr, weight_member, rows, span, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """As `batch_normal`, with the moments of each row, [members, rows, 2], over its D ≤ BD columns."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BD)
    first = tl.program_id(0) * span
    weight = tl.load(weight_ptr + member * weight_member + d, mask=d < D, other=0.0)
    bias = tl.load(bias_ptr + member * weight_member + d, mask=d < D, other=0.0)
    for start in range(first, tl.minimum(first + span, rows), BR):
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
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """As `batch_backward`; partial sums for bias, weight and the branch's bias, [members, runs, 3, D]."""
    member = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BD)
    first = tl.program_id(0) * span
    seed = _member_seed(seed_ptr, member)
    weight = tl.load(weight_ptr + member * weight_member + d, mask=d < D, other=0.0)
    once = tl.zeros((BR, BD), tl.float32)
    product = tl.zeros((BR, BD), tl.float32)
    total = tl.zeros((BR, BD), tl.float32)
    for start in range(first, tl.minimum(first + span, rows), BR):
        row = start + tl.arange(0, BR)
        here = (row[:, None] < rows) & (d[None, :] < D)
        place = row[:, None] * D + d[None, :]
        at = member * rows * D + place
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
            dr = _dropped(dr, seed, place, threshold, boost)
            tl.store(da_ptr + at, dr.to(da_ptr.dtype.element_ty), mask=here)
        total += dr
    at = (member * tl.num_programs(0) + tl.program_id(0)) * 3 * D + d
    tl.store(sums_ptr + at, tl.sum(once, 0), mask=d < D)
    tl.store(sums_ptr + at + D, tl.sum(product, 0), mask=d < D)
    tl.store(sums_ptr + at + 2 * D, tl.sum(total, 0), mask=d < D)


@triton.jit
def _seen(z, case, cases, place, width, padding_ptr, member, length, D: tl.constexpr, HAS_PADDING: tl.constexpr):
    """z, and 0 where there is none: beyond the last case and column, and at padded steps."""
    here = (case[:, None] < cases) & (place[None, :] < width)
    if HAS_PADDING:
        at = padding_ptr + (member * cases + case[:, None]) * length + place[None, :] // D
        here = here & (tl.load(at, mask=here, other=1) == 0)
    return tl.where(here, z, 0.0)


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
    seed = _member_seed(seed_ptr, member)
    scores = tl.zeros((BC, BO), tl.float32)
    for start in range(first, tl.minimum(first + span, width), BK):
        place = start + tl.arange(0, BK)
        here = (case[:, None] < cases) & (place[None, :] < width)
        at = case[:, None].to(tl.int64) * width + place[None, :]
        z = tl.load(z_ptr + member * cases * width + at, mask=here, other=0.0).to(tl.float32)
        z = _gelu(z, z_ptr.dtype.element_ty == tl.float32)
        if DROPOUT:
            z = _dropped(z, seed, at, threshold, boost)
        z = _seen(z, case, cases, place, width, padding_ptr, member, length, D, HAS_PADDING)
        weight = tl.load(
            weight_ptr + member * weight_member + output[None, :] * width + place[:, None],
            mask=(output[None, :] < outputs) & (place[:, None] < width), other=0.0,
        )  # fmt: skip
        scores = tl.dot(z.to(weight.dtype), weight, scores, input_precision=PRECISION)
    at = ((member * tl.num_programs(0) + tl.program_id(0)) * cases + case[:, None]) * outputs + output[None, :]
    tl.store(parts_ptr + at, scores, mask=(case[:, None] < cases) & (output[None, :] < outputs))


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
    seed = _member_seed(seed_ptr, member)
    inside = (output[:, None] < outputs) & (place[None, :] < width)
    weight = tl.load(
        weight_ptr + member * weight_member + output[:, None] * width + place[None, :], mask=inside, other=0.0
    )
    dweight = tl.zeros((BO, BK), tl.float32)
    for start in range(0, cases, BC):
        case = start + tl.arange(0, BC)
        here = (case[:, None] < cases) & (place[None, :] < width)
        at = case[:, None].to(tl.int64) * width + place[None, :]
        z = tl.load(z_ptr + member * cases * width + at, mask=here, other=0.0).to(tl.float32)
        dscores = tl.load(
            dscores_ptr + (member * cases + case[:, None]) * outputs + output[None, :],
            mask=(case[:, None] < cases) & (output[None, :] < outputs), other=0.0,
        ).to(weight.dtype)  # fmt: skip
        below, density = _normal(z, z_ptr.dtype.element_ty == tl.float32)
        y = z * below
        dy = tl.dot(dscores, weight, input_precision=PRECISION)
        if DROPOUT:
            y = _dropped(y, seed, at, threshold, boost)
            dy = _dropped(dy, seed, at, threshold, boost)
        y = _seen(y, case, cases, place, width, padding_ptr, member, length, D, HAS_PADDING)
        dy = _seen(dy, case, cases, place, width, padding_ptr, member, length, D, HAS_PADDING)
        dweight = tl.dot(tl.trans(dscores), y.to(weight.dtype), dweight, input_precision=PRECISION)
        dz = dy * (below + z * density)
        tl.store(dz_ptr + member * cases * width + at, dz.to(dz_ptr.dtype.element_ty), mask=here)
    at = (member * outputs + output[:, None]) * width + place[None, :]
    tl.store(dweight_ptr + at, dweight.to(dweight_ptr.dtype.element_ty), mask=inside)


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
