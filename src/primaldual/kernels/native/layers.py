"""Layers in eager mode: from the inputs to the heads' outputs in one autograd node of the compiled part (`native`).

At short lengths the time of a layer is the host's. The steps are those of `unpooled`, which also take heads that are
re-centred and not scaled, and of `grouped`, with the launches of the attention between; and those of `recentred`, with
cuDNN's attention between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cudnn import attention as cudnn
from ..cudnn.beside import Queries
from ..projection import grouped, recentred, unpooled
from ..projection.grouped import Groups
from ..projection.launching import captured
from ..ragged import launch as ragged_launch
from ..ragged import tokens as ragged_tokens
from ..ragged.launch import Call
from ..ragged.passes import Shift
from . import library as native
from . import replay


def attend(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, recentred: bool, factor: float,
    beta: Tensor | None, dropout_p: float, seed: Tensor | None, *, pool_first: bool,
) -> Tensor | None:  # fmt: skip
    """Head outputs [N, heads, L, head_dim]; None where the compiled part is not there, or refuses.

    In a CUDA graph the host's work is done once, and what can run on streams of its own does so in Python.
    """
    if captured(x) or (library := native.library()) is None:
        return None
    kind = (2 if pool_first else 1, recentred, groups.heads, *groups.scales)
    passes = _grouped if pool_first else _unpooled
    inputs = x.contiguous(), weight, bias, beta, seed
    return replay.attend(
        library, kind, (factor, dropout_p), inputs, lambda: passes(groups, recentred, factor, dropout_p)
    )  # fmt: skip


def attend_by_cudnn(
    x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, factor: float, beta: Tensor | None
) -> Tensor | None:
    """The same of re-centred heads that are not scaled, with cuDNN's attention; None where that is not to be had."""
    if captured(x) or (library := native.library()) is None or not _cudnn_takes(x.shape[1]):
        return None
    inputs = x.contiguous(), weight, bias, beta, None
    return replay.attend(library, (3, heads), (factor,), inputs, lambda: _by_cudnn(x, heads, factor))


def _cudnn_takes(tokens: int) -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled() and not cudnn.wrong_gradients(tokens)


def _unpooled(groups: Groups, recentred: bool, factor: float, dropout_p: float) -> replay.Passes:
    scales = groups.scales

    def forward(inputs: Any, back: bool) -> tuple[Tensor, tuple[Any, ...]]:
        x, weight, bias, beta, seed = inputs
        q, k, v, mean = unpooled.forward(x, weight, bias, beta, groups, recentred, factor)
        out, lse, keys, values, *_ = ragged_tokens.tokens_forward(
            q, k, v, None, scales, False, dropout_p, seed, back=back
        )  # fmt: skip
        return out, (q, k, v, out, lse, keys, values, mean)

    def backward(
        grad: Tensor, inputs: Any, wanted: replay.Wanted, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        keys: Tensor, values: Tensor, mean: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x, weight, bias, beta, seed = inputs
        *found, _ = ragged_tokens.tokens_gradients(
            grad, q, k, v, None, out, lse, keys, values, scales, False, dropout_p, seed, together=True
        )
        dtype = None if bias is None else bias.dtype
        return *unpooled.backward(found, x, weight, beta, mean, groups, recentred, factor, dtype, wanted), None

    return replay.Passes(forward, backward)


def _by_cudnn(like: Tensor, heads: int, factor: float) -> replay.Passes:
    """The steps of `recentred`, with cuDNN's attention between."""
    B, N, E = like.shape
    q, k, v = like.new_empty(B, N, 3, heads, E // heads).permute(2, 0, 3, 1, 4)
    if not cudnn.usable(q, k, v):
        raise replay.RefusedError("cuDNN's attention does not take these heads")

    def forward(inputs: Any, back: bool) -> tuple[Tensor, tuple[Any, ...]]:
        x, weight, bias, beta, _ = inputs
        q, k, v, mean = recentred.forward(x, weight, bias, beta, None, factor, heads)
        out, lse = cudnn.fused(q, k, v)
        return out, (q, k, v, out, lse, mean)

    def backward(
        grad: Tensor, inputs: Any, wanted: replay.Wanted, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mean: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x, weight, bias, beta, _ = inputs
        found = cudnn.fused_back(grad, q, k, v, out, lse)
        dtype = None if bias is None else bias.dtype
        return *recentred.backward(found, x, weight, beta, None, mean, factor, dtype, wanted), None

    return replay.Passes(forward, backward)


def _grouped(groups: Groups, recentred: bool, factor: float, dropout_p: float) -> replay.Passes:
    queries = Queries(groups.batch, groups.heads, groups.tokens, groups.head_dim, groups.row)

    def call(shift: Tensor | None, seed: Tensor | None) -> Call:
        return Call(grouped.layout(groups), Shift.of(shift), dropout_p=dropout_p, seed=seed)

    def forward(inputs: Any, back: bool) -> tuple[Tensor, tuple[Any, ...]]:
        x, weight, bias, beta, seed = inputs
        flat, shift, rows, mean = grouped.forward(x, weight, bias, beta, groups, recentred, factor)
        q = queries.of(flat)
        shifted = q if back and shift is not None else None
        out, lse = ragged_launch.forward(q, flat, flat, groups.head_dim, call(shift, seed), shifted)
        return out, (flat, rows, mean, out, lse)

    def backward(
        grad: Tensor, inputs: Any, wanted: replay.Wanted, flat: Tensor, rows: Tensor, mean: Tensor | None, out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x, _, bias, beta, seed = inputs
        found = flat.new_empty(flat.shape)
        ragged_launch.backward(
            grad, queries.of(flat), flat, flat, out, lse, call(None, seed), found, found, 0, dq=queries.of(found)
        )
        dtype = None if bias is None else bias.dtype
        return *grouped.backward(found, x, rows, beta, mean, groups, factor, dtype, wanted), None

    return replay.Passes(forward, backward)
