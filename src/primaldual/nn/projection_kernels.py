# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""What happens between a layer's projections and its attention, as Triton kernels: each is one pass, one launch.

Sums over tokens are taken in float32 and in a fixed order: a block of tokens leaves its sum, and whoever needs the
total adds the blocks up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _column_sums(
    from_ptr, share_ptr, to_ptr, add, from_row, to_row, d, start, end,
    D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, HAS_SHARE: tl.constexpr, WEIGH: tl.constexpr,
    COPY: tl.constexpr,
):  # fmt: skip
    """Σ_n x_n over the rows [start, end), weighed by their share (WEIGH), or copied, plus share · add, on the way."""
    total = tl.zeros((BN, BC), tl.float32)
    for first in range(start, end, BN):
        rows = first + tl.arange(0, BN)
        here = (rows[:, None] < end) & (d[None, :] < D)
        x = tl.load(from_ptr + rows[:, None] * from_row + d[None, :], mask=here, other=0.0).to(tl.float32)
        if HAS_SHARE:
            share = tl.load(share_ptr + rows, mask=rows < end, other=0.0)[:, None]
        if WEIGH and HAS_SHARE:
            x = tl.where(share > 0, x * share, 0.0)  # a padded token may hold anything
        if COPY:
            if HAS_SHARE:
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
def recentre(
    q_ptr, k_ptr, share_ptr, beta_ptr, sums_ptr, mean_ptr, batch_stride, head_stride, row_stride, H, N, beta, chunk,
    chunks,
    D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, HAS_SHARE: tl.constexpr, LEARNED: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """q −= β μ in place, μ the mean of the keys. PHASE 0 does it all; 1 leaves sums of chunks, 2 does the rest."""
    piece = tl.program_id(0)
    head = tl.program_id(1) % H
    d = tl.program_id(1) // H * BC + tl.arange(0, BC)
    batch = tl.program_id(2).to(tl.int64)
    start = piece * chunk
    end = tl.minimum(start + chunk, N)
    base = batch * batch_stride + head * head_stride
    nothing = tl.zeros((BC,), tl.float32)
    if PHASE == 2:
        mean = _over_chunks(sums_ptr + (batch * chunks * H + head) * D, chunks, H * D, d, D, BC)
    else:
        mean = _column_sums(
            k_ptr + base, share_ptr + batch * N if HAS_SHARE else share_ptr, k_ptr, nothing, row_stride, 0, d, start,
            end, D, BN, BC, HAS_SHARE, True, False,
        )  # fmt: skip
        if not HAS_SHARE:
            mean /= N
    if PHASE == 1:
        tl.store(sums_ptr + ((batch * chunks + piece) * H + head) * D + d, mean, mask=d < D)
    else:
        if piece == 0:
            tl.store(mean_ptr + (batch * H + head) * D + d, mean, mask=d < D)
        if LEARNED:
            shift = mean * tl.load(beta_ptr + head).to(tl.float32)
        else:
            shift = mean * beta
        for first in range(start, end, BN):
            rows = first + tl.arange(0, BN)
            here = (rows[:, None] < end) & (d[None, :] < D)
            at = q_ptr + base + rows[:, None] * row_stride + d[None, :]
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
        total = _column_sums(
            q_at, share_ptr, out_ptr, nothing, q_row, 3 * E, d, start, end, D, BN, BC, False, False, True
        )
        of_v = _column_sums(
            v_at, share_ptr, out_ptr + 2 * E, nothing, v_row, 3 * E, d, start, end, D, BN, BC, False, False, True
        )
        tl.store(own, total, mask=d < D)
        tl.store(own + 2 * E, of_v, mask=d < D)
    if PHASE != 1:
        if LEARNED:
            dmean = -total * tl.load(beta_ptr + head).to(tl.float32)
        else:
            dmean = -total * beta
        if not HAS_SHARE:
            dmean /= N
        of_k = _column_sums(
            dk_ptr + batch * k_batch + head * k_head, share_ptr + batch * N if HAS_SHARE else share_ptr, out_ptr + E,
            dmean, k_row, 3 * E, d, start, end, D, BN, BC, HAS_SHARE, False, True,
        )  # fmt: skip
        tl.store(own + E, of_k, mask=d < D)


@triton.jit
def total(sums_ptr, out_ptr, R, C, BR: tl.constexpr, BC: tl.constexpr):
    """The sum of R rows of C columns."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    found = tl.zeros((BR, BC), tl.float32)
    for first in range(0, R, BR):
        rows = first + tl.arange(0, BR)
        here = (rows[:, None] < R) & (c[None, :] < C)
        found += tl.load(sums_ptr + rows[:, None] * C + c[None, :], mask=here, other=0.0)
    tl.store(out_ptr + c, tl.sum(found, 0).to(out_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def pool(
    x_ptr, out_ptr, sums_ptr, table_ptr, N, E, G, blocks, rows_of_block,
    BW: tl.constexpr, BC: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """The means over each group's windows, and for every block of windows the sum of its means.

    The scale is the fastest index, so that the groups read the same tokens at the same time. Table: scale, windows,
    first row of the points (−1: the tokens are the points).
    """
    group = tl.program_id(0)
    columns = tl.cdiv(E, BC)
    block = tl.program_id(1) // columns
    c = tl.program_id(1) % columns * BC + tl.arange(0, BC)
    batch = tl.program_id(2).to(tl.int64)
    scale = tl.load(table_ptr + group * 3).to(tl.int32)
    windows = tl.load(table_ptr + group * 3 + 1).to(tl.int32)
    offset = tl.load(table_ptr + group * 3 + 2)
    own = tl.maximum(rows_of_block // scale, 1)
    place = tl.arange(0, BW)
    window = block * own + place
    here = (place < own) & (window < windows)
    x_ptr += batch * N * E
    mean = tl.zeros((BW, BC), tl.float32)
    for t in range(scale):
        rows = window * scale + t
        take = (here & (rows < N))[:, None] & (c[None, :] < E)
        mean += tl.load(x_ptr + rows[:, None] * E + c[None, :], mask=take, other=0.0).to(tl.float32)
    mean /= tl.maximum(tl.minimum(N - window * scale, scale), 1).to(tl.float32)[:, None]
    stored = (here & (offset >= 0))[:, None] & (c[None, :] < E)
    at = out_ptr + (offset + batch * windows + window)[:, None] * E + c[None, :]
    tl.store(at, mean.to(out_ptr.dtype.element_ty), mask=stored)
    if HAS_SUMS:
        tl.store(sums_ptr + ((batch * G + group) * blocks + block) * E + c, tl.sum(mean, 0), mask=c < E)


@triton.jit
def shift(
    sums_ptr, weight_ptr, bias_ptr, beta_ptr, table_ptr, mean_ptr, shift_ptr, H, E, G, blocks, beta,
    D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, HAS_BIAS: tl.constexpr,
    LEARNED: tl.constexpr,
):  # fmt: skip
    """μ = W_K · (mean of the head's pooled inputs) + b_K, and β μ. Table: group and windows of each head."""
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    group = tl.load(table_ptr + head * 2)
    windows = tl.load(table_ptr + head * 2 + 1)
    d = tl.arange(0, BD)
    mean = tl.zeros((BD,), tl.float32)
    sums_ptr += (batch * G + group) * blocks * E
    weight_ptr += head * D * E
    for first in range(0, E, BE):
        e = first + tl.arange(0, BE)
        inputs = tl.zeros((BB, BE), tl.float32)
        for block in range(0, blocks, BB):
            b = block + tl.arange(0, BB)
            there = (b[:, None] < blocks) & (e[None, :] < E)
            inputs += tl.load(sums_ptr + b[:, None] * E + e[None, :], mask=there, other=0.0)
        weight = tl.load(
            weight_ptr + d[:, None] * E + e[None, :], mask=(d[:, None] < D) & (e[None, :] < E), other=0.0
        ).to(tl.float32)
        mean += tl.sum(weight * tl.sum(inputs, 0)[None, :], 1)
    mean /= windows.to(tl.float32)
    if HAS_BIAS:
        mean += tl.load(bias_ptr + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    at = (batch * H + head) * D + d
    tl.store(mean_ptr + at, mean, mask=d < D)
    if LEARNED:
        mean *= tl.load(beta_ptr + head).to(tl.float32)
    else:
        mean *= beta
    tl.store(shift_ptr + at, mean, mask=d < D)


@triton.jit
def finish(
    grad_ptr, dshift_ptr, beta_ptr, sums_ptr, table_ptr, order_ptr, E, blocks, beta,
    D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, HAS_SHIFT: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """The gradient of μ added to those of a group's keys, in place; and sums over its points, one per block.

    Table: windows, offset and width of a group's rows, and its first column in the order of all.
    """
    block = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    row = table_ptr + tl.program_id(1) * 4
    windows = tl.load(row).to(tl.int32)
    width = tl.load(row + 2).to(tl.int32)
    grad_ptr += tl.load(row + 1) + batch * windows * width
    order_ptr += tl.load(row + 3)
    sums_ptr += (batch * blocks + block) * 2 * E
    rows = block * BN + tl.arange(0, BN)
    for first in range(0, width, BC):
        c = first + tl.arange(0, BC)
        natural = tl.load(order_ptr + c, mask=c < width, other=0)  # keys are the first E, values the others
        at = grad_ptr + rows[:, None] * width + c[None, :]
        here = (rows[:, None] < windows) & (c[None, :] < width)
        grad = tl.load(at, mask=here, other=0.0).to(tl.float32)
        if HAS_SHIFT:
            key = (c < width) & (natural < E)
            add = tl.load(dshift_ptr + batch * E + natural, mask=key, other=0.0) / windows.to(tl.float32)
            if LEARNED:
                add *= tl.load(beta_ptr + natural // D, mask=key, other=0.0).to(tl.float32)
            else:
                add *= beta
            grad = tl.where(here, grad + add[None, :], 0.0)
            tl.store(at, grad.to(grad_ptr.dtype.element_ty), mask=here & key[None, :])
        tl.store(sums_ptr + natural, tl.sum(grad, 0), mask=c < width)


@triton.jit
def unpool(dx_ptr, points_ptr, table_ptr, N, E, G, BN: tl.constexpr, BC: tl.constexpr):
    """dx_i += Σ over the groups of the gradient of i's window, divided by the window's size. Table as in `pool`."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    batch = tl.program_id(2).to(tl.int64)
    here = (rows[:, None] < N) & (c[None, :] < E)
    at = dx_ptr + batch * N * E + rows[:, None] * E + c[None, :]
    total = tl.load(at, mask=here, other=0.0).to(tl.float32)
    for group in range(G):
        scale = tl.load(table_ptr + group * 3).to(tl.int32)
        windows = tl.load(table_ptr + group * 3 + 1).to(tl.int32)
        offset = tl.load(table_ptr + group * 3 + 2)
        window = rows // scale
        share = 1.0 / tl.maximum(tl.minimum(N - window * scale, scale), 1).to(tl.float32)
        point = points_ptr + (offset + batch * windows + window)[:, None] * E + c[None, :]
        total += tl.load(point, mask=here & (offset >= 0), other=0.0).to(tl.float32) * share[:, None]
    tl.store(at, total.to(dx_ptr.dtype.element_ty), mask=here)
