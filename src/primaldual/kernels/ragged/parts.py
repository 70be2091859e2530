# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""What the ragged kernels share: when a program may begin, where things lie, what a query sees, what dropout drops."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..dropout import COMPILED, mix
from ..sums import window_size

LOG2E = tl.constexpr(1.4426950408889634)
OWN = tl.constexpr(1 << 30)  # the column, to dropout, of a query's own point
GIVEN = tl.constexpr(1)  # where that comes from: from memory, or
RUNNING = tl.constexpr(2)  # it is the mean of the query's own window up to it


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next launch get ready while this one runs, and wait for what the one before has written."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def lead(PDL: tl.constexpr):
    """Wait, and only then let the next launch begin: what needs nothing of this one can run beside it (`follow`)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def follow(waits, PDL: tl.constexpr):
    """As `begin`, after a launch that leads: only programs that need what it writes wait for it."""
    if PDL:
        gdc_launch_dependents()
        if waits:
            gdc_wait()


@triton.jit
def hash_rows(seed, batch_head, rows):
    return mix(mix(seed ^ batch_head.to(tl.uint32)) + rows.to(tl.uint32)) | 1


@triton.jit
def hash_columns(seed, columns):
    """One hash for eight columns, 8 apart, that a thread holds; times powers of a multiplier for each of them."""
    place = columns >> 3 & 7
    x = mix((seed ^ 0x9E3779B9) + (columns & 7 | columns >> 6 << 3).to(tl.uint32) * 0x9E3779B1) | 1
    x *= tl.where((place & 1) == 0, 1, 0x915F77F5).to(tl.uint32)
    x *= tl.where((place & 2) == 0, 1, 0xCA0BB079).to(tl.uint32)
    return x * tl.where((place & 4) == 0, 1, 0x980C9931).to(tl.uint32)


@triton.jit
def load(pointers, rows, limit, columns, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
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
def store(pointers, tile, rows, limit, columns, D: tl.constexpr):
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=(rows[:, None] < limit) & (columns[None, :] < D))


@triton.jit
def taken_off(
    sums_ptr, beta_ptr, batch_head, head, blocks, factor, D: tl.constexpr, BLOCK_D: tl.constexpr, BP: tl.constexpr
):
    """factor · β[head] · Σ sums[batch_head, block], over at most BP blocks; without β, as if it were 1."""
    d = tl.arange(0, BLOCK_D)
    block = tl.arange(0, BP)
    here = (block[:, None] < blocks) & (d[None, :] < D)
    sums_ptr += batch_head * blocks * D
    off = tl.sum(tl.load(sums_ptr + block[:, None] * D + d[None, :], mask=here, other=0.0), 0) * factor
    if beta_ptr is not None:
        off *= tl.load(beta_ptr + head)
    return off


@triton.jit
def row_share(at, rows, window):
    """Of a row in the mean over the means of windows, of which the last may not be whole."""
    size = window_size(at // window * window, rows, window)
    return 1.0 / (size * ((rows + window - 1) // window)).to(tl.float32)


@triton.jit
def points_of(table_ptr, head_row, batch, ALIGNED: tl.constexpr):
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
def tokens_of(
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
def strides(batch, head, row, EIGHTS: tl.constexpr):
    """Strides that, to the compiler too, are multiples of 8 where EIGHTS says so: Triton itself looks for 16."""
    if EIGHTS:
        return batch // 8 * 8, head // 8 * 8, row // 8 * 8
    else:
        return batch, head, row


@triton.jit
def visible(rows, count, window):
    """How many of a causal head's points each query sees: tokens up to it, or the windows complete before its own."""
    seen = tl.where(window == 1, rows + 1, rows // window)
    return tl.minimum(seen, count)


@triton.jit
def reach(rows, block, L, count, window, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """How many points each row sees; up to where all rows of the block see whole blocks of them; and where all end."""
    if CAUSAL:
        seen = visible(rows, count, window)
        end = visible(tl.minimum((block + 1) * BM, L) - 1, count, window)
        clear = visible(block * BM, count, window)
    else:
        seen = tl.full((BM,), 0, tl.int32) + count
        end = count
        clear = count
    return seen, clear // BN * BN, end


@triton.jit
def running_means(tokens, rows, window, PRECISION: tl.constexpr):
    """Each token's window up to it, in the mean, float32: of a tile whose first row begins a window."""
    earlier = (rows[None, :] <= rows[:, None]) & (rows[None, :] // window == rows[:, None] // window)
    sums = tl.dot(earlier.to(tokens.dtype), tokens, input_precision=PRECISION)
    return sums / (rows % window + 1).to(tl.float32)[:, None]


@triton.jit
def pattern_of(marks_ptr, PATTERN: tl.constexpr):
    """span, step and phase_span of a head's pattern."""
    if PATTERN == 0:
        return 0, 0, 0
    elif PATTERN == 1:
        return tl.load(marks_ptr), 0, 0
    else:
        return tl.load(marks_ptr), tl.load(marks_ptr + 1), tl.load(marks_ptr + 2)


@triton.jit
def places_of(marks_ptr, width, rows, PATTERN: tl.constexpr):
    """start and phase of these queries; the rows themselves where a pattern has no use for them."""
    if PATTERN == 0:
        return rows, rows
    elif PATTERN == 1:
        return tl.load(marks_ptr + width + rows), rows
    else:
        return tl.load(marks_ptr + width + rows), tl.load(marks_ptr + 2 * width + rows)


@triton.jit
def in_pattern(x, otherwise, points, start, phase, span, step, phase_span, PATTERN: tl.constexpr):
    """What a pattern keeps of x: points − start ≤ span or, where PATTERN is 2, points · step + phase ≤ phase_span.

    All modulo 2³². As assembly for the reason that `drop` is.
    """
    if PATTERN == 0:
        return x
    elif COMPILED and PATTERN == 1:
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
    elif COMPILED:
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
            "=r,r,r,r,r,r,r,r,r", [x, otherwise, points, start, span, step, phase, phase_span], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        kept = (points - start).to(tl.uint32) <= span.to(tl.uint32)
        if PATTERN == 2:
            kept = kept | (points.to(tl.uint32) * step.to(tl.uint32) + phase.to(tl.uint32) <= phase_span.to(tl.uint32))
        return tl.where(kept, x, otherwise)
