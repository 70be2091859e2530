# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""What happens between a layer's projections and its attention, as Triton kernels: each is one pass, one launch.

Sums over tokens are taken in float32 and in a fixed order: a block of tokens leaves its sum, and whoever needs the
total adds the blocks up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..sums import sum_of_rows, window_size


@triton.jit
def _copied(
    from_ptr, share_ptr, to_ptr, add, from_row, to_row, d, start, end,
    D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, HAS_SHARE: tl.constexpr,
):  # fmt: skip
    """Copy the rows [start, end), plus their share of `add`; and the sum of what is copied."""
    total = tl.zeros((BN, BC), tl.float32)
    for first in range(start, end, BN):
        rows = first + tl.arange(0, BN)
        here = (rows[:, None] < end) & (d[None, :] < D)
        x = tl.load(from_ptr + rows[:, None] * from_row + d[None, :], mask=here, other=0.0).to(tl.float32)
        if HAS_SHARE:
            share = tl.load(share_ptr + rows, mask=rows < end, other=0.0)[:, None]
            x += share * add[None, :]
        else:
            x += add[None, :]
        x = tl.where(here, x, 0.0)
        tl.store(to_ptr + rows[:, None] * to_row + d[None, :], x.to(to_ptr.dtype.element_ty), mask=here)
        total += x
    return tl.sum(total, 0)


@triton.jit
def _over_chunks(sums_ptr, chunks, stride, d, D: tl.constexpr, BC: tl.constexpr):
    total = tl.zeros((BC,), tl.float32)
    for chunk in range(chunks):
        total += tl.load(sums_ptr + chunk * stride + d, mask=d < D, other=0.0)
    return total


@triton.jit
def _times_beta(x, beta_ptr, head, beta, LEARNED: tl.constexpr):
    """β x, where β is learned that of the head."""
    if LEARNED:
        return x * tl.load(beta_ptr + head).to(tl.float32)
    else:
        return x * beta


@triton.jit
def recentre(
    q_ptr, shift_ptr, batch_stride, head_stride, row_stride, H, N, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr
):
    """q −= shift, in place."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    here = (rows[:, None] < N) & (d[None, :] < D)
    at = q_ptr + batch * batch_stride + head * head_stride + rows[:, None] * row_stride + d[None, :]
    shift = tl.load(shift_ptr + (batch * H + head) * D + d, mask=d < D, other=0.0)
    q = tl.load(at, mask=here, other=0.0).to(tl.float32) - shift[None, :]
    tl.store(at, q.to(q_ptr.dtype.element_ty), mask=here)


@triton.jit
def assemble(
    dq_ptr, dk_ptr, dv_ptr, share_ptr, beta_ptr, out_ptr, sums_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, H, N, beta, chunk, chunks,
    D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, HAS_SHARE: tl.constexpr, LEARNED: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv side by side, the gradient of μ added to dk; and their sums over the tokens of every chunk."""
    piece = tl.program_id(0)
    head = tl.program_id(1) % H
    d = tl.program_id(1) // H * BC + tl.arange(0, BC)
    batch = tl.program_id(2).to(tl.int64)
    start = piece * chunk
    end = tl.minimum(start + chunk, N)
    E = H * D
    out_ptr += batch * N * 3 * E + head * D
    own = sums_ptr + (batch * chunks + piece) * 3 * E + head * D + d
    nothing = tl.zeros((BC,), tl.float32)
    if PHASE == 2:
        total = _over_chunks(sums_ptr + batch * chunks * 3 * E + head * D, chunks, 3 * E, d, D, BC)
    else:
        q_at = dq_ptr + batch * q_batch + head * q_head
        v_at = dv_ptr + batch * v_batch + head * v_head
        total = _copied(q_at, share_ptr, out_ptr, nothing, q_row, 3 * E, d, start, end, D, BN, BC, False)
        of_v = _copied(v_at, share_ptr, out_ptr + 2 * E, nothing, v_row, 3 * E, d, start, end, D, BN, BC, False)
        tl.store(own, total, mask=d < D)
        tl.store(own + 2 * E, of_v, mask=d < D)
    if PHASE != 1:
        dmean = _times_beta(-total, beta_ptr, head, beta, LEARNED)
        if not HAS_SHARE:
            dmean /= N
        of_k = _copied(
            dk_ptr + batch * k_batch + head * k_head, share_ptr + batch * N if HAS_SHARE else share_ptr, out_ptr + E,
            dmean, k_row, 3 * E, d, start, end, D, BN, BC, HAS_SHARE,
        )  # fmt: skip
        tl.store(own + E, of_k, mask=d < D)


@triton.jit
def columns(
    x_ptr, share_ptr, sums_ptr, x_part, x_batch, x_row, B, N, C, sums_batch,
    SCALE: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, HAS_SHARE: tl.constexpr,
):  # fmt: skip
    """Σ_n x_n over every block of BN rows, [parts, B, N, C] to [parts, B, blocks, C]; weighed by a share of each row.

    With SCALE > 1 that share is 1 / (tokens of n's window), so that the sum is the one of the windows' means.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    batch = (tl.program_id(2) % B).to(tl.int64)
    x_ptr += tl.program_id(2) // B * x_part.to(tl.int64)
    here = (n[:, None] < N) & (c[None, :] < C)
    x = tl.load(x_ptr + batch * x_batch + n[:, None] * x_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    if HAS_SHARE:
        share = tl.load(share_ptr + batch * N + n, mask=n < N, other=0.0)[:, None]
        x = tl.where(share > 0, x * share, 0.0)  # a padded token may hold anything
    if SCALE > 1:
        x *= (1.0 / window_size(n // SCALE * SCALE, N, SCALE).to(tl.float32))[:, None]
    tl.store(sums_ptr + tl.program_id(2).to(tl.int64) * sums_batch + tl.program_id(0) * C + c, tl.sum(x, 0), mask=c < C)


@triton.jit
def total(sums_ptr, out_ptr, R, C, BR: tl.constexpr, BC: tl.constexpr):
    """The sum of R rows of C columns."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    found = sum_of_rows(sums_ptr, 0, R, C, c, C, BC, BR)
    tl.store(out_ptr + c, found.to(out_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _tokens(at, t, first, here, N, E):
    """Token t of every window, where there is one."""
    return tl.load(at + t * E, mask=here & (first + t < N)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _means(x_ptr, out_ptr, block, c, N, E, SCALE: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):
    """Means over the windows that begin in a block of BN tokens, put in their place; and their sum."""
    BW: tl.constexpr = triton.next_power_of_2((BN + SCALE - 1) // SCALE)
    window = tl.cdiv(block * BN, SCALE) + tl.arange(0, BW)
    first = window * SCALE
    here = (first < tl.minimum((block + 1) * BN, N))[:, None] & (c[None, :] < E)
    at = x_ptr + first[:, None] * E + c[None, :]
    mean = tl.zeros((BW, BC), tl.float32)
    if SCALE <= 16:
        for t in tl.static_range(SCALE):
            mean += _tokens(at, t, first, here, N, E)
    else:
        for t in range(SCALE):
            mean += _tokens(at, t, first, here, N, E)
    mean *= (1.0 / window_size(first, N, SCALE).to(tl.float32))[:, None]
    if SCALE > 1:
        tl.store(out_ptr + window[:, None] * E + c[None, :], mean.to(out_ptr.dtype.element_ty), mask=here)
    return tl.sum(mean, 0)


@triton.jit
def pool(
    x_ptr, out_ptr, sums_ptr, N, E,
    SCALES: tl.constexpr, SUMS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Means over windows of so many tokens, the last one may be shorter: [B, N, E] to [B, W, E] of every scale but 1.

    Of the last SUMS scales their sums over every block, [B, SUMS, blocks, E], too. A block's tokens are read again for
    every scale: they are near by then.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    batch, B = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    x_ptr += batch * N * E
    for g in tl.static_range(len(SCALES)):
        if SCALES[g] > 1 or g >= len(SCALES) - SUMS:
            W = tl.cdiv(N, SCALES[g])
            total = _means(x_ptr, out_ptr + batch * W * E, block, c, N, E, SCALES[g], BN, BC)
            if SCALES[g] > 1:
                out_ptr += B.to(tl.int64) * W * E
            if g >= len(SCALES) - SUMS:
                number = batch * SUMS + g - (len(SCALES) - SUMS)
                tl.store(sums_ptr + (number * blocks + block) * E + c, total, mask=c < E)


@triton.jit
def shift(
    sums_ptr, weight_ptr, bias_ptr, beta_ptr, seen_ptr, table_ptr, mean_ptr, shift_ptr, H, E, G, blocks, beta,
    D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, HAS_BIAS: tl.constexpr,
    LEARNED: tl.constexpr, HAS_SEEN: tl.constexpr,
):  # fmt: skip
    """μ = W_K · (mean of the head's inputs) + b_K, and β μ. Table: where each head's sums are, and how many points."""
    pieces: tl.constexpr = (D + BD - 1) // BD
    head = tl.program_id(0) // pieces
    batch = tl.program_id(1).to(tl.int64)
    group = tl.load(table_ptr + head * 2)
    points = tl.load(table_ptr + head * 2 + 1)
    d = tl.program_id(0) % pieces * BD + tl.arange(0, BD)
    mean = tl.zeros((BD,), tl.float32)
    sums_ptr += (batch * G + group) * blocks * E
    weight_ptr += head * D * E
    for first in range(0, E, BE):
        e = first + tl.arange(0, BE)
        inputs = sum_of_rows(sums_ptr, 0, blocks, E, e, E, BE, BB)
        weight = tl.load(
            weight_ptr + d[:, None] * E + e[None, :], mask=(d[:, None] < D) & (e[None, :] < E), other=0.0
        ).to(tl.float32)
        mean += tl.sum(weight * inputs[None, :], 1)
    mean /= points.to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + head * D + d, mask=d < D, other=0.0).to(tl.float32)
        if HAS_SEEN:
            bias *= tl.load(seen_ptr + batch)
        mean += bias
    at = (batch * H + head) * D + d
    tl.store(mean_ptr + at, mean, mask=d < D)
    mean = _times_beta(mean, beta_ptr, head, beta, LEARNED)
    tl.store(shift_ptr + at, mean, mask=d < D)


@triton.jit
def finish(
    grad_ptr, dq_ptr, beta_ptr, sums_ptr, table_ptr, H, of_queries, beta,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, RECENTRED: tl.constexpr,
    LEARNED: tl.constexpr,
):  # fmt: skip
    """A head's share in the gradient of μ, −β Σ_i dq_i, added to that of its keys in place; and sums of its values'.

    Table: of each head its number and points, where its keys and values are, and strides. dq_ptr: Σ_i dq_i in so many
    blocks.
    """
    block = tl.program_id(0)
    side = tl.program_id(1) // H  # 0: keys, 1: values
    batch = tl.program_id(2).to(tl.int64)
    table_ptr += tl.program_id(1) % H * 6
    head = tl.load(table_ptr)
    points = tl.load(table_ptr + 1)
    rows = block * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    here = (rows[:, None] < points) & (d[None, :] < D)
    at = grad_ptr + (tl.load(table_ptr + 2 + side) + batch * tl.load(table_ptr + 4)) * D
    at += rows[:, None] * (tl.load(table_ptr + 5) * D) + d[None, :]
    if side == 1:
        total = tl.sum(tl.load(at, mask=here, other=0.0).to(tl.float32), 0)
        tl.store(sums_ptr + (batch * tl.num_programs(0) + block) * H * D + head * D + d, total, mask=d < D)
    elif RECENTRED and block * BN < points:
        share = sum_of_rows(dq_ptr + batch * of_queries * H * D + head * D, 0, of_queries, H * D, d, D, BD, BB) / points
        share = _times_beta(share, beta_ptr, head, beta, LEARNED)
        grad = tl.load(at, mask=here, other=0.0).to(tl.float32) - share[None, :]
        tl.store(at, grad.to(grad_ptr.dtype.element_ty), mask=here)


@triton.jit
def spread(
    dk_ptr, dq_ptr, beta_ptr, table_ptr, N, E, blocks, dk_batch, dk_row, beta,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """dk_i −= (share of i in μ) · β Σ_n dq_n, in place: what goes through μ.

    Every window has one vote in μ. Table: scale and windows of each head. dq_ptr: Σ_n dq_n in so many blocks.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BD)
    scale = tl.load(table_ptr + head * 2).to(tl.int32)
    windows = tl.load(table_ptr + head * 2 + 1).to(tl.float32)
    total = sum_of_rows(dq_ptr + batch * blocks * E + head * D, 0, blocks, E, d, D, BD, BB)
    total = _times_beta(total, beta_ptr, head, beta, LEARNED)
    size = window_size(n // scale * scale, N, scale).to(tl.float32)
    here = (n[:, None] < N) & (d[None, :] < D)
    at = dk_ptr + batch * dk_batch + n[:, None] * dk_row + head * D + d[None, :]
    dk = tl.load(at, mask=here, other=0.0).to(tl.float32) - (1.0 / (windows * size))[:, None] * total[None, :]
    tl.store(at, dk.to(dk_ptr.dtype.element_ty), mask=here)


@triton.jit
def biases(
    dq_ptr, dv_ptr, beta_ptr, out_ptr, RQ, RV, E, beta,
    D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """Gradients of b_Q, b_K and b_V from sums of dq and dv.

    What is added to all keys of a softmax head cancels, so that b_K acts through μ alone: db_K = −β db_Q.
    """
    part = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    if part == 2:
        found = sum_of_rows(dv_ptr, 0, RV, E, c, E, BC, BR)
    else:
        found = sum_of_rows(dq_ptr, 0, RQ, E, c, E, BC, BR)
        if part == 1:
            if LEARNED:
                found *= -tl.load(beta_ptr + c // D, mask=c < E, other=0.0).to(tl.float32)
            else:
                found *= -beta
    tl.store(out_ptr + part * E + c, found.to(out_ptr.dtype.element_ty), mask=c < E)


@triton.jit
def unpool(dx_ptr, points_ptr, table_ptr, N, E, G: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):
    """dx_i = Σ over the groups of the gradient of i's window, divided by the window's size.

    Table: scale, windows and first point of each group.
    """
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    batch = tl.program_id(2).to(tl.int64)
    here = (rows[:, None] < N) & (c[None, :] < E)
    at = dx_ptr + batch * N * E + rows[:, None] * E + c[None, :]
    total = tl.zeros((BN, BC), tl.float32)
    for group in tl.static_range(G):
        scale = tl.load(table_ptr + group * 3).to(tl.int32)
        windows = tl.load(table_ptr + group * 3 + 1)
        offset = tl.load(table_ptr + group * 3 + 2)
        window = rows // scale
        share = 1.0 / window_size(window * scale, N, scale).to(tl.float32)
        point = points_ptr + (offset + batch * windows) * E + window[:, None] * E + c[None, :]
        total += tl.load(point, mask=here, other=0.0).to(tl.float32) * share[:, None]
    tl.store(at, total.to(dx_ptr.dtype.element_ty), mask=here)
