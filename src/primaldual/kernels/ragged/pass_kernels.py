# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Passes over memory around the attention of heads, as Triton kernels: what `passes` launches."""

from __future__ import annotations

import triton
import triton.language as tl

from ..sums import sum_of_rows, window_size
from .parts import begin, lead, load, points_of, row_share, store, taken_off


@triton.jit
def pool(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, sum_ptr, table_ptr, k_batch, k_head, k_row, v_batch, v_head, v_row, H, tokens,
    blocks, before,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    LONG: tl.constexpr, HAS_SUM: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The means of keys and values over each head's windows, but for the heads in the `before` first rows of the table;
    and sums of these means, one per block, for μ.

    A block of BN tokens is read once, and a product with the matrix of who belongs to which window adds them up. Every
    program does several, so that few are enough: what needs nothing of them can run beside them from the start. Where
    some windows are LONG, longer than BN, each of these is a block.
    """
    batch = tl.program_id(2).to(tl.int64)
    head_row = before + tl.program_id(1)
    head, count, window, k_start, k_stride, v_start, v_stride = points_of(table_ptr, head_row, batch, ALIGNED)
    lead(PDL)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    k_out_ptr += k_start
    v_out_ptr += v_start
    if HAS_SUM:
        sum_ptr += (batch * H + head) * blocks * D
    if LONG and window > BN:
        for point in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
            first, stop = point * window, tl.minimum(point * window + window, tokens)
            share = 1.0 / tl.maximum(stop - first, 1).to(tl.float32)
            k_mean = sum_of_rows(k_ptr, first, stop, k_row, d, D, BLOCK_D, BN) * share
            v_mean = sum_of_rows(v_ptr, first, stop, v_row, dv, DV, BLOCK_DV, BN) * share
            k_at, v_at = k_out_ptr + point * k_stride + d, v_out_ptr + point * v_stride + dv
            tl.store(k_at, k_mean.to(k_out_ptr.dtype.element_ty), mask=(point < count) & (d < D))
            tl.store(v_at, v_mean.to(v_out_ptr.dtype.element_ty), mask=(point < count) & (dv < DV))
            if HAS_SUM:
                tl.store(sum_ptr + point * D + d, k_mean, mask=d < D)
    else:
        place = tl.arange(0, BN)
        whole = BN // window  # points of a block
        belongs = (place[None, :] // window == place[:, None]).to(k_ptr.dtype.element_ty)
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
            rows = block * whole * window + place
            here = ((place < whole * window) & (rows < tokens))[:, None]
            k = tl.load(k_ptr + rows[:, None] * k_row + d[None, :], mask=here & (d[None, :] < D), other=0.0)
            v = tl.load(v_ptr + rows[:, None] * v_row + dv[None, :], mask=here & (dv[None, :] < DV), other=0.0)
            points = block * whole + place
            share = (1.0 / window_size(points * window, tokens, window).to(tl.float32))[:, None]
            k_mean = tl.dot(belongs, k, input_precision="ieee") * share
            v_mean = tl.dot(belongs, v, input_precision="ieee") * share
            limit = tl.minimum(block * whole + whole, count)
            store(k_out_ptr + points[:, None] * k_stride + d[None, :], k_mean, points, limit, d, D)
            store(v_out_ptr + points[:, None] * v_stride + dv[None, :], v_mean, points, limit, dv, DV)
            if HAS_SUM:
                total = tl.sum(tl.where((points < limit)[:, None], k_mean, 0.0), 0)
                tl.store(sum_ptr + block * D + d, total, mask=d < D)


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
def _head_of(table_ptr):
    """The head that a program works on, and its windows' size, which counts where there is a table."""
    head = tl.program_id(1)
    size = 1
    if table_ptr is not None:
        size = tl.load(table_ptr + head * 9 + 2).to(tl.int32)
        head = tl.load(table_ptr + head * 9).to(tl.int32)
    return head, size


@triton.jit
def place(
    from_ptr, sums_ptr, beta_ptr, to_ptr, table_ptr, from_batch, from_head, from_row, to_batch, to_head, to_row, H,
    rows, window, blocks, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """to[b, h, i] = from[b, h, ⌊i/window⌋] / window − what `sums` take off, times the row's share in a head's mean
    where there is a table."""
    batch = tl.program_id(2).to(tl.int64)
    head, size = _head_of(table_ptr)
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
    head, size = _head_of(table_ptr)
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
