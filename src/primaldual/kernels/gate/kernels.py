# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Outputs times a sigmoid, and the gradients of both, as Triton kernels: one pass over memory each way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(L, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr):
    """BR rows, those of all heads of a token after one another: token, head, whether they are there; their columns."""
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    token = (at // H).to(tl.int64)
    c = tl.arange(0, BLOCK)
    return token, at % H, token < L, c, (token < L)[:, None] & (c < D)[None, :]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gate(
    x_ptr, g_ptr, to_ptr, x_batch, x_head, x_row, g_batch, g_head, g_row, to_batch, to_head, to_row, L,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """x ⊙ σ(g), with a g for each channel (EACH) or one for all of a row."""
    batch = tl.program_id(1).to(tl.int64)
    token, head, here, c, inside = _rows(L, H, D, BLOCK, BR)
    x = tl.load(x_ptr + batch * x_batch + (token * x_row + head * x_head)[:, None] + c[None, :], mask=inside, other=0.0)
    g_at = g_ptr + batch * g_batch + token * g_row + head * g_head
    if EACH:
        g = tl.load(g_at[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(g_at, mask=here, other=0.0).to(tl.float32)[:, None]
    found = x.to(tl.float32) * _sigmoid(g)
    to = to_ptr + batch * to_batch + (token * to_row + head * to_head)[:, None] + c[None, :]
    tl.store(to, found.to(to_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(
    up_ptr, x_ptr, g_ptr, dx_ptr, dg_ptr, up_batch, up_head, up_row, x_batch, x_head, x_row, g_batch, g_head, g_row,
    dx_batch, dx_head, dx_row, dg_batch, dg_head, dg_row, L,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """dx = up ⊙ σ,  dg = up ⊙ x ⊙ σ (1 − σ); its sum over the row where all channels have one g."""
    batch = tl.program_id(1).to(tl.int64)
    token, head, here, c, inside = _rows(L, H, D, BLOCK, BR)
    up_at = up_ptr + batch * up_batch + (token * up_row + head * up_head)[:, None] + c[None, :]
    x_at = x_ptr + batch * x_batch + (token * x_row + head * x_head)[:, None] + c[None, :]
    up = tl.load(up_at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    g_at = g_ptr + batch * g_batch + token * g_row + head * g_head
    dg_at = dg_ptr + batch * dg_batch + token * dg_row + head * dg_head
    if EACH:
        open = _sigmoid(tl.load(g_at[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32))
        dg = up * x * open * (1.0 - open)
        tl.store(dg_at[:, None] + c[None, :], dg.to(dg_ptr.dtype.element_ty), mask=inside)
    else:
        one = _sigmoid(tl.load(g_at, mask=here, other=0.0).to(tl.float32))
        tl.store(dg_at, (tl.sum(up * x, 1) * one * (1.0 - one)).to(dg_ptr.dtype.element_ty), mask=here)
        open = one[:, None]
    dx_at = dx_ptr + batch * dx_batch + (token * dx_row + head * dx_head)[:, None] + c[None, :]
    tl.store(dx_at, (up * open).to(dx_ptr.dtype.element_ty), mask=inside)
