"""The projections of scaled heads in short sequences: one product for all tokens, whose windows are averaged later.

    [q; k; v] = W x + b,   q −= βμ_h

What pooled inputs would save in arithmetic (see `grouped`) is less, there, than what a product per scale costs. The
gradients of q, k and v are thirds of one buffer. What goes through μ is added to those of the keys, as in `recentred`,
and two products give everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..buffers import side_by_side
from ..derivatives import differentiated_once
from ..launching import launch_kernel, power_of_2
from ..native.notes import product
from .grouped import Groups, bias_gradients, shift_of_groups, windows_of_heads
from .launching import forked, kernels
from .recentred import affine, beta_gradient, column_sums, recentre


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, recentred: bool, factor: float, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, re-centred where heads are, keys and values [B, H, N, D]: thirds of one buffer."""
    return _Projected.apply(x, weight, bias, beta, groups, recentred, factor)


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, groups: Groups, recentred: bool,
        factor: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x = x.contiguous()
        *found, mean = forward(x, weight, bias, beta, groups, recentred, factor)
        ctx.save_for_backward(x, weight, beta, None if beta is None else mean)
        ctx.settings = groups, recentred, factor, None if bias is None else bias.dtype
        return tuple(found)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, beta, mean = ctx.saved_tensors
        groups, recentred, factor, dtype = ctx.settings
        found = backward(gradients, x, weight, beta, mean, groups, recentred, factor, dtype, ctx.needs_input_grad)
        return *found, None, None, None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, groups: Groups, recentred: bool, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values; and μ where heads are re-centred."""
    B, N, E = x.shape
    packed = x.new_empty(B, N, 3, groups.heads, groups.head_dim)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    mean = None
    if recentred:  # before the product, which leaves no room beside it
        mean, shift = shift_of_groups(x, weight, bias, beta, factor, groups)
    affine(x.view(-1, E), weight, bias, packed.view(-1, 3 * E))
    if recentred:
        recentre(q, shift)
    return q, k, v, mean


def backward(
    gradients: Sequence[Tensor], x: Tensor, weight: Tensor, beta: Tensor | None, mean: Tensor | None, groups: Groups,
    recentred: bool, factor: float, bias_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, weight, bias and β, where they are wanted, from those of q, k and v."""
    want_x, want_weight, want_bias, want_beta = wanted[:4]
    B, N, E = x.shape
    dqkv = together(gradients).view(B, N, 3, E)
    sums, of_values = column_sums(dqkv.permute(2, 0, 1, 3)[::2])  # products leave no room beside them
    if recentred:
        _spread(dqkv[:, :, 1], sums, beta, factor, groups)
    dqkv, tokens = dqkv.view(-1, 3 * E), x.view(-1, E)
    dx = torch.empty_like(x) if want_x else None
    dweight = torch.empty_like(weight) if want_weight else None
    dbias = torch.empty(3 * E, dtype=bias_dtype, device=x.device) if want_bias else None
    dbeta = None
    fork = forked(x, 2)
    with fork.part(0):
        if dx is not None:
            product(dqkv, weight, dx.view(-1, E))
    if dbias is not None:
        bias_gradients(sums, of_values.view(-1, E), beta, factor, dbias, groups)
    if dweight is not None:
        product(dqkv.T, tokens, dweight)
    if beta is not None and mean is not None and want_beta:
        dbeta = beta_gradient(sums, mean, beta.dtype)
    fork.join()
    return dx, dweight, dbias, dbeta


def together(gradients: Sequence[Tensor]) -> Tensor:
    """[B, N, 3, H, D] of three [B, H, N, D]: the buffer of which they are thirds, or a copy."""
    first = gradients[0]
    B, H, N, D = first.shape
    if side_by_side(gradients, (3 * N * H * D, D, 3 * H * D, 1), H * D):
        return first.as_strided((B, N, 3, H, D), (3 * N * H * D, 3 * H * D, H * D, D, 1))
    return torch.stack([x.transpose(1, 2) for x in gradients], 2)


def _spread(dk: Tensor, sums: Tensor, beta: Tensor | None, factor: float, groups: Groups) -> None:
    """Add what goes through μ to the gradients of the keys [B, N, E], in place, from Σ_i dq_i in blocks."""
    (B, blocks, E), N, D = sums.shape, groups.tokens, groups.head_dim
    launch_kernel(
        kernels().spread, (-(-N // 128), groups.heads, B), (dk, sums, beta, windows_of_heads(groups, dk.device)),
        (N, E, blocks, *dk.stride()[:2], factor, D, power_of_2(D), 128, min(32, power_of_2(blocks)), beta is not None),
    )  # fmt: skip
