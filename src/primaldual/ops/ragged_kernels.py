# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Attention in which every head has its own number of keys, as Triton kernels.

The points (keys and values) of all heads lie in one buffer each. A row of `table` says where a head's points are, and
a row of `schedule` which piece of the work a program does: (head, batch, block), the longest pieces first, so that
the short heads fill the gaps that the long ones leave.

    s_ij = (q_i − shift)·k_j · scale + bias_j,   p_ij = exp(s_ij − lse_i),   out_i = Σ_j p_ij v_j

`shift` re-centres a head's queries; the backward pass is given the queries as they were rounded after it. A causal head
whose windows hold `window` tokens sees the complete windows before its own, and one point of its own. Of a sparse head
all scores are computed, and those that its pattern keeps take part (`_kept`; `ragged_marks` says what the marks are).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COLUMNS = 9
"""Of the table: head, points, window, and offset, batch stride and row stride of its keys and of its values."""

_LOG2E = tl.constexpr(1.4426950408889634)
_OWN = tl.constexpr(1 << 30)  # the column, to dropout, of a query's own point


@triton.jit
def _begin(PDL: tl.constexpr):
    """Let the next launch get ready while this one runs, and wait for what the one before has written."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _lead(PDL: tl.constexpr):
    """Wait, and only then let the next launch begin: what needs nothing of this one can run beside it (`_follow`)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _follow(waits, PDL: tl.constexpr):
    """As `_begin`, after a launch that leads: only programs that need what it writes wait for it."""
    if PDL:
        gdc_launch_dependents()
        if waits:
            gdc_wait()


@triton.jit
def _mix(x):
    """A 32-bit hash."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _row_bits(seed, batch_head, rows):
    return _mix(_mix(seed ^ batch_head.to(tl.uint32)) + rows.to(tl.uint32)) | 1


@triton.jit
def _column_bits(seed, columns):
    """One hash for eight columns, 8 apart, that a thread holds; times powers of a multiplier for each of them."""
    place = columns >> 3 & 7
    x = _mix((seed ^ 0x9E3779B9) + (columns & 7 | columns >> 6 << 3).to(tl.uint32) * 0x9E3779B1) | 1
    x *= tl.where((place & 1) == 0, 1, 0x915F77F5).to(tl.uint32)
    x *= tl.where((place & 2) == 0, 1, 0xCA0BB079).to(tl.uint32)
    return x * tl.where((place & 4) == 0, 1, 0x980C9931).to(tl.uint32)


_COMPILED = tl.constexpr(isinstance(_mix, triton.JITFunction))


@triton.jit
def _drop(p, row_bits, column_bits, threshold):
    """The weights that are kept, zero for others: one multiplication a score, of odd hashes, so that it is uniform.

    As assembly the comparison stays with the selection. Apart they run out of predicate registers, or select after p
    is rounded, one half of a register at a time: either way twice the instructions.
    """
    threshold = threshold.to(tl.uint32)
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred kept;
            .reg .u32 bits;
            mul.lo.u32 bits, $2, $3;
            setp.ge.u32 kept, bits, $4;
            selp.f32 $0, $1, 0f00000000, kept;
            }""",
            "=r,r,r,r,r", [p, row_bits, column_bits, threshold], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.where(row_bits * column_bits >= threshold, p, 0.0)


@triton.jit
def _weight(x):
    """2^x, for a score less its log-sum-exp: at most 1, also where scores of 10⁷ and more are rounded by more than 1.

    Beyond the last point, where keys and values are zeros, it is thus finite too, and adds nothing.
    """
    return tl.exp2(tl.minimum(x, 0.0))


@triton.jit
def _numbers(marks_ptr, PATTERN: tl.constexpr):
    """span, step and arc of a head's pattern."""
    if PATTERN == 0:
        return 0, 0, 0
    elif PATTERN == 1:
        return tl.load(marks_ptr), 0, 0
    else:
        return tl.load(marks_ptr), tl.load(marks_ptr + 1), tl.load(marks_ptr + 2)


@triton.jit
def _places(marks_ptr, width, rows, PATTERN: tl.constexpr):
    """start and turn of these queries; the rows themselves where a pattern has no use for them."""
    if PATTERN == 0:
        return rows, rows
    elif PATTERN == 1:
        return tl.load(marks_ptr + width + rows), rows
    else:
        return tl.load(marks_ptr + width + rows), tl.load(marks_ptr + 2 * width + rows)


@triton.jit
def _kept(x, otherwise, points, start, turn, span, step, arc, PATTERN: tl.constexpr):
    """What a pattern keeps of x, modulo 2³²: points − start ≤ span or, where PATTERN is 2, points · step + turn ≤ arc.

    As assembly for the reason that `_drop` is.
    """
    if PATTERN == 0:
        return x
    elif _COMPILED and PATTERN == 1:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred kept;
            .reg .u32 away;
            sub.u32 away, $3, $4;
            setp.le.u32 kept, away, $5;
            selp.f32 $0, $1, $2, kept;
            }""",
            "=r,r,r,r,r,r", [x, otherwise, points, start, span], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif _COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred near, kept;
            .reg .u32 away;
            sub.u32 away, $3, $4;
            setp.le.u32 near, away, $5;
            mad.lo.u32 away, $3, $6, $7;
            setp.le.or.u32 kept, away, $8, near;
            selp.f32 $0, $1, $2, kept;
            }""",
            "=r,r,r,r,r,r,r,r,r", [x, otherwise, points, start, span, step, turn, arc], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        kept = (points - start).to(tl.uint32) <= span.to(tl.uint32)
        if PATTERN == 2:
            kept = kept | (points.to(tl.uint32) * step.to(tl.uint32) + turn.to(tl.uint32) <= arc.to(tl.uint32))
        return tl.where(kept, x, otherwise)


@triton.jit
def _score_gradient(p, dropped, dp, delta_row, DROPOUT: tl.constexpr):
    """keep · ds, of keep · delta."""
    if DROPOUT:
        return dropped * dp - p * delta_row
    else:
        return p * (dp - delta_row)


@triton.jit
def _load(pointers, rows, limit, columns, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """A tile of rows; zeros beyond `limit` rows and D columns."""
    if MASKED and BLOCK_D != D:
        return tl.load(pointers, mask=(rows[:, None] < limit) & (columns[None, :] < D), other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
    elif BLOCK_D != D:
        return tl.load(pointers, mask=columns[None, :] < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(pointers, tile, rows, limit, columns, D: tl.constexpr):
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=(rows[:, None] < limit) & (columns[None, :] < D))


@triton.jit
def _load_lse(pointer, rows, limit):
    """In units of log 2; +inf where a query sees nothing, so that its weights are zero."""
    lse = tl.load(pointer + rows, mask=rows < limit, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E)


@triton.jit
def _points(table_ptr, head_row, batch, ALIGNED: tl.constexpr):
    """A head's row of the table: head, points, window, and where its keys and values start and how their rows lie."""
    row = table_ptr + head_row * 9
    head = tl.load(row).to(tl.int32)
    count = tl.load(row + 1).to(tl.int32)
    window = tl.load(row + 2).to(tl.int32)
    k_start = tl.load(row + 3) + batch * tl.load(row + 4)
    k_stride = tl.load(row + 5).to(tl.int32)
    v_start = tl.load(row + 6) + batch * tl.load(row + 7)
    v_stride = tl.load(row + 8).to(tl.int32)
    if ALIGNED:
        k_start = tl.multiple_of(k_start, 8)
        v_start = tl.multiple_of(v_start, 8)
        k_stride = tl.multiple_of(k_stride, 8)
        v_stride = tl.multiple_of(v_stride, 8)
    return head, count, window, k_start, k_stride, v_start, v_stride


@triton.jit
def _tokens(
    k_start, k_stride, v_start, v_stride, k_ptr, v_ptr, tokens_k_ptr, tokens_v_ptr, k_batch, k_head, k_row, v_batch,
    v_head, v_row, batch, head, window, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where keys and values of a head start, and their strides: with windows of one token they are the tokens' own."""
    size: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    k_away = (tokens_k_ptr.to(tl.int64) - k_ptr.to(tl.int64)) // size + batch * k_batch + head * k_head
    v_away = (tokens_v_ptr.to(tl.int64) - v_ptr.to(tl.int64)) // size + batch * v_batch + head * v_head
    k_start = tl.where(window == 1, k_away, k_start)
    v_start = tl.where(window == 1, v_away, v_start)
    k_stride = tl.where(window == 1, k_row, k_stride)
    v_stride = tl.where(window == 1, v_row, v_stride)
    if ALIGNED:
        k_start = tl.multiple_of(k_start, 8)
        v_start = tl.multiple_of(v_start, 8)
        k_stride = tl.multiple_of(k_stride, 8)
        v_stride = tl.multiple_of(v_stride, 8)
    return k_start, k_stride, v_start, v_stride


@triton.jit
def _strides(batch, head, row, EIGHTS: tl.constexpr):
    """Strides that, to the compiler too, are multiples of 8 where EIGHTS says so: Triton itself looks for 16."""
    if EIGHTS:
        return batch // 8 * 8, head // 8 * 8, row // 8 * 8
    else:
        return batch, head, row


@triton.jit
def _visible(rows, count, window):
    """How many of a causal head's points each query sees: tokens up to it, or the windows complete before its own."""
    seen = tl.where(window == 1, rows + 1, rows // window)
    return tl.minimum(seen, count)


@triton.jit
def _reach(rows, block, L, count, window, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """How many points each row sees; up to where all rows of the block see whole blocks of them; and where all end."""
    if CAUSAL:
        seen = _visible(rows, count, window)
        end = _visible(tl.minimum((block + 1) * BM, L) - 1, count, window)
        clear = _visible(block * BM, count, window)
    else:
        seen = tl.full((BM,), 0, tl.int32) + count
        end = count
        clear = count
    return seen, clear // BN * BN, end


@triton.jit
def _forward_blocks(
    acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc,
    start, end, row_bits, seed, threshold, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, PATTERN: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over the points [start, end); `seen` is how many of them each row sees, where MASKED."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for first in tl.range(start, end, BN):
        columns = first + tl.arange(0, BN)
        k = _load(k_ptr + columns[:, None] * k_stride + d[None, :], columns, end, d, D, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_BIAS:
            if MASKED:
                bias = tl.load(bias_ptr + columns, mask=columns < end, other=float("-inf"))
            else:
                bias = tl.load(bias_ptr + columns)
            s += bias[None, :] * (_LOG2E / scale)
        s = _kept(s, float("-inf"), columns[None, :], near[:, None], turn[:, None], span, step, arc, PATTERN)
        if MASKED:
            s = tl.where(columns[None, :] < seen[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        if MASKED or HAS_BIAS or PATTERN:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            base = m_new
        p = tl.exp2(s * scale - base[:, None])
        fade = tl.exp2(m - base)
        total = total * fade + tl.sum(p, 1)
        if DROPOUT:
            p = _drop(p, row_bits[:, None], _column_bits(seed, columns)[None, :], threshold)
        v = _load(v_ptr + columns[:, None] * v_stride + dv[None, :], columns, end, dv, DV, BLOCK_DV, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, total


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, shift_ptr, bias_ptr, own_k_ptr, own_v_ptr, own_bias_ptr, out_ptr, lse_ptr, seed_ptr,
    tokens_k_ptr, tokens_v_ptr, marks_ptr, table_ptr, schedule_ptr, q_batch, q_head, q_row, out_batch, out_head,
    out_row, tk_batch, tk_head, tk_row, tv_batch, tv_head, tv_row, bias_width, marks_width, H, L, scale, threshold,
    keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OWN: tl.constexpr,
    DROPOUT: tl.constexpr, PATTERN: tl.constexpr, HAS_TOKENS: tl.constexpr, ALIGNED: tl.constexpr,
    EIGHTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out and log-sum-exp (−inf where a query sees nothing) of one block of queries.

    With HAS_TOKENS, `pool` has come right before, and heads with windows of one token need nothing of it.
    """
    task = schedule_ptr + tl.program_id(0) * 4
    head_row = tl.load(task + 1)
    batch = tl.load(task + 2).to(tl.int64)
    block = tl.load(task + 3)
    head, count, window, k_start, k_stride, v_start, v_stride = _points(table_ptr, head_row, batch, ALIGNED)
    if HAS_TOKENS:
        k_start, k_stride, v_start, v_stride = _tokens(
            k_start, k_stride, v_start, v_stride, k_ptr, v_ptr, tokens_k_ptr, tokens_v_ptr, tk_batch, tk_head, tk_row,
            tv_batch, tv_head, tv_row, batch, head, window, ALIGNED,
        )  # fmt: skip
        _follow(window > 1, PDL)
    else:
        _begin(PDL)
    rows = block * BM + tl.arange(0, BM)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_batch, q_head, q_row = _strides(q_batch, q_head, q_row, EIGHTS)
    out_batch, out_head, out_row = _strides(out_batch, out_head, out_row, EIGHTS)
    q_base = q_ptr + batch * q_batch + head * q_head
    q = _load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, True)
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + (batch * H + head) * D + d, mask=d < D, other=0.0)
        q = (q.to(tl.float32) - shift[None, :]).to(q.dtype)
    seed = 0
    row_bits = rows
    if DROPOUT:
        seed = tl.load(seed_ptr).to(tl.uint32)
        row_bits = _row_bits(seed, batch * H + head, rows)
    k_ptr += k_start
    v_ptr += v_start
    if HAS_BIAS:
        bias_ptr += (batch * H + head) * bias_width
    if PATTERN:
        marks_ptr += head * (1 + PATTERN) * marks_width
    acc = tl.zeros((BM, BLOCK_DV), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    seen, clear, end = _reach(rows, block, L, count, window, BM, BN, CAUSAL)
    span, step, arc = _numbers(marks_ptr, PATTERN)
    near, turn = _places(marks_ptr, marks_width, rows, PATTERN)
    acc, m, total = _forward_blocks(
        acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc, 0, clear,
        row_bits, seed, threshold, scale, D, DV, BLOCK_D, BLOCK_DV, BN, False, HAS_BIAS, PATTERN, DROPOUT, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_blocks(
        acc, m, total, q, k_ptr, v_ptr, k_stride, v_stride, bias_ptr, seen, near, turn, span, step, arc, clear,
        end, row_bits, seed, threshold, scale, D, DV, BLOCK_D, BLOCK_DV, BN, True, HAS_BIAS, PATTERN, DROPOUT,
        PRECISION,
    )  # fmt: skip
    if HAS_OWN:
        own = (batch * H + head) * L + rows
        own_k = _load(own_k_ptr + own[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True).to(tl.float32)
        own_v = _load(own_v_ptr + own[:, None] * DV + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
        s = tl.sum(q.to(tl.float32) * own_k, 1) * scale
        if HAS_BIAS:
            s += tl.load(own_bias_ptr + own, mask=rows < L, other=0.0) * _LOG2E
        s = tl.where(window > 1, s, float("-inf"))
        m_new = tl.maximum(m, s)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base)
        fade = tl.exp2(m - base)
        total = total * fade + p
        if DROPOUT:
            p = _drop(p, row_bits, _column_bits(seed, rows * 0 + _OWN), threshold)
        acc = acc * fade[:, None] + p[:, None] * own_v.to(tl.float32)
        m = m_new
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total * keep)[:, None]
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, total))) / _LOG2E)
    out_base = out_ptr + batch * out_batch + head * out_head
    _store(out_base + rows[:, None] * out_row + dv[None, :], out, rows, L, dv, DV)
    tl.store(lse_ptr + (batch * H + head) * L + rows, lse, mask=rows < L)


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
    _begin(PDL)
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dv = tl.arange(0, BLOCK_DV)
    out_batch, out_head, out_row = _strides(out_batch, out_head, out_row, EIGHTS)
    grad_batch, grad_head, grad_row = _strides(grad_batch, grad_head, grad_row, EIGHTS)
    out_base = out_ptr + batch * out_batch + head * out_head
    grad_base = grad_ptr + batch * grad_batch + head * grad_head
    out = _load(out_base + rows[:, None] * out_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
    grad = _load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
    total = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if sum_ptr is not None:
        place = (tl.program_id(1).to(tl.int64) * width + tl.program_id(0) * BM) * BLOCK_D
        tl.store(sum_ptr + place + tl.arange(0, BM * BLOCK_D), tl.zeros((BM * BLOCK_D,), tl.float32))
    if SWEEP:
        at = delta_ptr + (batch * H + head) * 3 * width + rows
        tl.store(at, _load_lse(lse_ptr + (batch * H + head) * L, rows, L))
        tl.store(at + width, total * keep)
        if DROPOUT:
            bits = _row_bits(tl.load(seed_ptr).to(tl.uint32), batch * H + head, rows)
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
    back = scale / (_LOG2E * keep)  # from keep · ds to gradients
    columns = first + tl.arange(0, BN)
    k = _load(k_ptr + columns[:, None] * k_stride + d[None, :], columns, count, d, D, BLOCK_D, True)
    v = _load(v_ptr + columns[:, None] * v_stride + dv[None, :], columns, count, dv, DV, BLOCK_DV, True)
    bias = tl.zeros((BN,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + columns, mask=columns < count, other=float("-inf")) * _LOG2E
    column_bits = columns
    if DROPOUT:
        column_bits = _column_bits(seed, columns)
    span, step, arc = _numbers(marks_ptr, PATTERN)
    dk = tl.zeros((BN, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BN, BLOCK_DV), tl.float32)
    for start in tl.range(0, L, BM):
        rows = start + tl.arange(0, BM)
        q = _load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, not EVEN)
        grad = _load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, not EVEN)
        lse = tl.load(rows_ptr + rows)
        delta_row = tl.load(rows_ptr + width + rows)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if HAS_BIAS:
            p = _weight(s * scale + (bias[:, None] - lse[None, :]))
        else:
            p = _weight(s * scale - lse[None, :])
        near, turn = _places(marks_ptr, marks_width, rows, PATTERN)
        p = _kept(p, 0.0, columns[:, None], near[None, :], turn[None, :], span, step, arc, PATTERN)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            row_bits = tl.load(rows_ptr + 2 * width + rows).to(tl.uint32, bitcast=True)
            dropped = _drop(p, row_bits[None, :], column_bits[:, None], threshold)
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
        dq = _load(sum_ptr + rows[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True)
        _store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)


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
    k = _load(k_ptr + columns[:, None] * k_stride + d[None, :], columns, count, d, D, BLOCK_D, True)
    v = _load(v_ptr + columns[:, None] * v_stride + dv[None, :], columns, count, dv, DV, BLOCK_DV, True)
    back = scale / (_LOG2E * keep)  # from keep · ds to gradients
    bias = tl.zeros((BN,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + columns, mask=columns < count, other=float("-inf")) * _LOG2E
    column_bits = columns
    if DROPOUT:
        column_bits = _column_bits(seed, columns)
    span, step, arc = _numbers(marks_ptr, PATTERN)
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
        q = _load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, not EVEN)
        grad = _load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, not EVEN)
        next_lse = _load_lse(lse_base, rows + BM, L)  # one block ahead: nothing else hides its latency
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if HAS_BIAS:
            p = _weight(s * scale + (bias[:, None] - lse[None, :]))
        else:
            p = _weight(s * scale - lse[None, :])
        if CAUSAL:
            p = tl.where(columns[:, None] < _visible(rows, count, window)[None, :], p, 0.0)
        near, turn = _places(marks_ptr, marks_width, rows, PATTERN)
        p = _kept(p, 0.0, columns[:, None], near[None, :], turn[None, :], span, step, arc, PATTERN)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            dropped = _drop(p, _row_bits(seed, batch_head, rows)[None, :], column_bits[:, None], threshold)
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
            _store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)
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
        k = _load(k_ptr + columns[:, None] * k_stride + d[None, :], columns, end, d, D, BLOCK_D, MASKED)
        v = _load(v_ptr + columns[:, None] * v_stride + dv[None, :], columns, end, dv, DV, BLOCK_DV, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_BIAS:
            s += tl.load(bias_ptr + columns, mask=columns < end, other=float("-inf"))[None, :] * _LOG2E
        p = _weight(s - lse[:, None])
        p = _kept(p, 0.0, columns[None, :], near[:, None], turn[:, None], span, step, arc, PATTERN)
        if MASKED:
            p = tl.where(columns[None, :] < seen[:, None], p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            dropped = _drop(p, row_bits[:, None], _column_bits(seed, columns)[None, :], threshold)
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
    head, count, window, k_start, k_stride, v_start, v_stride = _points(table_ptr, head_row, batch, ALIGNED)
    if HAS_TOKENS:
        k_start, k_stride, v_start, v_stride = _tokens(
            k_start, k_stride, v_start, v_stride, k_ptr, v_ptr, tokens_k_ptr, tokens_v_ptr, tk_batch, tk_head, tk_row,
            tv_batch, tv_head, tv_row, batch, head, window, ALIGNED,
        )  # fmt: skip
    _begin(PDL)
    batch_head = batch * H + head
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr).to(tl.uint32)
    k_ptr += k_start
    v_ptr += v_start
    q_batch, q_head, q_row = _strides(q_batch, q_head, q_row, EIGHTS)
    grad_batch, grad_head, grad_row = _strides(grad_batch, grad_head, grad_row, EIGHTS)
    dq_batch, dq_head, dq_row = _strides(dq_batch, dq_head, dq_row, EIGHTS)
    dk_batch, dk_head, dk_row = _strides(dk_batch, dk_head, dk_row, EIGHTS)
    dv_batch, dv_head, dv_row = _strides(dv_batch, dv_head, dv_row, EIGHTS)
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
        q = _load(q_base + rows[:, None] * q_row + d[None, :], rows, L, d, D, BLOCK_D, True)
        grad = _load(grad_base + rows[:, None] * grad_row + dv[None, :], rows, L, dv, DV, BLOCK_DV, True)
        lse = _load_lse(lse_base, rows, L)
        delta_row = tl.load(delta_base + rows, mask=rows < L, other=0.0) * keep
        back = scale / (_LOG2E * keep)
        row_bits = rows
        if DROPOUT:
            row_bits = _row_bits(seed, batch_head, rows)
        seen, clear, end = _reach(rows, block, L, count, window, BM_Q, BN_Q, CAUSAL)
        span, step, arc = _numbers(marks_ptr, PATTERN)
        near, turn = _places(marks_ptr, marks_width, rows, PATTERN)
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
            own_k = _load(own_k_ptr + own[:, None] * D + d[None, :], rows, L, d, D, BLOCK_D, True).to(tl.float32)
            own_v = _load(own_v_ptr + own[:, None] * DV + dv[None, :], rows, L, dv, DV, BLOCK_DV, True).to(tl.float32)
            s = tl.sum(q.to(tl.float32) * own_k, 1) * scale
            if HAS_BIAS:
                s += tl.load(own_bias_ptr + own, mask=rows < L, other=0.0) * _LOG2E
            p = tl.where(window > 1, _weight(s - lse), 0.0)
            dp = tl.sum(grad.to(tl.float32) * own_v, 1)
            dropped = p
            if DROPOUT:
                dropped = _drop(p, row_bits, _column_bits(seed, rows * 0 + _OWN), threshold)
            ds = _score_gradient(p, dropped, dp, delta_row, DROPOUT)
            dq += ds[:, None] * own_k
            down_k = ds[:, None] * q.to(tl.float32) * back
            down_v = (dropped / keep)[:, None] * grad.to(tl.float32)
            _store(down_k_ptr + own[:, None] * D + d[None, :], down_k, rows, L, d, D)
            _store(down_v_ptr + own[:, None] * DV + dv[None, :], down_v, rows, L, dv, DV)
        dq *= back
        _store(dq_base + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)


@triton.jit
def settle(
    sum_ptr, dq_ptr, dq_batch, dq_head, dq_row, H, L, width, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, EIGHTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, from the sum of what the blocks of points have added."""
    _begin(PDL)
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    first = tl.program_id(0) * BM
    rows = first + tl.arange(0, BM)
    d = tl.arange(0, BLOCK_D)
    dq_batch, dq_head, dq_row = _strides(dq_batch, dq_head, dq_row, EIGHTS)
    sum_ptr += (batch * H + head) * width * BLOCK_D + first * BLOCK_D
    dq = tl.load(sum_ptr + tl.arange(0, BM * BLOCK_D)) * factor
    if BM < 64 and BLOCK_D >= 64:
        dq = tl.trans(_unflat(dq, BLOCK_D, BM))
    else:
        dq = _unflat(dq, BM, BLOCK_D)
    _store(dq_ptr + batch * dq_batch + head * dq_head + rows[:, None] * dq_row + d[None, :], dq, rows, L, d, D)


@triton.jit
def pool(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, sum_ptr, table_ptr, k_batch, k_head, k_row, v_batch, v_head, v_row, H, tokens,
    blocks, before,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    HAS_SUM: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The means of keys and values over each head's windows, but for the heads in the `before` first rows of the table;
    and sums of these means, one per block, for μ.

    A block of BN tokens is read once, and a product with the matrix of who belongs to which window adds them up.
    """
    block = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    head_row = before + tl.program_id(1)
    head, count, window, k_start, k_stride, v_start, v_stride = _points(table_ptr, head_row, batch, ALIGNED)
    _lead(PDL)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    place = tl.arange(0, BN)
    whole = BN // window  # points of a block
    rows = block * whole * window + place
    here = (place < whole * window) & (rows < tokens)
    k_at = k_ptr + batch * k_batch + head * k_head + rows[:, None] * k_row + d[None, :]
    v_at = v_ptr + batch * v_batch + head * v_head + rows[:, None] * v_row + dv[None, :]
    k = tl.load(k_at, mask=here[:, None] & (d[None, :] < D), other=0.0)
    v = tl.load(v_at, mask=here[:, None] & (dv[None, :] < DV), other=0.0)
    points = block * whole + place
    belongs = (place[None, :] // window == place[:, None]).to(k.dtype)
    size = tl.minimum(tokens - points * window, window)
    share = (1.0 / tl.maximum(size, 1).to(tl.float32))[:, None]
    k_mean = tl.dot(belongs, k, input_precision="ieee") * share
    v_mean = tl.dot(belongs, v, input_precision="ieee") * share
    limit = tl.minimum(block * whole + whole, count)
    _store(k_out_ptr + k_start + points[:, None] * k_stride + d[None, :], k_mean, points, limit, d, D)
    _store(v_out_ptr + v_start + points[:, None] * v_stride + dv[None, :], v_mean, points, limit, dv, DV)
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
    head, count, window, k_start, k_stride, v_start, v_stride = _points(table_ptr, tl.program_id(1), batch, ALIGNED)
    _begin(PDL)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    points = rows // window
    share = 1.0 / tl.minimum(tl.maximum(tokens - points * window, 1), window).to(tl.float32)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    dk = _load(dk_ptr + k_start + points[:, None] * k_stride + d[None, :], points, count, d, D, BLOCK_D, True)
    dvalue = _load(dv_ptr + v_start + points[:, None] * v_stride + dv[None, :], points, count, dv, DV, BLOCK_DV, True)
    dmean = tl.load(dmean_ptr + (batch * H + head) * D + d, mask=d < D, other=0.0) / count
    dk = (dk.to(tl.float32) + dmean[None, :]) * share[:, None]
    dvalue = dvalue.to(tl.float32) * share[:, None]
    dk_at = dk_out_ptr + batch * k_batch + head * k_head + rows[:, None] * k_row + d[None, :]
    dv_at = dv_out_ptr + batch * v_batch + head * v_head + rows[:, None] * v_row + dv[None, :]
    _store(dk_at, dk, rows, tokens, d, D)
    _store(dv_at, dvalue, rows, tokens, dv, DV)


@triton.jit
def place(
    from_ptr, to_ptr, add_ptr, from_batch, from_head, from_row, to_batch, to_head, to_row, H, rows, window, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, HAS_ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """to[b, h, i] = factor · (from[b, h, ⌊i/window⌋] + add[b, h])."""
    _begin(PDL)
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BLOCK_D)
    here = (at[:, None] < rows) & (d[None, :] < D)
    x = tl.load(
        from_ptr + batch * from_batch + head * from_head + (at // window)[:, None] * from_row + d[None, :],
        mask=here, other=0.0,
    ).to(tl.float32)  # fmt: skip
    if HAS_ADD:
        x += tl.load(add_ptr + (batch * H + head) * D + d, mask=d < D, other=0.0)[None, :]
    to_at = to_ptr + batch * to_batch + head * to_head + at[:, None] * to_row + d[None, :]
    tl.store(to_at, (x * factor).to(to_ptr.dtype.element_ty), mask=here)
