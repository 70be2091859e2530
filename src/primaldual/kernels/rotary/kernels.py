# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Queries and keys turned by the angles of their places, as a Triton kernel: one pass over memory for both."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turn_rows(
    x_ptr, to_ptr, table_ptr, batch, x_batch, x_head, x_row, to_batch, to_head, to_row, table_batch, L,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    BR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """BR rows, those of all heads of a token after one another: they read the same angles."""
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    token = (at // H).to(tl.int64)
    head = at % H
    here = (token < L)[:, None]
    c = tl.arange(0, BLOCK)
    inside = here & (c < HALF)[None, :]
    angles = table_ptr + batch * table_batch + token[:, None] * (2 * HALF) + c[None, :]
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + HALF, mask=inside, other=0.0)
    if BACK:
        sin = -sin
    rows = x_ptr + batch * x_batch + (token * x_row + head * x_head)[:, None]
    to = to_ptr + batch * to_batch + (token * to_row + head * to_head)[:, None]
    one = tl.load(rows + c[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(rows + (HALF + c)[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(to + c[None, :], (one * cos - other * sin).to(to_ptr.dtype.element_ty), mask=inside)
    tl.store(to + (HALF + c)[None, :], (other * cos + one * sin).to(to_ptr.dtype.element_ty), mask=inside)
    if REST:
        r = tl.arange(0, BLOCK_REST)
        left = here & (r < REST)[None, :]
        rest = tl.load(rows + (2 * HALF + r)[None, :], mask=left, other=0.0)
        tl.store(to + (2 * HALF + r)[None, :], rest, mask=left)


@triton.jit
def turn(
    q_ptr, k_ptr, to_q_ptr, to_k_ptr, q_table_ptr, k_table_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
    to_q_batch, to_q_head, to_q_row, to_k_batch, to_k_head, to_k_row, q_table_batch, k_table_batch, LQ, LK,
    HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, BR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Channels c and HALF + c of every row by the angle c of its place; by the opposite one, BACK. REST are copied."""
    batch = tl.program_id(2).to(tl.int64)
    if tl.program_id(1) == 0:
        _turn_rows(
            q_ptr, to_q_ptr, q_table_ptr, batch, q_batch, q_head, q_row, to_q_batch, to_q_head, to_q_row,
            q_table_batch, LQ, HQ, HALF, BLOCK, REST, BLOCK_REST, BR, BACK,
        )  # fmt: skip
    else:
        _turn_rows(
            k_ptr, to_k_ptr, k_table_ptr, batch, k_batch, k_head, k_row, to_k_batch, to_k_head, to_k_row,
            k_table_batch, LK, HK, HALF, BLOCK, REST, BLOCK_REST, BR, BACK,
        )  # fmt: skip
