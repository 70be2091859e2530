# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""The loops of `ragged_backward_kernels`: one block of points, or one of queries, against all of the others."""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import drop
from .parts import LOG2E, OWN, hash_columns, hash_rows, in_pattern, load, pattern_of, places_of, store, visible


@triton.jit
def weight(x):
    """2^x, for a score less its log-sum-exp: at most 1, also where scores of 10⁷ and more are rounded by more than 1.

    Beyond the last point, where keys and values are zeros, it is thus finite too, and adds nothing.
    """
    return tl.exp2(tl.minimum(x, 0.0))


@triton.jit
def score_gradient(p, dropped, dp, delta_row, DROPOUT: tl.constexpr):
    """keep · ds, of keep · delta."""
    if DROPOUT:
        return dropped * dp - p * delta_row
    else:
        return p * (dp - delta_row)


@triton.jit
def load_lse(pointer, rows, limit):
    """In units of log 2; +inf where a query sees nothing, so that its weights are zero."""
    lse = tl.load(pointer + rows, mask=rows < limit, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def store_points(
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
def store_windows(
    dk, dvalue, dk_ptr, dv_ptr, dk_row, dv_row, columns, window, tokens, k_ptr, v_ptr, k_row, v_row, q_base, grad_base,
    q_row, grad_row, rows_ptr, width, L, seed, scale, threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """`store_points`, and what tokens get from the queries of their own window, whose point is its mean up to them.

    From the last token of every window to the first: the sum that a mean is made of loses what comes after it, and
    what a query gives goes to its token and to all before.
    """
    back = scale / (LOG2E * keep)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    size = tl.maximum(tl.minimum(tokens - columns * window, window), 1).to(tl.float32)
    dk /= size[:, None]
    dvalue /= size[:, None]
    k = tl.zeros(dk.shape, tl.float32)
    v = tl.zeros(dvalue.shape, tl.float32)
    for place in range(window):
        token = columns * window + place
        k += load(k_ptr + token[:, None] * k_row + d[None, :], token, tokens, d, D, BLOCK_D, True)
        v += load(v_ptr + token[:, None] * v_row + dv[None, :], token, tokens, dv, DV, BLOCK_DV, True)
    for later in range(window):
        place = window - 1 - later
        token = columns * window + place
        share = 1.0 / (place + 1)
        q = load(q_base + token[:, None] * q_row + d[None, :], token, L, d, D, BLOCK_D, True).to(tl.float32)
        grad = load(grad_base + token[:, None] * grad_row + dv[None, :], token, L, dv, DV, BLOCK_DV, True)
        grad = grad.to(tl.float32)
        exists = token < L
        lse = tl.load(rows_ptr + token, mask=exists, other=float("inf"))
        delta_row = tl.load(rows_ptr + width + token, mask=exists, other=0.0)
        p = weight(tl.sum(q * k, 1) * (scale * share) - lse)
        dropped = p
        if DROPOUT:
            row_bits = tl.load(rows_ptr + 2 * width + token, mask=exists, other=0.0).to(tl.uint32, bitcast=True)
            dropped = drop(p, row_bits, hash_columns(seed, token * 0 + OWN), threshold)
        ds = score_gradient(p, dropped, tl.sum(grad * v, 1) * share, delta_row, DROPOUT)
        dk += (ds * (back * share))[:, None] * q
        dvalue += (dropped * (share / keep))[:, None] * grad
        store(dk_ptr + token[:, None] * dk_row + d[None, :], dk, token, tokens, d, D)
        store(dv_ptr + token[:, None] * dv_row + dv[None, :], dvalue, token, tokens, dv, DV)
        k -= load(k_ptr + token[:, None] * k_row + d[None, :], token, tokens, d, D, BLOCK_D, True)
        v -= load(v_ptr + token[:, None] * v_row + dv[None, :], token, tokens, dv, DV, BLOCK_DV, True)


@triton.jit
def halves(tile, R: tl.constexpr, C: tl.constexpr):
    """The first R / 2 rows of a tile, and the others."""
    return tl.split(tl.permute(tl.reshape(tile, (2, R // 2, C)), (1, 2, 0)))


@triton.jit
def load_points(
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
def flat(tile, R: tl.constexpr, C: tl.constexpr):
    """A product in the order in which threads hold it, so that it leaves from their registers as it is.

    Of every 16 × 8 numbers a thread holds two side by side, and the two 8 rows below; then come its neighbours'. In
    another order it would only take longer.
    """
    tile = tl.permute(tl.reshape(tile, (R // 16, 2, 8, 2, C // 16, 4, 2)), (4, 3, 0, 2, 5, 1, 6))
    return tl.reshape(tile, (R * C,))


@triton.jit
def unflat(numbers, R: tl.constexpr, C: tl.constexpr):
    numbers = tl.permute(tl.reshape(numbers, (C // 16, 2, R // 16, 8, 4, 2, 2)), (2, 5, 3, 1, 0, 4, 6))
    return tl.reshape(numbers, (R, C))


@triton.jit
def backward_block(
    first, q_base, grad_base, rows_ptr, width, sum_ptr, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, dbias_ptr,
    marks_ptr, marks_width, dk_ptr, dv_ptr, dk_row, dv_row, expand, tokens, q_row, grad_row, L, count, seed, scale,
    threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr, DROPOUT: tl.constexpr,
    ALONE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of the points from `first` on, over all queries, every score once; their share of dq goes to `sum_ptr`.

    A program that has the head to itself (ALONE) writes the first share there and adds the others. Else all add to
    zeros, in any order, without the factor `back`: `finish_dq` has it.
    """
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    back = scale / (LOG2E * keep)  # from keep · ds to gradients
    columns = first + tl.arange(0, BN)
    k, v, bias, column_bits = load_points(
        columns, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, count, seed, D, DV, BLOCK_D, BLOCK_DV, BN, HAS_BIAS,
        DROPOUT,
    )  # fmt: skip
    span, step, phase_span = pattern_of(marks_ptr, PATTERN)
    dk = tl.zeros((BN, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BN, BLOCK_DV), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((BN,), tl.float32)
    for start in tl.range(0, L, BM):
        rows = start + tl.arange(0, BM)
        q = load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, not EVEN)
        grad = load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, not EVEN)
        lse = tl.load(rows_ptr + rows)
        delta_row = tl.load(rows_ptr + width + rows)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if HAS_BIAS:
            p = weight(s * scale + (bias[:, None] - lse[None, :]))
        else:
            p = weight(s * scale - lse[None, :])
        near, phase = places_of(marks_ptr, marks_width, rows, PATTERN)
        p = in_pattern(p, 0.0, columns[:, None], near[None, :], phase[None, :], span, step, phase_span, PATTERN)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            row_bits = tl.load(rows_ptr + 2 * width + rows).to(tl.uint32, bitcast=True)
            dropped = drop(p, row_bits[None, :], column_bits[:, None], threshold)
        dvalue = tl.dot(dropped.to(grad.dtype), grad, dvalue, input_precision=PRECISION)
        ds = score_gradient(p, dropped, dp, delta_row[None, :], DROPOUT)
        if dbias_ptr is not None:
            dbias += tl.sum(ds, 1)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if ALONE:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * back
            at = sum_ptr + rows[:, None] * D + d[None, :]
            here = (rows[:, None] < L) & (d[None, :] < D)
            tl.store(at, dq + tl.load(at, mask=here & (first > 0), other=0.0), mask=here)
        else:
            if BM == 32 and BLOCK_D == 64:  # Hopper's products have 64 rows
                dq = flat(tl.dot(tl.trans(k), ds, input_precision=PRECISION), BLOCK_D, BM)
            else:
                dq = flat(tl.dot(tl.trans(ds), k, input_precision=PRECISION), BM, BLOCK_D)
            tl.atomic_add(sum_ptr + start * BLOCK_D + tl.arange(0, BM * BLOCK_D), dq, sem="relaxed")
    if dbias_ptr is not None:
        tl.store(dbias_ptr + columns, dbias / keep, mask=columns < count)
    store_points(
        dk * back, dvalue / keep, dk_ptr, dv_ptr, dk_row, dv_row, columns, count, expand, tokens, D, DV, BLOCK_D,
        BLOCK_DV,
    )  # fmt: skip


@triton.jit
def backward_head(
    q_base, grad_base, rows_ptr, width, sum_ptr, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, dbias_ptr,
    marks_ptr, marks_width, dk_ptr, dv_ptr, dk_row, dv_row, expand, tokens, q_row, grad_row, dq_row, L, count, seed,
    scale, threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a head in one sweep, every score once; `sum_ptr` holds dq in float32 from block to block."""
    d = tl.arange(0, BLOCK_D)
    for first in tl.range(0, count, BN, num_stages=1):
        backward_block(
            first, q_base, grad_base, rows_ptr, width, sum_ptr, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, dbias_ptr,
            marks_ptr, marks_width, dk_ptr, dv_ptr, dk_row, dv_row, expand, tokens, q_row, grad_row, L, count, seed,
            scale, threshold, keep, D, DV, BLOCK_D, BLOCK_DV, BM, BN, EVEN, HAS_BIAS, PATTERN, DROPOUT, True, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # the sums may be read by other threads than wrote them
    for start in tl.range(0, L, BM):
        rows = start + tl.arange(0, BM)
        dq = load(sum_ptr + rows[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True)
        store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)


@triton.jit
def backward_keys(
    q_base, grad_base, lse_base, rows_ptr, width, dq_base, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, dbias_ptr,
    marks_ptr, marks_width, dk_ptr, dv_ptr, dk_row, dv_row, expand, tokens, q_row, grad_row, dq_row, tokens_k_ptr,
    tokens_v_ptr, tk_row, tv_row, batch_head, block, L, count, window, seed, scale, threshold, keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr, RUN: tl.constexpr, HAS_BIAS: tl.constexpr,
    PATTERN: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of points, over all queries; and dq, where the block is all that the head has (WHOLE).

    The gradient of their bias, where there is a place for it, is the sum of those of their scores.

    With RUN queries have the running means of their windows as points of their own, and tokens a share in these.
    """
    columns = block * BN + tl.arange(0, BN)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k, v, bias, column_bits = load_points(
        columns, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, count, seed, D, DV, BLOCK_D, BLOCK_DV, BN, HAS_BIAS,
        DROPOUT,
    )  # fmt: skip
    back = scale / (LOG2E * keep)  # from keep · ds to gradients
    span, step, phase_span = pattern_of(marks_ptr, PATTERN)
    dk = tl.zeros((BN, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BN, BLOCK_DV), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((BN,), tl.float32)
    first_row = 0
    if CAUSAL:  # the first query that sees the block's first point
        first_row = tl.where(window == 1, block * BN, (block * BN + 1) * window) // BM * BM
    place = tl.arange(0, BM)
    ahead = tl.minimum(first_row, width - BM)
    lse = tl.load(rows_ptr + ahead + place) if ROWS else load_lse(lse_base, first_row + place, L)
    delta_row = tl.load(rows_ptr + width + ahead + place) if not WHOLE else lse
    for start in tl.range(first_row, L, BM):
        rows = start + place
        q = load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, not EVEN)
        grad = load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, not EVEN)
        ahead = tl.minimum(start + BM, width - BM)  # one block: nothing else hides the latency
        next_lse = tl.load(rows_ptr + ahead + place) if ROWS else load_lse(lse_base, rows + BM, L)
        next_delta = tl.load(rows_ptr + width + ahead + place) if not WHOLE else next_lse
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if HAS_BIAS:
            p = weight(s * scale + (bias[:, None] - lse[None, :]))
        else:
            p = weight(s * scale - lse[None, :])
        if CAUSAL:
            p = tl.where(columns[:, None] < visible(rows, count, window)[None, :], p, 0.0)
        near, phase = places_of(marks_ptr, marks_width, rows, PATTERN)
        p = in_pattern(p, 0.0, columns[:, None], near[None, :], phase[None, :], span, step, phase_span, PATTERN)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            if ROWS:
                row_bits = tl.load(rows_ptr + 2 * width + rows).to(tl.uint32, bitcast=True)
            else:
                row_bits = hash_rows(seed, batch_head, rows)
            dropped = drop(p, row_bits[None, :], column_bits[:, None], threshold)
        dvalue = tl.dot(dropped.to(grad.dtype), grad, dvalue, input_precision=PRECISION)
        if WHOLE:
            ds = score_gradient(p, dropped, dp, tl.sum(dropped * dp, 0)[None, :], DROPOUT)
        else:
            ds = score_gradient(p, dropped, dp, delta_row[None, :], DROPOUT)
        if dbias_ptr is not None:
            dbias += tl.sum(ds, 1)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if WHOLE:
            if BM == 32 and BLOCK_D == 64:  # Hopper's products have 64 rows
                dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision=PRECISION)) * back
            else:
                dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * back
            store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)
        lse = next_lse
        delta_row = next_delta
    dk *= back
    dvalue /= keep
    if dbias_ptr is not None:
        tl.store(dbias_ptr + columns, dbias / keep, mask=columns < count)
    if RUN:
        if window > 1:
            if BN * BLOCK_D >= 4096:  # one half after the other: there are no registers for the tiles of all points
                one_dk, other_dk = halves(dk, BN, BLOCK_D)
                one_dv, other_dv = halves(dvalue, BN, BLOCK_DV)
                one = block * BN + tl.arange(0, BN // 2)
                store_windows(
                    one_dk, one_dv, dk_ptr, dv_ptr, dk_row, dv_row, one, window, tokens, tokens_k_ptr, tokens_v_ptr,
                    tk_row, tv_row, q_base, grad_base, q_row, grad_row, rows_ptr, width, L, seed, scale, threshold,
                    keep, D, DV, BLOCK_D, BLOCK_DV, DROPOUT,
                )  # fmt: skip
                store_windows(
                    other_dk, other_dv, dk_ptr, dv_ptr, dk_row, dv_row, one + BN // 2, window, tokens, tokens_k_ptr,
                    tokens_v_ptr, tk_row, tv_row, q_base, grad_base, q_row, grad_row, rows_ptr, width, L, seed, scale,
                    threshold, keep, D, DV, BLOCK_D, BLOCK_DV, DROPOUT,
                )  # fmt: skip
            else:
                store_windows(
                    dk, dvalue, dk_ptr, dv_ptr, dk_row, dv_row, columns, window, tokens, tokens_k_ptr, tokens_v_ptr,
                    tk_row, tv_row, q_base, grad_base, q_row, grad_row, rows_ptr, width, L, seed, scale, threshold,
                    keep, D, DV, BLOCK_D, BLOCK_DV, DROPOUT,
                )  # fmt: skip
        else:
            store_points(
                dk, dvalue, dk_ptr, dv_ptr, dk_row, dv_row, columns, count, expand, tokens, D, DV, BLOCK_D, BLOCK_DV
            )
    else:
        store_points(
            dk, dvalue, dk_ptr, dv_ptr, dk_row, dv_row, columns, count, expand, tokens, D, DV, BLOCK_D, BLOCK_DV
        )


@triton.jit
def backward_queries_blocks(
    dq, q, grad, lse, delta_row, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, phase, span, step, phase_span,
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
        p = weight(s - lse[:, None])
        p = in_pattern(p, 0.0, columns[None, :], near[:, None], phase[:, None], span, step, phase_span, PATTERN)
        if MASKED:
            p = tl.where(columns[None, :] < seen[:, None], p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            dropped = drop(p, row_bits[:, None], hash_columns(seed, columns)[None, :], threshold)
        ds = score_gradient(p, dropped, dp, delta_row[:, None], DROPOUT)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq
