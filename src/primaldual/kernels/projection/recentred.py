"""Attention-BN inside a layer: queries come out of the projection already re-centred.

Under softmax the key side of x ↦ x − βμ cancels (`RowConstantsCancel`), so what is left is softmax attention with
q − βμ, and μ = W_K · (mean of the inputs) + b_K needs no pass over the keys. On the way back Σ_i dq_i, which the bias
needs anyway, is the gradient of −βμ; and since μ is the mean of the projected keys, adding its share to every dk makes
the two matrix products of a plain projection give everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..derivatives import differentiated_once
from ..kept import on_device
from ..launching import in_rows, launch_kernel, launches, power_of_2
from ..native.notes import product
from ..ragged.passes import dot_sums
from .launching import forked, kernels

CHUNK = 512  # tokens whose sum one program takes
WHOLE = 1024  # up to so many tokens one launch does it all
BLOCK = 128  # rows of a block of `column_sums`


def as_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as `torch.nn.functional.linear` does under autocast."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor) -> Tensor:
        return t if t.dtype == torch.float64 else t.to(dtype)

    return cast(x), cast(weight), None if bias is None else cast(bias)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class RecentredProjection(torch.autograd.Function):
    """x ↦ q − βμ, k, v: views of one buffer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, share: Tensor | None,
        factor: float, heads: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x = x.contiguous()
        *found, mean = forward(x, weight, bias, beta, share, factor, heads)
        ctx.save_for_backward(x, weight, beta, share, None if beta is None else mean)
        ctx.settings = factor, None if bias is None else bias.dtype
        return tuple(found)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, beta, share, mean = ctx.saved_tensors
        factor, bias_dtype = ctx.settings
        found = backward(gradients, x, weight, beta, share, mean, factor, bias_dtype, ctx.needs_input_grad)
        return *found, None, None, None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, share: Tensor | None, factor: float, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and μ."""
    B, N, E = x.shape
    packed = x.new_empty(B, N, 3 * E)
    fork = forked(x, 2)
    with fork.part(0):
        mean, shift = _mean(x, weight, bias, share, beta, factor, heads)
    affine(x.view(-1, E), weight, bias, packed.view(-1, 3 * E))
    fork.join()
    q, k, v = packed.view(B, N, 3, heads, E // heads).permute(2, 0, 3, 1, 4).unbind(0)
    recentre(q, shift)
    return q, k, v, mean


def backward(
    gradients: Sequence[Tensor], x: Tensor, weight: Tensor, beta: Tensor | None, share: Tensor | None,
    mean: Tensor | None, factor: float, bias_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, weight, bias and β, where they are wanted, from those of q, k and v."""
    want_x, want_weight, want_bias, want_beta = wanted[:4]
    dq, dk, dv = gradients
    dqkv, sums = _assemble(dq, dk, dv, share, beta, factor)
    dx = torch.empty_like(x) if want_x else None
    dweight = torch.empty_like(weight) if want_weight else None
    dbias = torch.empty(weight.shape[0], dtype=bias_dtype, device=x.device) if want_bias else None
    dbeta = None
    fork = forked(x, 2)
    with fork.part(0):
        if dweight is not None:
            product(dqkv.T, x.flatten(0, 1), dweight)
        if dbias is not None:
            total(sums.flatten(2), dbias)
    if dx is not None:
        product(dqkv, weight, dx.flatten(0, 1))
    fork.join()
    if beta is not None and mean is not None and want_beta:
        dbeta = beta_gradient(sums[:, :, 0].flatten(2), mean, beta.dtype)
    return dx, dweight, dbias, dbeta


def _chunks(tokens: int) -> tuple[int, int, tuple[int, ...]]:
    """Tokens of a chunk, how many chunks, and the phases of the work."""
    if tokens <= WHOLE:
        return tokens, 1, (0,)
    return CHUNK, -(-tokens // CHUNK), (1, 2)


def _block(dim: int) -> int:
    """Columns of a block: as few as fill a memory transaction."""
    return min(32, max(16, power_of_2(dim)))


def recentre(q: Tensor, shift: Tensor) -> None:
    """Take the shift off the queries, in place."""
    B, H, N, D = q.shape
    if not launches(q):
        q -= shift.unsqueeze(2)
        return
    launch_kernel(
        kernels().recentre, (-(-N // BLOCK), H, B), (q, shift), (*q.stride()[:3], H, N, D, BLOCK, power_of_2(D))
    )  # fmt: skip


def _mean(
    x: Tensor, weight: Tensor, bias: Tensor | None, share: Tensor | None, beta: Tensor | None, factor: float, heads: int
) -> tuple[Tensor, Tensor]:
    """μ and βμ, [B, H, D] each, from the mean of the inputs over the tokens that are seen."""
    B, N, E = x.shape
    if launches(x):
        table = _one_group(heads, N if share is None else 1, x.device)
        sums = column_sums(x, share).unsqueeze(1)
        return shift_of(sums, weight, bias, beta, factor, heads, table, None if share is None else share.sum(1))
    with torch.autocast(x.device.type, enabled=False):  # statistics are not rounded
        if share is None:
            share = x.new_full((B, N), 1 / N, dtype=wide(x))
        inputs = (x * share.unsqueeze(-1)).where(share.unsqueeze(-1) > 0, 0.0).sum(1)
        mean = inputs @ weight[E : 2 * E].to(wide(x)).T
        if bias is not None:
            mean = mean + share.sum(1, keepdim=True) * bias[E : 2 * E]
    mean = mean.view(B, heads, -1)
    return mean, mean * (factor if beta is None else beta[:, None])


@on_device(most=256)
def _one_group(heads: int, points: int, device: torch.device) -> Tensor:
    return torch.tensor([(0, points)] * heads, dtype=torch.int64, device=device)


def column_sums(x: Tensor, share: Tensor | None = None, out: Tensor | None = None, scale: int = 1) -> Tensor:
    """Σ_n x_n of [.., B, N, C], each row weighed by its share, over blocks of rows: [.., B, blocks, C] in float32.

    Rows of x may lie apart. With a scale, they are weighed so that the sum is that of means over windows of so many.
    """
    *parts, B, N, C = x.shape
    out = x.new_empty(*parts, B, -(-N // BLOCK), C, dtype=torch.float32) if out is None else out
    launch_kernel(
        kernels().columns, (out.shape[-2], -(-C // 64), x.numel() // (N * C)), (x, share, out),
        (x.stride(0) if parts else 0, *x.stride()[-3:-1], B, N, C, out.stride(-3), scale, BLOCK, 64,
         share is not None),
    )  # fmt: skip
    return out


def shift_of(
    sums: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, factor: float, heads: int, table: Tensor,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """μ and βμ, [B, H, D] each, from sums [B, groups, blocks, E] of inputs; table: group and points of each head.

    seen [B]: 0 where a sequence has no token that is seen.
    """
    B, G, blocks, E = sums.shape
    D = E // heads
    weight, bias = weight[E : 2 * E].contiguous(), None if bias is None else bias[E : 2 * E].contiguous()
    mean, shift = sums.new_empty(B, heads, D), sums.new_empty(B, heads, D)
    piece = min(16, power_of_2(D))
    launch_kernel(
        kernels().shift, (heads * -(-D // piece), B, 1),
        (sums, weight, bias, beta, seen, table, mean, shift),
        (heads, E, G, blocks, factor, D, piece, min(512, power_of_2(E)), min(32, power_of_2(blocks)), bias is not None,
         beta is not None, seen is not None),
    )  # fmt: skip
    return mean, shift


def _assemble(
    dq: Tensor, dk: Tensor, dv: Tensor, share: Tensor | None, beta: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """Gradients [B·N, 3E] of the projected tokens, and their sums [B, chunks, 3, H, D] over the tokens of a chunk."""
    B, H, N, D = dq.shape
    out = dq.new_empty(B * N, 3 * H * D)
    if not launches(dq):
        parts = out.view(B, N, 3, H, D).permute(2, 0, 3, 1, 4)
        dmean = -dq.sum(2, keepdim=True, dtype=wide(dq)) * (factor if beta is None else beta[:, None, None])
        parts[0], parts[2] = dq, dv
        parts[1] = dk + dmean * (1 / N if share is None else share[:, None, :, None])
        return out, parts.sum(3, dtype=wide(dq)).transpose(0, 1).unsqueeze(1)
    dq, dk, dv = (in_rows(x) for x in (dq, dk, dv))
    chunk, chunks, phases = _chunks(N)
    sums = dq.new_empty(B, chunks, 3, H, D, dtype=torch.float32)
    block = _block(D)
    for phase in phases:
        launch_kernel(
            kernels().assemble, (chunks, H * -(-D // block), B), (dq, dk, dv, share, beta, out, sums),
            (*dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], H, N, factor, chunk, chunks, D, 128, block,
             share is not None, beta is not None, phase),
        )  # fmt: skip
    return out, sums


def total(sums: Tensor, out: Tensor) -> None:
    """The sum over everything but the last dimension."""
    width = sums.shape[-1]
    if not launches(sums):
        out.copy_(sums.flatten(0, -2).sum(0))
        return
    launch_kernel(kernels().total, (-(-width // 32), 1, 1), (sums, out), (sums.numel() // width, width, 128, 32))


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x Wᵀ + b of rows, into a tensor that is there already."""
    product(x, weight.T, out, bias)


def beta_gradient(sums: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """β's, [H], from Σ_i dq_i in blocks, [B, blocks, E], and μ [B, H, D]."""
    if not launches(sums):
        return -(sums.sum(1).view_as(mean) * mean).sum((0, 2)).to(dtype)
    return dot_sums(sums.unflatten(2, mean.shape[1:]).transpose(1, 2), mean.unsqueeze(2), -1.0, dtype)
