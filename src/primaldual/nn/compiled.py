"""Layers in eager mode: from the inputs to the heads' outputs in one autograd node of the compiled part (`native`).

At short lengths the time of a layer is the host's. The steps are those of `unpooled`, which also take heads that are
re-centred and not scaled, and of `grouped`, with the launches of the attention between; and those of `recentred`, with
cuDNN's attention between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.gpu import cudnn, native, ragged_launch, ragged_tokens, recipe
from ..ops.gpu.launching import traced
from ..ops.gpu.parallel import Queries
from ..ops.gpu.passes import Shift
from ..ops.gpu.ragged_launch import Call
from ..ops.ragged import MAX_HEAD_DIM
from . import grouped, recentred, unpooled
from .grouped import Groups
from .launching import captured, launches, seed_of
from .recentred import as_linear, beta_of

if TYPE_CHECKING:
    from .multihead import MultiheadAttention

FLOPS = 1e11
"""Work of an attention from which on cuDNN's is the faster one for heads that are not scaled. A step of the layer,
batch 8, 8 heads of dimension 64, as it is timed and in a long loop, ms: at 2048 tokens (0.7e11) 1.06 and 0.94 with
ours, 1.08 and 1.19 with cuDNN's; at 4096 (2.7e11) 3.00 and 3.13, 2.79 and 2.84. Softmax 1.44, 1.44; 2.87, 2.74.
By a script that is not kept."""


def attend(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, recentred: bool, number: float,
    beta: Tensor | None, dropout_p: float, seed: Tensor | None, *, pool_first: bool,
) -> Tensor | None:  # fmt: skip
    """Head outputs [N, heads, L, head_dim]; None where the compiled part is not there, or refuses.

    In a CUDA graph the host's work is done once, and what can run on streams of its own does so in Python.
    """
    if captured(x) or (library := native.library()) is None:
        return None
    kind = (2 if pool_first else 1, recentred, groups.heads, *groups.scales)
    way = _grouped if pool_first else _unpooled
    inputs = x.contiguous(), weight, bias, beta, seed
    return recipe.attend(
        library, kind, (number, dropout_p), inputs, lambda: way(groups, recentred, number, dropout_p)
    )  # fmt: skip


def attend_recentred(layer: MultiheadAttention, x: Tensor, dropout_p: float) -> Tensor | None:
    """The same of a layer's heads that are re-centred and not scaled; None where torch's attention is to be taken."""
    assert layer.in_proj_weight is not None
    (B, N, E), H, D = x.shape, layer.num_heads, layer.head_dim
    if D % 8 or D > MAX_HEAD_DIM or captured(x) or (library := native.library()) is None:
        return None
    x, weight, bias = as_linear(x, layer.in_proj_weight, layer.in_proj_bias)
    if x.dtype.itemsize != 2 or not launches(x) or traced():
        return None
    number, beta = beta_of(layer)
    if 4 * B * N * N * E <= FLOPS and layer.impl in ("auto", "ragged"):
        groups = Groups(((1, tuple(range(H))),), B, N, H, D)
        seed = seed_of(x, dropout_p)
        return attend(x, weight, bias, groups, True, number, beta, dropout_p, seed, pool_first=False)
    if dropout_p or layer.impl not in ("auto", "sdpa") or not _cudnn_takes(N):
        return None
    inputs = x.contiguous(), weight, bias, beta, None
    return recipe.attend(library, (3, H), (number,), inputs, lambda: _by_cudnn(x, H, number))


def _cudnn_takes(tokens: int) -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled() and not cudnn.half_empty(tokens)


def _unpooled(groups: Groups, recentred: bool, number: float, dropout_p: float) -> recipe.Way:
    scales = groups.scales

    def forward(inputs: Any, back: bool) -> tuple[Tensor, tuple[Any, ...]]:
        x, weight, bias, beta, seed = inputs
        q, k, v, mean = unpooled.forward(x, weight, bias, beta, groups, recentred, number)
        out, lse, keys, values, *_ = ragged_tokens.tokens_forward(
            q, k, v, None, scales, False, dropout_p, seed, back=back
        )  # fmt: skip
        return out, (q, k, v, out, lse, keys, values, mean)

    def backward(
        grad: Tensor, inputs: Any, wanted: recipe.Wanted, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        keys: Tensor, values: Tensor, mean: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x, weight, bias, beta, seed = inputs
        *found, _ = ragged_tokens.tokens_gradients(
            grad, q, k, v, None, out, lse, keys, values, scales, False, dropout_p, seed, together=True
        )
        dtype = None if bias is None else bias.dtype
        return *unpooled.backward(found, x, weight, beta, mean, groups, recentred, number, dtype, wanted), None

    return recipe.Way(forward, backward)


def _by_cudnn(like: Tensor, heads: int, number: float) -> recipe.Way:
    """The steps of `recentred`, with cuDNN's attention between."""
    B, N, E = like.shape
    q, k, v = like.new_empty(B, N, 3, heads, E // heads).permute(2, 0, 3, 1, 4)
    if not cudnn.usable(q, k, v):
        raise recipe.RefusedError("cuDNN's attention does not take these heads")

    def forward(inputs: Any, back: bool) -> tuple[Tensor, tuple[Any, ...]]:
        x, weight, bias, beta, _ = inputs
        q, k, v, mean = recentred.forward(x, weight, bias, beta, None, number, heads)
        out, lse = cudnn.fused(q, k, v)
        return out, (q, k, v, out, lse, mean)

    def backward(
        grad: Tensor, inputs: Any, wanted: recipe.Wanted, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mean: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x, weight, bias, beta, _ = inputs
        found = cudnn.fused_back(grad, q, k, v, out, lse)
        dtype = None if bias is None else bias.dtype
        return *recentred.backward(found, x, weight, beta, None, mean, number, dtype, wanted), None

    return recipe.Way(forward, backward)


def _grouped(groups: Groups, recentred: bool, number: float, dropout_p: float) -> recipe.Way:
    queries = Queries(groups.batch, groups.heads, groups.tokens, groups.head_dim, groups.row)

    def call(shift: Tensor | None, seed: Tensor | None) -> Call:
        return Call(grouped.layout(groups), Shift.of(shift), dropout_p=dropout_p, seed=seed)

    def forward(inputs: Any, back: bool) -> tuple[Tensor, tuple[Any, ...]]:
        x, weight, bias, beta, seed = inputs
        flat, shift, rows, mean = grouped.forward(x, weight, bias, beta, groups, recentred, number)
        q = queries.of(flat)
        shifted = q if back and shift is not None else None
        out, lse = ragged_launch.forward(q, flat, flat, groups.head_dim, call(shift, seed), shifted)
        return out, (flat, rows, mean, out, lse)

    def backward(
        grad: Tensor, inputs: Any, wanted: recipe.Wanted, flat: Tensor, rows: Tensor, mean: Tensor | None, out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x, _, bias, beta, seed = inputs
        found = flat.new_empty(flat.shape)
        ragged_launch.backward(
            grad, queries.of(flat), flat, flat, out, lse, call(None, seed), found, found, 0, dq=queries.of(found)
        )
        dtype = None if bias is None else bias.dtype
        return *grouped.backward(found, x, rows, beta, mean, groups, number, dtype, wanted), None

    return recipe.Way(forward, backward)
