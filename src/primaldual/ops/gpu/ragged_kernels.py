# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Attention in which every head has its own number of keys, as Triton kernels; the way back is in another file.

The points (keys and values) of all heads lie in one buffer each. A row of `table` says where a head's points are, and
a row of `schedule` which piece of the work a program does: (head, batch, block), the longest pieces first, so that
the short heads fill the gaps that the long ones leave.

    s_ij = (q_i − shift)·k_j · scale + bias_j,   p_ij = exp(s_ij − lse_i),   out_i = Σ_j p_ij v_j

`shift` re-centres a head's queries, and comes as sums over blocks of rows (`taken_off`); the backward pass is given the
queries as they were rounded after it. A causal head whose windows hold `window` tokens sees the complete windows before
its own, and one point of its own. Of a sparse head all scores are computed, and those that its pattern keeps take part
(`ragged_marks` says what the marks are).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel_dropout import drop
from .ragged_backward_kernels import backward as backward
from .ragged_backward_kernels import delta as delta
from .ragged_backward_kernels import settle as settle
from .ragged_parts import (
    LOG2E,
    OWN,
    begin,
    follow,
    hash_columns,
    hash_rows,
    in_pattern,
    lead,
    load,
    pattern_of,
    places_of,
    points_of,
    reach,
    row_share,
    store,
    strides,
    taken_off,
    tokens_of,
)


@triton.jit
def _forward_blocks(
    acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc,
    start, end, row_bits, seed, threshold, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over the points [start, end); `seen` is how many of them each row sees, where MASKED.

    A row's total is kept as several sums, as threads hold the scores: these are added up once, after the loops.
    """
    SUMS: tl.constexpr = total.shape[1]
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for first in tl.range(start, end, BN):
        columns = first + tl.arange(0, BN)
        k = load(k_ptr + columns[:, None] * k_stride + d[None, :], columns, end, d, D, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_BIAS:
            if MASKED:
                bias = tl.load(bias_ptr + columns, mask=columns < end, other=float("-inf"))
            else:
                bias = tl.load(bias_ptr + columns)
            s += bias[None, :] * (LOG2E / scale)
        s = in_pattern(s, float("-inf"), columns[None, :], near[:, None], turn[:, None], span, step, arc, PATTERN)
        if MASKED:
            s = tl.where(columns[None, :] < seen[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        if MASKED or HAS_BIAS or PATTERN:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            base = m_new
        p = tl.exp2(s * scale - base[:, None])
        fade = tl.exp2(m - base)
        total = total * fade[:, None] + tl.sum(tl.reshape(p, (p.shape[0], BN // SUMS, SUMS)), 1)
        if DROPOUT:
            p = drop(p, row_bits[:, None], hash_columns(seed, columns)[None, :], threshold)
        v = load(v_ptr + columns[:, None] * v_stride + dv[None, :], columns, end, dv, DV, BLOCK_DV, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, total


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, sums_ptr, beta_ptr, bias_ptr, own_k_ptr, own_v_ptr, own_bias_ptr, out_ptr, lse_ptr, seed_ptr,
    tokens_k_ptr, tokens_v_ptr, marks_ptr, shifted_ptr, table_ptr, schedule_ptr, q_batch, q_head, q_row, out_batch,
    out_head, out_row, tk_batch, tk_head, tk_row, tv_batch, tv_head, tv_row, shifted_batch, shifted_head, shifted_row,
    bias_width, marks_width, H, L, blocks, factor, scale, threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, CAUSAL: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OWN: tl.constexpr, DROPOUT: tl.constexpr, PATTERN: tl.constexpr, HAS_TOKENS: tl.constexpr,
    ALIGNED: tl.constexpr, EIGHTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out and log-sum-exp (−inf where a query sees nothing) of one block of queries; and these, less their shift.

    With HAS_TOKENS, `pool` has come right before, and heads with windows of one token need nothing of it; whatever came
    before `pool`, such as the sums, is there, since it has waited for that.
    """
    task = schedule_ptr + tl.program_id(0) * 4
    head_row = tl.load(task + 1)
    batch = tl.load(task + 2).to(tl.int64)
    block = tl.load(task + 3)
    head, count, window, k_start, k_stride, v_start, v_stride = points_of(table_ptr, head_row, batch, ALIGNED)
    if HAS_TOKENS:
        k_start, k_stride, v_start, v_stride = tokens_of(
            k_start, k_stride, v_start, v_stride, k_ptr, v_ptr, tokens_k_ptr, tokens_v_ptr, tk_batch, tk_head, tk_row,
            tv_batch, tv_head, tv_row, batch, head, window, ALIGNED,
        )  # fmt: skip
        follow(window > 1, PDL)
    else:
        begin(PDL)
    rows = block * BM + tl.arange(0, BM)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_batch, q_head, q_row = strides(q_batch, q_head, q_row, EIGHTS)
    out_batch, out_head, out_row = strides(out_batch, out_head, out_row, EIGHTS)
    q_base = q_ptr + batch * q_batch + head * q_head
    q = load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, True)
    if HAS_SHIFT:
        shift = taken_off(sums_ptr, beta_ptr, batch * H + head, head, blocks, factor, D, BLOCK_D, BP)
        q = (q.to(tl.float32) - shift[None, :]).to(q.dtype)
        if shifted_ptr is not None:
            shifted_batch, shifted_head, shifted_row = strides(shifted_batch, shifted_head, shifted_row, EIGHTS)
            shifted_ptr += batch * shifted_batch + head * shifted_head
            store(shifted_ptr + rows[:, None] * shifted_row + d[None, :], q, rows, L, d, D)
    seed = 0
    row_bits = rows
    if DROPOUT:
        seed = tl.load(seed_ptr).to(tl.uint32)
        row_bits = hash_rows(seed, batch * H + head, rows)
    k_ptr += k_start
    v_ptr += v_start
    if HAS_BIAS:
        bias_ptr += (batch * H + head) * bias_width
    if PATTERN:
        marks_ptr += head * (1 + PATTERN) * marks_width
    acc = tl.zeros((BM, BLOCK_DV), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    SUMS: tl.constexpr = 1 if q.dtype == tl.float32 and (PRECISION == "ieee" or BLOCK_D > 64) else 8
    total = tl.zeros((BM, SUMS), tl.float32)
    seen, clear, end = reach(rows, block, L, count, window, BM, BN, CAUSAL)
    span, step, arc = pattern_of(marks_ptr, PATTERN)
    near, turn = places_of(marks_ptr, marks_width, rows, PATTERN)
    acc, m, total = _forward_blocks(
        acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc, 0, clear,
        row_bits, seed, threshold, scale, D, DV, BLOCK_D, BLOCK_DV, BN, False, HAS_BIAS, PATTERN, DROPOUT, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_blocks(
        acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc, clear,
        end, row_bits, seed, threshold, scale, D, DV, BLOCK_D, BLOCK_DV, BN, True, HAS_BIAS, PATTERN, DROPOUT,
        PRECISION,
    )  # fmt: skip
    total = tl.sum(total, 1)
    if HAS_OWN:
        own = (batch * H + head) * L + rows
        own_k = load(own_k_ptr + own[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True).to(tl.float32)
        own_v = load(own_v_ptr + own[:, None] * DV + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
        s = tl.sum(q.to(tl.float32) * own_k, 1) * scale
        if HAS_BIAS:
            s += tl.load(own_bias_ptr + own, mask=rows < L, other=0.0) * LOG2E
        s = tl.where(window > 1, s, float("-inf"))
        m_new = tl.maximum(m, s)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base)
        fade = tl.exp2(m - base)
        total = total * fade + p
        if DROPOUT:
            p = drop(p, row_bits, hash_columns(seed, rows * 0 + OWN), threshold)
        acc = acc * fade[:, None] + p[:, None] * own_v.to(tl.float32)
        m = m_new
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total * keep)[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, total))) / LOG2E)
    out_base = out_ptr + batch * out_batch + head * out_head
    store(out_base + rows[:, None] * out_row + dv[None, :], out, rows, L, dv, DV)
    tl.store(lse_ptr + (batch * H + head) * L + rows, lse, mask=rows < L)


@triton.jit
def pool(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, sum_ptr, table_ptr, k_batch, k_head, k_row, v_batch, v_head, v_row, H, tokens,
    blocks, before,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    HAS_SUM: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The means of keys and values over each head's windows, but for the heads in the `before` first rows of the table;
    and sums of these means, one per block, for μ.

    A block of BN tokens is read once, and a product with the matrix of who belongs to which window adds them up. Every
    program does several, so that few are enough: what needs nothing of them can run beside them from the start.
    """
    batch = tl.program_id(2).to(tl.int64)
    head_row = before + tl.program_id(1)
    head, count, window, k_start, k_stride, v_start, v_stride = points_of(table_ptr, head_row, batch, ALIGNED)
    lead(PDL)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    place = tl.arange(0, BN)
    whole = BN // window  # points of a block
    belongs = (place[None, :] // window == place[:, None]).to(k_ptr.dtype.element_ty)
    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        rows = block * whole * window + place
        here = ((place < whole * window) & (rows < tokens))[:, None]
        k = tl.load(k_ptr + rows[:, None] * k_row + d[None, :], mask=here & (d[None, :] < D), other=0.0)
        v = tl.load(v_ptr + rows[:, None] * v_row + dv[None, :], mask=here & (dv[None, :] < DV), other=0.0)
        points = block * whole + place
        size = tl.minimum(tokens - points * window, window)
        share = (1.0 / tl.maximum(size, 1).to(tl.float32))[:, None]
        k_mean = tl.dot(belongs, k, input_precision="ieee") * share
        v_mean = tl.dot(belongs, v, input_precision="ieee") * share
        limit = tl.minimum(block * whole + whole, count)
        store(k_out_ptr + k_start + points[:, None] * k_stride + d[None, :], k_mean, points, limit, d, D)
        store(v_out_ptr + v_start + points[:, None] * v_stride + dv[None, :], v_mean, points, limit, dv, DV)
        if HAS_SUM:
            total = tl.sum(tl.where((points < limit)[:, None], k_mean, 0.0), 0)
            tl.store(sum_ptr + ((batch * H + head) * blocks + block) * D + d, total, mask=d < D)


@triton.jit
def unpool(
    dk_ptr, dv_ptr, dmean_ptr, dk_out_ptr, dv_out_ptr, table_ptr, k_batch, k_head, k_row, v_batch, v_head, v_row, H,
    tokens,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of the means, and of the mean of the means, to the tokens that were averaged."""
    batch = tl.program_id(2).to(tl.int64)
    head, count, window, k_start, k_stride, v_start, v_stride = points_of(table_ptr, tl.program_id(1), batch, ALIGNED)
    begin(PDL)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    points = rows // window
    share = 1.0 / tl.minimum(tl.maximum(tokens - points * window, 1), window).to(tl.float32)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    dk = load(dk_ptr + k_start + points[:, None] * k_stride + d[None, :], points, count, d, D, BLOCK_D, True)
    dvalue = load(dv_ptr + v_start + points[:, None] * v_stride + dv[None, :], points, count, dv, DV, BLOCK_DV, True)
    dmean = tl.load(dmean_ptr + (batch * H + head) * D + d, mask=d < D, other=0.0) / count
    dk = (dk.to(tl.float32) + dmean[None, :]) * share[:, None]
    dvalue = dvalue.to(tl.float32) * share[:, None]
    dk_at = dk_out_ptr + batch * k_batch + head * k_head + rows[:, None] * k_row + d[None, :]
    dv_at = dv_out_ptr + batch * v_batch + head * v_head + rows[:, None] * v_row + dv[None, :]
    store(dk_at, dk, rows, tokens, d, D)
    store(dv_at, dvalue, rows, tokens, dv, DV)


@triton.jit
def spread(
    block, batch, head, from_ptr, to_ptr, sums_ptr, beta_ptr, table_ptr, from_batch, from_head, from_row, to_batch,
    to_head, to_row, H, rows, window, size, blocks, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A block of the rows of `place`."""
    at = block * BN + tl.arange(0, BN)
    d = tl.arange(0, BLOCK_D)
    here = (at[:, None] < rows) & (d[None, :] < D)
    from_ptr += batch * from_batch + head * from_head
    x = tl.load(from_ptr + (at // window)[:, None] * from_row + d[None, :], mask=here, other=0.0).to(tl.float32)
    x *= 1.0 / window
    if sums_ptr is not None:
        off = taken_off(sums_ptr, beta_ptr, batch * H + head, head, blocks, factor, D, BLOCK_D, BP)[None, :]
        if table_ptr is not None:
            off *= row_share(at, rows, size)[:, None]
        x -= off
    to_at = to_ptr + batch * to_batch + head * to_head + at[:, None] * to_row + d[None, :]
    tl.store(to_at, x.to(to_ptr.dtype.element_ty), mask=here)


@triton.jit
def place(
    from_ptr, sums_ptr, beta_ptr, to_ptr, table_ptr, from_batch, from_head, from_row, to_batch, to_head, to_row, H,
    rows, window, blocks, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """to[b, h, i] = from[b, h, ⌊i/window⌋] / window − what `sums` take off, times the row's share in a head's mean
    where there is a table."""
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    size = 1
    if table_ptr is not None:
        size = tl.load(table_ptr + head * 9 + 2).to(tl.int32)
        head = tl.load(table_ptr + head * 9).to(tl.int32)
    begin(PDL)
    spread(
        tl.program_id(0), batch, head, from_ptr, to_ptr, sums_ptr, beta_ptr, table_ptr, from_batch, from_head, from_row,
        to_batch, to_head, to_row, H, rows, window, size, blocks, factor, D, BLOCK_D, BN, BP,
    )  # fmt: skip


@triton.jit
def place_three(
    dq_ptr, dk_ptr, dv_ptr, sums_ptr, beta_ptr, to_q_ptr, to_k_ptr, to_v_ptr, dq_batch, dq_head, dq_row, dk_batch,
    dk_head, dk_row, dv_batch, dv_head, dv_row, to_q_batch, to_q_head, to_q_row, to_k_batch, to_k_head, to_k_row,
    to_v_batch, to_v_head, to_v_row, H, queries, tokens, window, blocks, factor,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`place` of dq as it is, and of dk and dv over windows, dk less what `sums` take off: blocks of each in turn."""
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    begin(PDL)
    block = tl.program_id(0)
    of_queries = tl.cdiv(queries, BN)
    of_tokens = tl.cdiv(tokens, BN)
    if block < of_queries:
        spread(
            block, batch, head, dq_ptr, to_q_ptr, None, None, None, dq_batch, dq_head, dq_row, to_q_batch, to_q_head,
            to_q_row, H, queries, 1, 1, 1, 0.0, D, BLOCK_D, BN, BP,
        )  # fmt: skip
    elif block < of_queries + of_tokens:
        spread(
            block - of_queries, batch, head, dk_ptr, to_k_ptr, sums_ptr, beta_ptr, None, dk_batch, dk_head, dk_row,
            to_k_batch, to_k_head, to_k_row, H, tokens, window, 1, blocks, factor, D, BLOCK_D, BN, BP,
        )  # fmt: skip
    else:
        spread(
            block - of_queries - of_tokens, batch, head, dv_ptr, to_v_ptr, None, None, None, dv_batch, dv_head, dv_row,
            to_v_batch, to_v_head, to_v_row, H, tokens, window, 1, 1, 0.0, DV, BLOCK_DV, BN, BP,
        )  # fmt: skip


@triton.jit
def sum_rows(
    x_ptr, sums_ptr, table_ptr, x_batch, x_head, x_row, H, rows, span,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums[b, h, block] = Σ x[b, h, i] over the block's `span` rows; where there is a table, times the row's share in
    the head's mean."""
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    size = 1
    if table_ptr is not None:
        size = tl.load(table_ptr + head * 9 + 2).to(tl.int32)
        head = tl.load(table_ptr + head * 9).to(tl.int32)
    begin(PDL)
    d = tl.arange(0, BLOCK_D)
    first = tl.program_id(0) * span
    x_ptr += batch * x_batch + head * x_head
    total = tl.zeros((BN, BLOCK_D), tl.float32)
    for start in range(first, tl.minimum(first + span, rows), BN):
        at = start + tl.arange(0, BN)
        here = (at[:, None] < rows) & (d[None, :] < D)
        x = tl.load(x_ptr + at[:, None] * x_row + d[None, :], mask=here, other=0.0).to(tl.float32)
        if table_ptr is not None:
            x *= row_share(at, rows, size)[:, None]
        total += x
    sums_ptr += ((batch * H + head) * tl.num_programs(0) + tl.program_id(0)) * D
    tl.store(sums_ptr + d, tl.sum(total, 0), mask=d < D)


@triton.jit
def _over_blocks(ptr, batch_stride, block_stride, batches, B, blocks, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 BB: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """The sums over the blocks of some batches, [BB, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)[None, None, :]
    total = tl.zeros((BB, BLOCK_D), tl.float32)
    for first in range(0, blocks, BP):
        block = (first + tl.arange(0, BP))[None, :, None]
        here = (batches[:, None, None] < B) & (block < blocks) & (d < D)
        at = batches[:, None, None].to(tl.int64) * batch_stride + block * block_stride + d
        total += tl.sum(tl.load(ptr + at, mask=here, other=0.0), 1)
    return total


@triton.jit
def dot_sums(
    a_ptr, b_ptr, out_ptr, a_batch, a_head, a_block, a_blocks, b_batch, b_head, b_block, b_blocks, B, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BB: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[h] = factor · Σ over batches of ⟨Σ_i a[·, h, i], Σ_j b[·, h, j]⟩, sums of blocks."""
    head = tl.program_id(0)
    begin(PDL)
    total = tl.zeros((BB, BLOCK_D), tl.float32)
    for first in range(0, B, BB):
        batches = first + tl.arange(0, BB)
        of_a = _over_blocks(a_ptr + head * a_head, a_batch, a_block, batches, B, a_blocks, D, BLOCK_D, BB, BP)
        of_b = _over_blocks(b_ptr + head * b_head, b_batch, b_block, batches, B, b_blocks, D, BLOCK_D, BB, BP)
        total += of_a * of_b
    tl.store(out_ptr + head, (factor * tl.sum(tl.sum(total, 1), 0)).to(out_ptr.dtype.element_ty))
