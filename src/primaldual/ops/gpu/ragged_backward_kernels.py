# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""The way back through `ragged_kernels.forward`, as Triton kernels: gradients of queries, points and tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel_dropout import drop
from .ragged_parts import (
    LOG2E,
    OWN,
    begin,
    hash_columns,
    hash_rows,
    in_pattern,
    load,
    pattern_of,
    places_of,
    points_of,
    reach,
    store,
    strides,
    tokens_of,
    visible,
)


@triton.jit
def _weight(x):
    """2^x, for a score less its log-sum-exp: at most 1, also where scores of 10⁷ and more are rounded by more than 1.

    Beyond the last point, where keys and values are zeros, it is thus finite too, and adds nothing.
    """
    return tl.exp2(tl.minimum(x, 0.0))


@triton.jit
def _score_gradient(p, dropped, dp, delta_row, DROPOUT: tl.constexpr):
    """keep · ds, of keep · delta."""
    if DROPOUT:
        return dropped * dp - p * delta_row
    else:
        return p * (dp - delta_row)


@triton.jit
def _load_lse(pointer, rows, limit):
    """In units of log 2; +inf where a query sees nothing, so that its weights are zero."""
    lse = tl.load(pointer + rows, mask=rows < limit, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def delta(
    out_ptr, grad_ptr, delta_ptr, lse_ptr, seed_ptr, sum_ptr, out_batch, out_head, out_row, grad_batch, grad_head,
    grad_row, H, L, width, keep,
    BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, DROPOUT: tl.constexpr,
    SWEEP: tl.constexpr, EIGHTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """delta_i = out_i · grad_i = Σ_j p_ij (grad_i · v_j).

    For a sweep all that it needs of a query, [B, H, 3, width]: log-sum-exp in units of log 2, keep · delta, its hash.
    Sums of dq, where they are given, [B, H, width, BLOCK_D], become zero.
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
    if SWEEP:
        at = delta_ptr + (batch * H + head) * 3 * width + rows
        tl.store(at, _load_lse(lse_ptr + (batch * H + head) * L, rows, L))
        tl.store(at + width, total * keep)
        if DROPOUT:
            bits = hash_rows(tl.load(seed_ptr).to(tl.uint32), batch * H + head, rows)
            tl.store(at + 2 * width, bits.to(tl.float32, bitcast=True))
    else:
        tl.store(delta_ptr + (batch * H + head) * L + rows, total, mask=rows < L)


@triton.jit
def _store_points(
    dk, dvalue, dk_ptr, dv_ptr, dk_row, dv_row, columns, count, expand, tokens,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Gradients of points to their tokens: every token of a window has an equal share in its mean."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    inside = (columns < count)[:, None]
    for place in range(expand):
        token = columns * expand + place
        size = tl.minimum(tokens - columns * expand, expand)
        share = 1.0 / tl.maximum(size, 1).to(tl.float32)
        write = inside & (token[:, None] < tokens)
        dk_at = dk_ptr + token[:, None] * dk_row + d[None, :]
        dv_at = dv_ptr + token[:, None] * dv_row + dv[None, :]
        tl.store(dk_at, (dk * share[:, None]).to(dk_ptr.dtype.element_ty), mask=write & (d[None, :] < D))
        tl.store(dv_at, (dvalue * share[:, None]).to(dv_ptr.dtype.element_ty), mask=write & (dv[None, :] < DV))


@triton.jit
def _load_points(
    columns, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, count, seed,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Keys, values, bias in units of log 2 and hashes of a block of points; the columns themselves without dropout."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k = load(k_ptr + columns[:, None] * k_stride + d[None, :], columns, count, d, D, BLOCK_D, True)
    v = load(v_ptr + columns[:, None] * v_stride + dv[None, :], columns, count, dv, DV, BLOCK_DV, True)
    bias = tl.zeros((BN,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + columns, mask=columns < count, other=float("-inf")) * LOG2E
    column_bits = columns
    if DROPOUT:
        column_bits = hash_columns(seed, columns)
    return k, v, bias, column_bits


@triton.jit
def _flat(tile, R: tl.constexpr, C: tl.constexpr):
    """A product in the order in which threads hold it, so that it leaves from their registers as it is.

    Of every 16 × 8 numbers a thread holds two side by side, and the two 8 rows below; then come its neighbours'. In
    another order it would only take longer.
    """
    tile = tl.permute(tl.reshape(tile, (R // 16, 2, 8, 2, C // 16, 4, 2)), (4, 3, 0, 2, 5, 1, 6))
    return tl.reshape(tile, (R * C,))


@triton.jit
def _unflat(numbers, R: tl.constexpr, C: tl.constexpr):
    numbers = tl.permute(tl.reshape(numbers, (C // 16, 2, R // 16, 8, 4, 2, 2)), (2, 5, 3, 1, 0, 4, 6))
    return tl.reshape(numbers, (R, C))


@triton.jit
def _backward_block(
    first, q_base, grad_base, rows_ptr, width, sum_ptr, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, marks_ptr,
    marks_width, dk_ptr, dv_ptr, dk_row, dv_row, expand, tokens, q_row, grad_row, L, count, seed, scale, threshold,
    keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr, DROPOUT: tl.constexpr,
    ALONE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of the points from `first` on, over all queries, every score once; their share of dq goes to `sum_ptr`.

    A program that has the head to itself (ALONE) writes the first share there and adds the others. Else all add to
    zeros, in any order, without the factor `back`: `settle` has it.
    """
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    back = scale / (LOG2E * keep)  # from keep · ds to gradients
    columns = first + tl.arange(0, BN)
    k, v, bias, column_bits = _load_points(
        columns,
        k_ptr,
        v_ptr,
        k_stride,
        v_stride,
        bias_ptr,
        count,
        seed,
        D,
        DV,
        BLOCK_D,
        BLOCK_DV,
        BN,
        HAS_BIAS,
        DROPOUT,
    )
    span, step, arc = pattern_of(marks_ptr, PATTERN)
    dk = tl.zeros((BN, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BN, BLOCK_DV), tl.float32)
    for start in tl.range(0, L, BM):
        rows = start + tl.arange(0, BM)
        q = load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, not EVEN)
        grad = load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, not EVEN)
        lse = tl.load(rows_ptr + rows)
        delta_row = tl.load(rows_ptr + width + rows)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if HAS_BIAS:
            p = _weight(s * scale + (bias[:, None] - lse[None, :]))
        else:
            p = _weight(s * scale - lse[None, :])
        near, turn = places_of(marks_ptr, marks_width, rows, PATTERN)
        p = in_pattern(p, 0.0, columns[:, None], near[None, :], turn[None, :], span, step, arc, PATTERN)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            row_bits = tl.load(rows_ptr + 2 * width + rows).to(tl.uint32, bitcast=True)
            dropped = drop(p, row_bits[None, :], column_bits[:, None], threshold)
        dvalue = tl.dot(dropped.to(grad.dtype), grad, dvalue, input_precision=PRECISION)
        ds = _score_gradient(p, dropped, dp, delta_row[None, :], DROPOUT)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if ALONE:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * back
            at = sum_ptr + rows[:, None] * D + d[None, :]
            here = (rows[:, None] < L) & (d[None, :] < D)
            tl.store(at, dq + tl.load(at, mask=here & (first > 0), other=0.0), mask=here)
        else:
            if BM < 64 and BLOCK_D >= 64:  # Hopper's products have 64 rows
                dq = _flat(tl.dot(tl.trans(k), ds, input_precision=PRECISION), BLOCK_D, BM)
            else:
                dq = _flat(tl.dot(tl.trans(ds), k, input_precision=PRECISION), BM, BLOCK_D)
            tl.atomic_add(sum_ptr + start * BLOCK_D + tl.arange(0, BM * BLOCK_D), dq, sem="relaxed")
    _store_points(
        dk * back, dvalue / keep, dk_ptr, dv_ptr, dk_row, dv_row, columns, count, expand, tokens, D, DV, BLOCK_D,
        BLOCK_DV,
    )  # fmt: skip


@triton.jit
def _backward_head(
    q_base, grad_base, rows_ptr, width, sum_ptr, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, marks_ptr,
    marks_width, dk_ptr, dv_ptr, dk_row, dv_row, expand, tokens, q_row, grad_row, dq_row, L, count, seed, scale,
    threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a head in one sweep, every score once; `sum_ptr` holds dq in float32 from block to block."""
    d = tl.arange(0, BLOCK_D)
    for first in tl.range(0, count, BN, num_stages=1):
        _backward_block(
            first, q_base, grad_base, rows_ptr, width, sum_ptr, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, marks_ptr,
            marks_width, dk_ptr, dv_ptr, dk_row, dv_row, expand, tokens, q_row, grad_row, L, count, seed, scale,
            threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM, BN, EVEN, HAS_BIAS, PATTERN, DROPOUT, True, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # the sums may be read by other threads than wrote them
    for start in tl.range(0, L, BM):
        rows = start + tl.arange(0, BM)
        dq = load(sum_ptr + rows[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True)
        store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)


@triton.jit
def _backward_keys(
    q_base, grad_base, lse_base, delta_base, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, marks_ptr,
    marks_width, dk_ptr, dv_ptr, dk_row, dv_row, expand, tokens, q_row, grad_row, dq_row, batch_head, block, L, count,
    window, seed, scale, threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr,
    DROPOUT: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of points, over all queries; and dq, where the block is all that the head has (WHOLE)."""
    columns = block * BN + tl.arange(0, BN)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k, v, bias, column_bits = _load_points(
        columns,
        k_ptr,
        v_ptr,
        k_stride,
        v_stride,
        bias_ptr,
        count,
        seed,
        D,
        DV,
        BLOCK_D,
        BLOCK_DV,
        BN,
        HAS_BIAS,
        DROPOUT,
    )
    back = scale / (LOG2E * keep)  # from keep · ds to gradients
    span, step, arc = pattern_of(marks_ptr, PATTERN)
    dk = tl.zeros((BN, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BN, BLOCK_DV), tl.float32)
    first_row = 0
    if CAUSAL:  # the first query that sees the block's first point
        first_row = tl.where(window == 1, block * BN, (block * BN + 1) * window) // BM * BM
    rows = first_row + tl.arange(0, BM)
    lse = _load_lse(lse_base, rows, L)
    delta_row = tl.zeros((BM,), tl.float32)
    if not WHOLE:
        delta_row = tl.load(delta_base + rows, mask=rows < L, other=0.0)
    for start in tl.range(first_row, L, BM):
        rows = start + tl.arange(0, BM)
        q = load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, not EVEN)
        grad = load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, not EVEN)
        next_lse = _load_lse(lse_base, rows + BM, L)  # one block ahead: nothing else hides its latency
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if HAS_BIAS:
            p = _weight(s * scale + (bias[:, None] - lse[None, :]))
        else:
            p = _weight(s * scale - lse[None, :])
        if CAUSAL:
            p = tl.where(columns[:, None] < visible(rows, count, window)[None, :], p, 0.0)
        near, turn = places_of(marks_ptr, marks_width, rows, PATTERN)
        p = in_pattern(p, 0.0, columns[:, None], near[None, :], turn[None, :], span, step, arc, PATTERN)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            dropped = drop(p, hash_rows(seed, batch_head, rows)[None, :], column_bits[:, None], threshold)
        dvalue = tl.dot(dropped.to(grad.dtype), grad, dvalue, input_precision=PRECISION)
        if WHOLE:
            ds = _score_gradient(p, dropped, dp, tl.sum(dropped * dp, 0)[None, :], DROPOUT)
        else:
            next_delta = tl.load(delta_base + rows + BM, mask=rows + BM < L, other=0.0)
            ds = _score_gradient(p, dropped, dp, (delta_row * keep)[None, :], DROPOUT)
            delta_row = next_delta
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if WHOLE:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * back
            store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)
        lse = next_lse
    _store_points(
        dk * back, dvalue / keep, dk_ptr, dv_ptr, dk_row, dv_row, columns, count, expand, tokens, D, DV, BLOCK_D,
        BLOCK_DV,
    )  # fmt: skip


@triton.jit
def _backward_queries_blocks(
    dq, q, grad, lse, delta_row, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc,
    start, end, row_bits, seed, scale, threshold,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for first in tl.range(start, end, BN):
        columns = first + tl.arange(0, BN)
        k = load(k_ptr + columns[:, None] * k_stride + d[None, :], columns, end, d, D, BLOCK_D, MASKED)
        v = load(v_ptr + columns[:, None] * v_stride + dv[None, :], columns, end, dv, DV, BLOCK_DV, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_BIAS:
            s += tl.load(bias_ptr + columns, mask=columns < end, other=float("-inf"))[None, :] * LOG2E
        p = _weight(s - lse[:, None])
        p = in_pattern(p, 0.0, columns[None, :], near[:, None], turn[:, None], span, step, arc, PATTERN)
        if MASKED:
            p = tl.where(columns[None, :] < seen[:, None], p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            dropped = drop(p, row_bits[:, None], hash_columns(seed, columns)[None, :], threshold)
        ds = _score_gradient(p, dropped, dp, delta_row[:, None], DROPOUT)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def backward(
    q_ptr, k_ptr, v_ptr, bias_ptr, own_k_ptr, own_v_ptr, own_bias_ptr, grad_ptr, lse_ptr,
    delta_ptr, sum_ptr, seed_ptr, dq_ptr, dk_ptr, dv_ptr, down_k_ptr, down_v_ptr, tokens_k_ptr, tokens_v_ptr,
    marks_ptr, table_ptr, schedule_ptr, q_batch, q_head, q_row, grad_batch, grad_head, grad_row, dq_batch, dq_head,
    dq_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, tk_batch, tk_head, tk_row, tv_batch, tv_head, tv_row,
    bias_width, marks_width, H, L, width, tokens, scale, threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BM_K: tl.constexpr, BN_K: tl.constexpr, BM_Q: tl.constexpr, BN_Q: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OWN: tl.constexpr,
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
    delta_base = delta_ptr
    if PARTS == 8:
        delta_base += batch_head * 3 * width
        sum_ptr += batch_head * L * D
    elif PARTS == 16:
        delta_base += batch_head * 3 * width
        sum_ptr += batch_head * width * BLOCK_D
    elif PARTS != 4:
        delta_base += batch_head * L
    if HAS_BIAS:
        bias_ptr += batch_head * bias_width
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
            _backward_head(
                q_base, grad_base, delta_base, width, sum_ptr, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr,
                marks_ptr, marks_width, dk_base, dv_base, dk_stride, dv_stride, expand, limit, q_row, grad_row, dq_row,
                L, count, seed, scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM_K, BN_K, EVEN,
                HAS_BIAS, PATTERN, DROPOUT, PRECISION,
            )  # fmt: skip
        elif PARTS == 16:
            _backward_block(
                block * BN_K, q_base, grad_base, delta_base, width, sum_ptr, k_ptr, v_ptr, k_stride, v_stride,
                bias_ptr, marks_ptr, marks_width, dk_base, dv_base, dk_stride, dv_stride, expand, limit, q_row,
                grad_row, L, count, seed, scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM_K, BN_K, EVEN,
                HAS_BIAS, PATTERN, DROPOUT, False, PRECISION,
            )  # fmt: skip
        elif PARTS == 4 or (PARTS > 4 and kind == 2):
            _backward_keys(
                q_base, grad_base, lse_base, delta_base, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr,
                marks_ptr, marks_width, dk_base, dv_base, dk_stride, dv_stride, expand, limit, q_row, grad_row, dq_row,
                batch_head, block, L, count, window, seed, scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM_K,
                BN_K, EVEN, CAUSAL, HAS_BIAS, PATTERN, DROPOUT, True, PRECISION,
            )  # fmt: skip
        elif PARTS != 4:
            _backward_keys(
                q_base, grad_base, lse_base, delta_base, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr,
                marks_ptr, marks_width, dk_base, dv_base, dk_stride, dv_stride, expand, limit, q_row, grad_row, dq_row,
                batch_head, block, L, count, window, seed, scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM_K,
                BN_K, EVEN, CAUSAL, HAS_BIAS, PATTERN, DROPOUT, False, PRECISION,
            )  # fmt: skip
    elif PARTS != 1 and PARTS != 4 and PARTS != 5 and PARTS < 8:
        rows = block * BM_Q + tl.arange(0, BM_Q)
        q = load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, True)
        grad = load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
        lse = _load_lse(lse_base, rows, L)
        delta_row = tl.load(delta_base + rows, mask=rows < L, other=0.0) * keep
        back = scale / (LOG2E * keep)
        row_bits = rows
        if DROPOUT:
            row_bits = hash_rows(seed, batch_head, rows)
        seen, clear, end = reach(rows, block, L, count, window, BM_Q, BN_Q, CAUSAL)
        span, step, arc = pattern_of(marks_ptr, PATTERN)
        near, turn = places_of(marks_ptr, marks_width, rows, PATTERN)
        dq = tl.zeros((BM_Q, BLOCK_D), tl.float32)
        dq = _backward_queries_blocks(
            dq, q, grad, lse, delta_row, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc,
            0, clear, row_bits, seed, scale, threshold, D, DV, BLOCK_D, BLOCK_DV, BN_Q, False, HAS_BIAS, PATTERN,
            DROPOUT, PRECISION,
        )  # fmt: skip
        dq = _backward_queries_blocks(
            dq, q, grad, lse, delta_row, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc,
            clear, end, row_bits, seed, scale, threshold, D, DV, BLOCK_D, BLOCK_DV, BN_Q, True, HAS_BIAS, PATTERN,
            DROPOUT, PRECISION,
        )  # fmt: skip
        if HAS_OWN:
            own = batch_head * L + rows
            own_k = load(own_k_ptr + own[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True).to(tl.float32)
            own_v = load(own_v_ptr + own[:, None] * DV + dv[None, :], rows, L, dv, DV, BLOCK_DV, True).to(tl.float32)
            s = tl.sum(q.to(tl.float32) * own_k, 1) * scale
            if HAS_BIAS:
                s += tl.load(own_bias_ptr + own, mask=rows < L, other=0.0) * LOG2E
            p = tl.where(window > 1, _weight(s - lse), 0.0)
            dp = tl.sum(grad.to(tl.float32) * own_v, 1)
            dropped = p
            if DROPOUT:
                dropped = drop(p, row_bits, hash_columns(seed, rows * 0 + OWN), threshold)
            ds = _score_gradient(p, dropped, dp, delta_row, DROPOUT)
            dq += ds[:, None] * own_k
            down_k = ds[:, None] * q.to(tl.float32) * back
            down_v = (dropped / keep)[:, None] * grad.to(tl.float32)
            store(down_k_ptr + own[:, None] * D + d[None, :], down_k, rows, L, d, D)
            store(down_v_ptr + own[:, None] * DV + dv[None, :], down_v, rows, L, dv, DV)
        dq *= back
        store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)


@triton.jit
def settle(
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
    if BM < 64 and BLOCK_D >= 64:
        dq = tl.trans(_unflat(dq, BLOCK_D, BM))
    else:
        dq = _unflat(dq, BM, BLOCK_D)
    store(dq_ptr + batch * dq_batch + head * dq_head + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)
