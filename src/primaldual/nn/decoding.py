"""A layer of self-attention that is given its sequence piece by piece, and keeps what it needs of the tokens so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops import CausalFormError, UnsupportedError
from ..ops.decoding import AttentionCache, Cache, Piece, Rows

if TYPE_CHECKING:
    from .multihead import MultiheadAttention


def rows_of(
    batch: int, like: Tensor, length: int | None, rewind: int
) -> Rows:  # fmt: skip
    """The rows of a new cache, checked."""
    for name, value, least in (("batch", batch, 1), ("length", length, 1), ("rewind", rewind, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"a cache takes a {name} of at least {least}, got {value!r}")
    return Rows(batch, like.device, length, rewind)


def cache_of(layer: MultiheadAttention, rows: Rows, dtype: torch.dtype | None = None) -> AttentionCache:
    """The cache of a layer; what cannot be decoded is refused, with the reason."""
    from .multihead import MultiheadAttention

    kind = type(layer)
    for method in ("forward", "state", "project", "split", "_attend"):
        if getattr(kind, method) is not getattr(MultiheadAttention, method):
            raise UnsupportedError(
                f"this cannot be decoded with a cache: {kind.__name__} has a method {method} of its own, and nothing "
                f"says what it would do with one more token"
            )
    if layer.convolutions is not None:
        raise CausalFormError("this cannot be decoded token by token: a ConvProjection lets a token see later ones")
    if layer.bias_k is not None or layer.add_zero_attn:
        raise UnsupportedError(
            "this cannot be decoded with a cache: add_bias_kv and add_zero_attn add keys after all tokens; use "
            "mechanism='sink' for a place that takes weight"
        )
    if layer.kdim != layer.embed_dim or layer.vdim != layer.embed_dim:
        raise UnsupportedError(
            f"this cannot be decoded with a cache: its keys are made of another input than its queries "
            f"(embed_dim={layer.embed_dim}, kdim={layer.kdim}, vdim={layer.vdim})"
        )
    return AttentionCache(
        layer.primal, rows, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim,
        dtype or layer.out_proj.weight.dtype, layer.scale,
    )  # fmt: skip


def decode(layer: MultiheadAttention, x: Tensor, cache: Cache, padding: Tensor | None) -> Tensor:
    """New tokens [N, L, E], or as the layer has them, the same out; they are in the cache then."""
    if x.dim() != 3 or x.shape[-1] != layer.embed_dim:
        raise ValueError(f"x must have three dimensions and {layer.embed_dim} channels, got {list(x.shape)}")
    x = x if layer.batch_first else x.transpose(0, 1)
    if x.shape[0] != cache.batch or len(cache.layers) != 1:
        raise ValueError(f"this is a cache of {cache.batch} rows and {len(cache.layers)} layers; got {x.shape[0]} rows")
    if padding is not None and not layer.left_padding:
        raise UnsupportedError("left_padding=False counts hidden tokens, which take no place in a cache")
    piece = cache.rows.piece(x.shape[1], padding)
    out = piece.put_back(attended(layer, piece.ordered(x), cache.layers[0], piece))
    cache.rows.advance(piece)
    return out if layer.batch_first else out.transpose(0, 1)


def attended(layer: MultiheadAttention, x: Tensor, cache: AttentionCache, piece: Piece) -> Tensor:
    """Outputs [N, L, E] of new tokens in order, which `piece` says the places of."""
    if layer.training and layer.dropout:
        raise ValueError(f"the layer is in training with dropout={layer.dropout:g}; call eval() before decoding")
    with torch.no_grad():
        q, k, v = (layer.split(t) for t in layer.project(x, x, x, None, None))
        fixed = {n: getattr(layer, f"feature_{n}") for n in layer.primal.features.fixed}
        tokens = {n: made(x) for n, made in layer.made.items()}
        heads = cache.attend(q, k, v, piece, dict(layer.learned.items()) | fixed | tokens)
        if layer.mechanism_bias is not None:
            heads = heads + layer.mechanism_bias[:, None]
        out = layer.out_proj(heads.transpose(1, 2).flatten(2))
        return out + x if layer.primal.residual else out
