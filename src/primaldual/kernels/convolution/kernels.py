# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"
"""Every channel of every head by taps of its own along the tokens, as Triton kernels: one pass over memory each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve(
    x_ptr, taps_ptr, to_ptr, x_batch, x_head, x_row, to_batch, to_head, to_row, taps_head, taps_channel, taps_tap, L,
    LEFT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """y_i = Σ_t w_t ⊙ x_{i+t−LEFT}, tokens beyond the ends being zero; the taps in the opposite order, BACK."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BD)
    channel = (c < D)[None, :]
    rows = x_ptr + batch * x_batch + head * x_head
    taps = taps_ptr + head * taps_head + c * taps_channel
    total = tl.zeros((BR, BD), dtype=tl.float32)
    for t in tl.static_range(SIZE):
        token = at + (t - LEFT)
        here = ((token >= 0) & (token < L))[:, None] & channel
        x = tl.load(rows + token.to(tl.int64)[:, None] * x_row + c[None, :], mask=here, other=0.0)
        w = tl.load(taps + (SIZE - 1 - t if BACK else t) * taps_tap, mask=c < D, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)[None, :]
    to = to_ptr + batch * to_batch + head * to_head + at.to(tl.int64)[:, None] * to_row + c[None, :]
    tl.store(to, total.to(to_ptr.dtype.element_ty), mask=(at < L)[:, None] & channel)


@triton.jit
def correlate(
    up_ptr, x_ptr, to_ptr, up_batch, up_head, up_row, x_batch, x_head, x_row, L, SPANS,
    LEFT: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Σ_i up_i ⊙ x_{i+t−LEFT} for every tap, over STEPS blocks of BR tokens: to [B, H, SPANS, SIZE, D]."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    span, heads = tl.program_id(0), tl.num_programs(1)
    c = tl.arange(0, BD)
    channel = (c < D)[None, :]
    ups, rows = up_ptr + batch * up_batch + head * up_head, x_ptr + batch * x_batch + head * x_head
    taps = tl.arange(0, BT)
    total = tl.zeros((BT, BD), dtype=tl.float32)
    for step in range(STEPS):
        at = (span * STEPS + step) * BR + tl.arange(0, BR)
        up = tl.load(ups + at.to(tl.int64)[:, None] * up_row + c[None, :], mask=(at < L)[:, None] & channel, other=0.0)
        for t in tl.static_range(SIZE):
            token = at + (t - LEFT)
            here = ((token >= 0) & (token < L))[:, None] & channel
            x = tl.load(rows + token.to(tl.int64)[:, None] * x_row + c[None, :], mask=here, other=0.0)
            found = tl.sum(up.to(tl.float32) * x.to(tl.float32), 0)
            total += tl.where((taps == t)[:, None], found[None, :], 0.0)
    to = to_ptr + (((batch * heads + head) * SPANS + span) * SIZE) * D
    tl.store(to + taps[:, None] * D + c[None, :], total, mask=(taps < SIZE)[:, None] & channel)
