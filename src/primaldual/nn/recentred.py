"""Attention-BN inside a layer: when queries can come out of the projection already re-centred."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels.launching import captured, launches, seed_of, traced
from ..kernels.native import layers as compiled
from ..kernels.native import library as native
from ..kernels.projection.grouped import Groups
from ..kernels.projection.recentred import Recentred, as_linear, wide
from ..kernels.ragged.work import MAX_HEAD_DIM
from ..primal import AllKeys, Exponential, KernelSum, Recenter

if TYPE_CHECKING:
    from .multihead import MultiheadAttention


FLOPS = 1e11
"""Work of an attention from which on cuDNN's is the faster one for heads that are not scaled. A step of the layer,
batch 8, 8 heads of dimension 64, as it is timed and in a long loop, ms: at 2048 tokens (0.7e11) 1.06 and 0.94 with
ours, 1.08 and 1.19 with cuDNN's; at 4096 (2.7e11) 3.00 and 3.13, 2.79 and 2.84. Softmax 1.44, 1.44; 2.87, 2.74.
By a script that is not kept."""


def applies(layer: MultiheadAttention, x: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool) -> bool:
    """Self-attention of heads that are re-centred and nothing else, where every query sees the same keys."""
    return (
        not (torch.compiler.is_compiling() or need_weights or is_causal) and mask is None
        and type(layer.primal.training_set) is AllKeys
        and recenter_of(layer) is not None
        and plain(layer, x)
    )  # fmt: skip


def recenter_of(layer: MultiheadAttention) -> Recenter | None:
    """The re-centring of softmax heads that have no other input map; a subclass of one is something else."""
    p = layer.primal
    softmax = type(p.features) is Exponential and type(p.normalizer) is KernelSum
    only = p.inputs[0] if softmax and len(p.inputs) == 1 else None
    return only if type(only) is Recenter else None


def plain(layer: MultiheadAttention, x: Tensor) -> bool:
    """Whether the projections are torch's packed ones, in a call that nothing but autograd looks at."""
    return (
        not torch.compiler.is_compiling()
        and layer.impl != "reference"
        and layer.in_proj_weight is not None and not layer.shared and layer.convolutions is None
        and x.numel() > 0 and not x.is_meta
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )  # fmt: skip


def project(layer: MultiheadAttention, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Re-centred queries, keys and values [N, heads, L, head_dim] of inputs [N, L, E]."""
    assert layer.in_proj_weight is not None
    x, weight, bias = as_linear(x, layer.in_proj_weight, layer.in_proj_bias)
    number, learned = beta_of(layer)
    share = None
    if padding is not None:
        seen = padding.logical_not() if padding.dtype == torch.bool else padding != -torch.inf
        share = seen.to(wide(x)) / seen.sum(1, keepdim=True).clamp(min=1)
    return Recentred.apply(x, weight, bias, learned, share, number, layer.num_heads)


def beta_of(layer: MultiheadAttention) -> tuple[float, Tensor | None]:
    """β as a number, or as what is learned [heads]."""
    map_ = recenter_of(layer)
    assert map_ is not None
    return float(map_.beta), layer.learned["beta"].contiguous() if map_.learnable else None


def attend_at_once(layer: MultiheadAttention, x: Tensor, dropout_p: float) -> Tensor | None:
    """Head outputs by the compiled part, where it is there; None where torch's attention is to be taken."""
    assert layer.in_proj_weight is not None
    (B, N, E), H, D = x.shape, layer.num_heads, layer.head_dim
    if D % 8 or D > MAX_HEAD_DIM or captured(x) or native.library() is None:
        return None
    x, weight, bias = as_linear(x, layer.in_proj_weight, layer.in_proj_bias)
    if x.dtype.itemsize != 2 or not launches(x) or traced():
        return None
    number, beta = beta_of(layer)
    if 4 * B * N * N * E <= FLOPS and layer.impl in ("auto", "ragged"):
        groups = Groups(((1, tuple(range(H))),), B, N, H, D)
        seed = seed_of(x, dropout_p)
        return compiled.attend(x, weight, bias, groups, True, number, beta, dropout_p, seed, pool_first=False)
    if dropout_p or layer.impl not in ("auto", "sdpa"):
        return None
    return compiled.attend_by_cudnn(x, weight, bias, H, number, beta)
