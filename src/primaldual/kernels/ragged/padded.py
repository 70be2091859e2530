"""Points of padded sequences for the ragged kernels: tokens where they lie, or all heads pooled in one launch.

Hidden tokens are zero, so the mean over the valid tokens of a window is that over all of its tokens, times size/valid.
That factor goes onto the tokens beforehand, and what is left is the pooling of whole sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..derivatives import differentiated_once
from ..kept import on_device
from ..launching import in_rows
from .layout import HeadLayout, Layout
from .passes import pool, unpool


class Padded(NamedTuple):
    """The points of all heads, flat as the layout says."""

    keys: Tensor
    values: Tensor
    mean: Tensor | None  # of the keys that exist, float32 [B, H, D]
    bias: Tensor  # float32 [B, H, points], −inf where a window has no valid token
    layout: Layout


def pool_padded(
    k: Tensor, v: Tensor, hidden: Tensor, scales: tuple[int, ...], layout: Layout, want_mean: bool
) -> Padded:
    """Means over the valid tokens of each head's windows; k and v are zero where hidden [B, S] is True."""
    at = _windows(scales, k.shape[2], k.device)
    before = pad((~hidden).cumsum(1, dtype=torch.int32), (1, 0))
    valid = before[:, at.stop] - before[:, at.start]  # [B, H, W]
    weight = at.size / valid.flatten(1)[:, at.window].clamp(min=1)  # [B, H, S]
    weight = weight.to(k.dtype).unsqueeze(-1)
    keys, values, mean = _Means.apply(k * weight, v * weight, layout, want_mean)
    exists = valid.clamp(max=1)
    if want_mean:
        mean = mean * (at.points / exists.sum(2).clamp(min=1)).unsqueeze(-1)
    return Padded(keys, values, mean if want_mean else None, exists.log(), layout)


def keep_padded(k: Tensor, v: Tensor, hidden: Tensor, want_mean: bool) -> Padded:
    """The tokens themselves; k and v are zero where hidden [B, S] is True."""
    _, heads, tokens, _ = k.shape
    seen = (~hidden).float().unsqueeze(1)
    mean = k.sum(2, dtype=torch.float32) / seen.sum(2, keepdim=True).clamp(min=1) if want_mean else None
    keys, values = flat(k), flat(v)
    layout = tuple(HeadLayout(h, tokens, 1, *keys.place(h), *values.place(h)) for h in range(heads))
    return Padded(keys.flat, values.flat, mean, seen.log().expand(-1, heads, -1), layout)


class Flat(NamedTuple):
    """[B, H, N, D] as one row of memory, and its strides."""

    flat: Tensor
    head: int
    batch: int
    row: int

    def place(self, head: int, before: int = 0) -> tuple[int, int, int]:
        """Offset and strides of a head as a layout has them; `before`: elements of the buffer that come first."""
        return before + head * self.head, self.batch, self.row


def flat(x: Tensor) -> Flat:
    """A view also where heads stand inside the tokens."""
    _, heads, count, dim = x.shape
    if x.transpose(1, 2).is_contiguous():
        return Flat(x.transpose(1, 2).reshape(-1), dim, count * heads * dim, heads * dim)
    return Flat(x.reshape(-1), count * dim, heads * count * dim, dim)


class _Windows(NamedTuple):
    start: Tensor  # [H, W]: the first token of every window, W of the head that has most
    stop: Tensor  # [H, W]
    window: Tensor  # [H, S]: each token's window, counted through all heads
    size: Tensor  # [H, S]: and how many tokens that has
    points: Tensor  # [H]


@on_device(most=256)
def _windows(scales: tuple[int, ...], tokens: int, device: torch.device) -> _Windows:
    scale = torch.cat([torch.full((1, 1), s, device=device) for s in scales])
    most = -(-tokens // min(scales))
    start = (torch.arange(most, device=device) * scale).clamp(max=tokens)
    stop = (start + scale).clamp(max=tokens)
    window = torch.arange(tokens, device=device) // scale + torch.arange(len(scales), device=device)[:, None] * most
    size = (stop - start).flatten()[window].float()
    return _Windows(start, stop, window, size, ((tokens + scale - 1) // scale).squeeze(1))


class _Means(torch.autograd.Function):
    """Means over windows, and the mean of the keys' (empty where it is not wanted)."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, layout: Layout, want_mean: bool) -> tuple[Tensor, ...]:
        ctx.layout, ctx.shapes = layout, (k.shape, v.shape)
        keys, values, mean = pool(in_rows(k), in_rows(v), layout, want_mean)
        return keys, values, k.new_empty(0) if mean is None else mean

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dkeys: Tensor, dvalues: Tensor, dmean: Tensor) -> tuple[Tensor | None, ...]:
        (B, H, S, D), (_, _, _, DV) = ctx.shapes
        dk, dv = (dkeys.new_empty(B, S, H, dim).transpose(1, 2) for dim in (D, DV))
        if not dmean.numel():
            dmean = torch.zeros(B, H, D, device=dkeys.device)
        unpool(dkeys.contiguous(), dvalues.contiguous(), dmean.contiguous(), dk, dv, ctx.layout)
        return dk, dv, None, None
