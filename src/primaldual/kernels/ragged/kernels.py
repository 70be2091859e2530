# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Attention in which every head has its own number of keys, as Triton kernels; the way back is in another file, and so
are the passes over memory around it.

The points (keys and values) of all heads lie in one buffer each. A row of `table` says where a head's points are, and
a row of `schedule` which piece of the work a program does: (head, batch, block), the longest pieces first, so that
the short heads fill the gaps that the long ones leave.

    s_ij = (q_i − shift)·k_j · scale + bias_j,   p_ij = exp(s_ij − lse_i),   out_i = Σ_j p_ij v_j

`shift` re-centres a head's queries, and comes as sums over blocks of rows (`taken_off`); the backward pass is given the
queries as they were rounded after it. A causal head whose windows hold `window` tokens sees the complete windows before
its own, and one point of its own. Of a sparse head all scores are computed, and those that its pattern keeps take part
(`marks` says what the marks are).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import drop
from .backward_kernels import backward as backward
from .backward_kernels import delta as delta
from .backward_kernels import finish_dq as finish_dq
from .parts import (
    LOG2E,
    OWN,
    RUNNING,
    begin,
    follow,
    hash_columns,
    hash_rows,
    in_pattern,
    load,
    pattern_of,
    places_of,
    points_of,
    reach,
    running_means,
    store,
    strides,
    taken_off,
    tokens_of,
)
from .pass_kernels import dot_sums as dot_sums
from .pass_kernels import place as place
from .pass_kernels import place_three as place_three
from .pass_kernels import pool as pool
from .pass_kernels import sum_rows as sum_rows
from .pass_kernels import unpool as unpool


@triton.jit
def _forward_blocks(
    acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, phase, span, step, phase_span,
    start, end, row_bits, seed, threshold, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over the points [start, end); `seen` is how many of them each row sees, where MASKED.

    A row's total is kept as several sums, as threads hold the scores: these are added up once, after the loops. Where
    it is EXACT, m is the largest score before scaling, so that this one's weight is 1: scores of 10⁸, times a scale and
    less what that rounds to in one instruction, are off by 16, and 2¹⁶ is no half.
    """
    SUMS: tl.constexpr = total.shape[1]
    EXACT: tl.constexpr = q.dtype == tl.float16
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
        s = in_pattern(
            s, float("-inf"), columns[None, :], near[:, None], phase[:, None], span, step, phase_span, PATTERN
        )  # fmt: skip
        if MASKED:
            s = tl.where(columns[None, :] < seen[:, None], s, float("-inf"))
        if EXACT:
            m_new = tl.maximum(m, tl.max(s, 1))
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
        if MASKED or HAS_BIAS or PATTERN:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            base = m_new
        if EXACT:
            p = tl.exp2((s - base[:, None]) * scale)
            fade = tl.exp2((m - base) * scale)
        else:
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
    OWN_POINT: tl.constexpr, DROPOUT: tl.constexpr, PATTERN: tl.constexpr, HAS_TOKENS: tl.constexpr,
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
    span, step, phase_span = pattern_of(marks_ptr, PATTERN)
    near, phase = places_of(marks_ptr, marks_width, rows, PATTERN)
    acc, m, total = _forward_blocks(
        acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, phase, span, step, phase_span, 0,
        clear, row_bits, seed, threshold, scale, D, DV, BLOCK_D, BLOCK_DV, BN, False, HAS_BIAS, PATTERN, DROPOUT,
        PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_blocks(
        acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, phase, span, step, phase_span, clear,
        end, row_bits, seed, threshold, scale, D, DV, BLOCK_D, BLOCK_DV, BN, True, HAS_BIAS, PATTERN, DROPOUT,
        PRECISION,
    )  # fmt: skip
    if q.dtype == tl.float16:
        m *= scale
    total = tl.sum(total, 1)
    if OWN_POINT:
        own = (batch * H + head) * L + rows
        if OWN_POINT == RUNNING:
            own_k_ptr = tokens_k_ptr + batch * tk_batch + head * tk_head
            own_v_ptr = tokens_v_ptr + batch * tv_batch + head * tv_head
            own_k = load(own_k_ptr + rows[:, None] * tk_row + d[None, :], rows, L, d, D, BLOCK_D, True)
            own_v = load(own_v_ptr + rows[:, None] * tv_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
            own_k = running_means(own_k, rows, window, PRECISION)
            own_v = running_means(own_v, rows, window, PRECISION)
        else:
            own_k = load(own_k_ptr + own[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True).to(tl.float32)
            own_v = load(own_v_ptr + own[:, None] * DV + dv[None, :], rows, L, dv, DV, BLOCK_DV, True).to(tl.float32)
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
        acc = acc * fade[:, None] + p[:, None] * own_v
        m = m_new
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total * keep)[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, total))) / LOG2E)
    out_base = out_ptr + batch * out_batch + head * out_head
    store(out_base + rows[:, None] * out_row + dv[None, :], out, rows, L, dv, DV)
    tl.store(lse_ptr + (batch * H + head) * L + rows, lse, mask=rows < L)
