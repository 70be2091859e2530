# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""The way back through `kernels.forward`, as Triton kernels: gradients of queries, points and tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import drop
from .backward_blocks import (
    backward_block,
    backward_head,
    backward_keys,
    backward_queries_blocks,
    load_lse,
    score_gradient,
    unflat,
    weight,
)
from .parts import (
    GIVEN,
    LOG2E,
    OWN,
    RUNNING,
    begin,
    hash_columns,
    hash_rows,
    load,
    pattern_of,
    places_of,
    points_of,
    reach,
    running_means,
    store,
    strides,
    tokens_of,
)


@triton.jit
def delta(
    out_ptr, grad_ptr, rows_ptr, lse_ptr, seed_ptr, sum_ptr, out_batch, out_head, out_row, grad_batch, grad_head,
    grad_row, lse_batch, lse_head, H, L, width, keep,
    BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, DROPOUT: tl.constexpr,
    EIGHTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """delta_i = out_i · grad_i = Σ_j p_ij (grad_i · v_j), with what else the way back needs of a query but itself.

    That is, [B, H, 2 or 3, width]: log-sum-exp in units of log 2, keep · delta and, for dropout, a hash; to be loaded
    without a mask. Sums of dq, where they are given, [B, H, width, BLOCK_D], become zero.
    """
    begin(PDL)
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dv = tl.arange(0, BLOCK_DV)
    out_batch, out_head, out_row = strides(out_batch, out_head, out_row, EIGHTS)
    grad_batch, grad_head, grad_row = strides(grad_batch, grad_head, grad_row, EIGHTS)
    out_base = out_ptr + batch * out_batch + head * out_head
    grad_base = grad_ptr + batch * grad_batch + head * grad_head
    out = load(out_base + rows[:, None] * out_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
    grad = load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
    total = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if sum_ptr is not None:
        place = (tl.program_id(1).to(tl.int64) * width + tl.program_id(0) * BM) * BLOCK_D
        tl.store(sum_ptr + place + tl.arange(0, BM * BLOCK_D), tl.zeros((BM * BLOCK_D,), tl.float32))
    at = rows_ptr + (batch * H + head) * (2 + DROPOUT) * width + rows
    tl.store(at, load_lse(lse_ptr + batch * lse_batch + head * lse_head, rows, L))
    tl.store(at + width, total * keep)
    if DROPOUT:
        bits = hash_rows(tl.load(seed_ptr).to(tl.uint32), batch * H + head, rows)
        tl.store(at + 2 * width, bits.to(tl.float32, bitcast=True))


@triton.jit
def backward(
    q_ptr, k_ptr, v_ptr, bias_ptr, own_k_ptr, own_v_ptr, own_bias_ptr, grad_ptr, lse_ptr, rows_ptr, sum_ptr, seed_ptr,
    dq_ptr, dk_ptr, dv_ptr, down_k_ptr, down_v_ptr, dbias_ptr, down_bias_ptr, tokens_k_ptr, tokens_v_ptr, marks_ptr,
    table_ptr, schedule_ptr, q_batch, q_head, q_row, grad_batch, grad_head, grad_row, dq_batch, dq_head, dq_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, tk_batch, tk_head, tk_row, tv_batch, tv_head, tv_row,
    bias_width, marks_width, H, L, width, tokens, scale, threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BM_K: tl.constexpr, BN_K: tl.constexpr, BM_Q: tl.constexpr, BN_Q: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, OWN_POINT: tl.constexpr,
    DROPOUT: tl.constexpr, PATTERN: tl.constexpr, EXPAND: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    HAS_TOKENS: tl.constexpr, ALIGNED: tl.constexpr, EIGHTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Blocks of points (kind 0; with all of dq, kind 2) and blocks of queries (kind 1), or whole heads (kind 3) or
    blocks of points that add to dq (kind 4), never with others; PARTS adds up 2^kind of those that this launch has.

    With EXPAND the gradients of points go to the tokens that were averaged; else where the table says.
    """
    task = schedule_ptr + tl.program_id(0) * 4
    kind = tl.load(task)
    head_row = tl.load(task + 1)
    batch = tl.load(task + 2).to(tl.int64)
    block = tl.load(task + 3)
    head, count, window, k_start, k_stride, v_start, v_stride = points_of(table_ptr, head_row, batch, ALIGNED)
    if HAS_TOKENS:
        k_start, k_stride, v_start, v_stride = tokens_of(
            k_start, k_stride, v_start, v_stride, k_ptr, v_ptr, tokens_k_ptr, tokens_v_ptr, tk_batch, tk_head, tk_row,
            tv_batch, tv_head, tv_row, batch, head, window, ALIGNED,
        )  # fmt: skip
    begin(PDL)
    batch_head = batch * H + head
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr).to(tl.uint32)
    k_ptr += k_start
    v_ptr += v_start
    q_batch, q_head, q_row = strides(q_batch, q_head, q_row, EIGHTS)
    grad_batch, grad_head, grad_row = strides(grad_batch, grad_head, grad_row, EIGHTS)
    dq_batch, dq_head, dq_row = strides(dq_batch, dq_head, dq_row, EIGHTS)
    dk_batch, dk_head, dk_row = strides(dk_batch, dk_head, dk_row, EIGHTS)
    dv_batch, dv_head, dv_row = strides(dv_batch, dv_head, dv_row, EIGHTS)
    q_base = q_ptr + batch * q_batch + head * q_head
    grad_base = grad_ptr + batch * grad_batch + head * grad_head
    dq_base = dq_ptr + batch * dq_batch + head * dq_head
    lse_base = lse_ptr + batch_head * L
    if OWN_POINT == RUNNING:
        tokens_k_ptr += batch * tk_batch + head * tk_head
        tokens_v_ptr += batch * tv_batch + head * tv_head
    if PARTS != 4:
        rows_ptr += batch_head * (2 + DROPOUT) * width
    if PARTS == 8:
        sum_ptr += batch_head * L * D
    elif PARTS == 16:
        sum_ptr += batch_head * width * BLOCK_D
    if HAS_BIAS:
        bias_ptr += batch_head * bias_width
        if dbias_ptr is not None:
            dbias_ptr += batch_head * bias_width
    if PATTERN:
        marks_ptr += head * (1 + PATTERN) * marks_width
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    if PARTS != 2 and (PARTS < 2 or PARTS == 4 or PARTS >= 8 or kind != 1):
        if EXPAND:
            dk_base = dk_ptr + batch * dk_batch + head * dk_head
            dv_base = dv_ptr + batch * dv_batch + head * dv_head
            dk_stride = dk_row
            dv_stride = dv_row
            expand = window
            limit = tokens
        else:
            dk_base = dk_ptr + k_start
            dv_base = dv_ptr + v_start
            dk_stride = k_stride
            dv_stride = v_stride
            expand = 1
            limit = count
        if PARTS == 8:
            backward_head(
                q_base, grad_base, rows_ptr, width, sum_ptr, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr,
                dbias_ptr, marks_ptr, marks_width, dk_base, dv_base, dk_stride, dv_stride, expand, limit, q_row,
                grad_row, dq_row, L, count, seed, scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM_K, BN_K, EVEN,
                HAS_BIAS, PATTERN, DROPOUT, PRECISION,
            )  # fmt: skip
        elif PARTS == 16:
            backward_block(
                block * BN_K, q_base, grad_base, rows_ptr, width, sum_ptr, k_ptr, v_ptr, k_stride, v_stride,
                bias_ptr, dbias_ptr, marks_ptr, marks_width, dk_base, dv_base, dk_stride, dv_stride, expand, limit,
                q_row, grad_row, L, count, seed, scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM_K, BN_K, EVEN,
                HAS_BIAS, PATTERN, DROPOUT, False, PRECISION,
            )  # fmt: skip
        elif PARTS == 4 or (PARTS > 4 and kind == 2):
            backward_keys(
                q_base, grad_base, lse_base, rows_ptr, width, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr,
                dbias_ptr, marks_ptr, marks_width, dk_base, dv_base, dk_stride, dv_stride, expand, limit, q_row,
                grad_row, dq_row, tokens_k_ptr, tokens_v_ptr, tk_row, tv_row, batch_head, block, L, count, window, seed,
                scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM_K, BN_K, EVEN, CAUSAL, False, HAS_BIAS,
                PATTERN, DROPOUT, PARTS != 4, True, PRECISION,
            )  # fmt: skip
        elif PARTS != 4:
            backward_keys(
                q_base, grad_base, lse_base, rows_ptr, width, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr,
                dbias_ptr, marks_ptr, marks_width, dk_base, dv_base, dk_stride, dv_stride, expand, limit, q_row,
                grad_row, dq_row, tokens_k_ptr, tokens_v_ptr, tk_row, tv_row, batch_head, block, L, count, window, seed,
                scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM_K, BN_K, EVEN, CAUSAL, OWN_POINT == RUNNING,
                HAS_BIAS, PATTERN, DROPOUT, True, False, PRECISION,
            )  # fmt: skip
    elif PARTS != 1 and PARTS != 4 and PARTS != 5 and PARTS < 8:
        rows = block * BM_Q + tl.arange(0, BM_Q)
        q = load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, True)
        grad = load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
        lse = tl.load(rows_ptr + rows)
        delta_row = tl.load(rows_ptr + width + rows)
        back = scale / (LOG2E * keep)
        row_bits = rows
        if DROPOUT:
            row_bits = hash_rows(seed, batch_head, rows)
        seen, clear, end = reach(rows, block, L, count, window, BM_Q, BN_Q, CAUSAL)
        span, step, phase_span = pattern_of(marks_ptr, PATTERN)
        near, phase = places_of(marks_ptr, marks_width, rows, PATTERN)
        dq = tl.zeros((BM_Q, BLOCK_D), tl.float32)
        dq = backward_queries_blocks(
            dq, q, grad, lse, delta_row, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, phase, span, step,
            phase_span, 0, clear, row_bits, seed, scale, threshold, D, DV, BLOCK_D, BLOCK_DV, BN_Q, False, HAS_BIAS,
            PATTERN, DROPOUT, PRECISION,
        )  # fmt: skip
        dq = backward_queries_blocks(
            dq, q, grad, lse, delta_row, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, phase, span, step,
            phase_span, clear, end, row_bits, seed, scale, threshold, D, DV, BLOCK_D, BLOCK_DV, BN_Q, True, HAS_BIAS,
            PATTERN, DROPOUT, PRECISION,
        )  # fmt: skip
        if OWN_POINT:
            own = batch_head * L + rows
            if OWN_POINT == RUNNING:
                own_k = load(tokens_k_ptr + rows[:, None] * tk_row + d[None, :], rows, L, d, D, BLOCK_D, True)
                own_v = load(tokens_v_ptr + rows[:, None] * tv_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
                own_k = running_means(own_k, rows, window, PRECISION)
                own_v = running_means(own_v, rows, window, PRECISION)
            else:
                own_k = load(own_k_ptr + own[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True).to(tl.float32)
                own_v = load(own_v_ptr + own[:, None] * DV + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
                own_v = own_v.to(tl.float32)
            s = tl.sum(q.to(tl.float32) * own_k, 1) * scale
            if HAS_BIAS:
                s += tl.load(own_bias_ptr + own, mask=rows < L, other=0.0) * LOG2E
            p = tl.where(window > 1, weight(s - lse), 0.0)
            dp = tl.sum(grad.to(tl.float32) * own_v, 1)
            dropped = p
            if DROPOUT:
                dropped = drop(p, row_bits, hash_columns(seed, rows * 0 + OWN), threshold)
            ds = score_gradient(p, dropped, dp, delta_row, DROPOUT)
            dq += ds[:, None] * own_k
            if OWN_POINT == GIVEN:
                down_k = ds[:, None] * q.to(tl.float32) * back
                down_v = (dropped / keep)[:, None] * grad.to(tl.float32)
                if down_bias_ptr is not None:
                    tl.store(down_bias_ptr + own, ds / keep, mask=rows < L)
                store(down_k_ptr + own[:, None] * D + d[None, :], down_k, rows, L, d, D)
                store(down_v_ptr + own[:, None] * DV + dv[None, :], down_v, rows, L, dv, DV)
        dq *= back
        store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)


@triton.jit
def finish_dq(
    sum_ptr, dq_ptr, dq_batch, dq_head, dq_row, H, L, width, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, EIGHTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, from the sum of what the blocks of points have added."""
    begin(PDL)
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    first = tl.program_id(0) * BM
    rows = first + tl.arange(0, BM)
    d = tl.arange(0, BLOCK_D)
    dq_batch, dq_head, dq_row = strides(dq_batch, dq_head, dq_row, EIGHTS)
    sum_ptr += (batch * H + head) * width * BLOCK_D + first * BLOCK_D
    dq = tl.load(sum_ptr + tl.arange(0, BM * BLOCK_D)) * factor
    if BM == 32 and BLOCK_D == 64:
        dq = tl.trans(unflat(dq, BLOCK_D, BM))
    else:
        dq = unflat(dq, BM, BLOCK_D)
    store(dq_ptr + batch * dq_batch + head * dq_head + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)
