"""One call of the attention interface of transformers, as one of `primaldual.attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import UnsupportedError, attention
from ...primal import Primal
from . import refusals
from .parts import Parts, learned_names, parts_of


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, primal: Primal,
    impl: str = "auto", *, dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    position_bias: Tensor | None = None, sliding_window: int | None = None, output_attentions: bool | None = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Outputs [batch, length, heads, head_dim], and weights [batch, heads, length, keys] where they are asked for.

    Args:
        module: the model's attention; it knows whether it is causal, and holds what the mechanism learns.
        query: [batch, heads, length, head_dim]; the last tokens of the keys' sequence where it is causal.
        key, value: [batch, kv_heads, keys, head_dim], not repeated, with positions already in them.
        attention_mask: as `masks` makes it; or a mask that the model was called with, [batch, 1, queries, keys],
            boolean, True where a key is seen, or floats that are added to the scores.
        primal, impl: the mechanism, and the executor.
        dropout, scaling, is_causal, position_bias, sliding_window, output_attentions, others: as models give them.
    """
    refusals.refuse_arguments(others)
    heads, length, head_dim = query.shape[1:]
    query, key, value = _alike(query, key, value)
    mask = attention_mask
    if mask is not None and mask.dim() == 2 and mask.shape[1] < key.shape[2]:  # a static cache, not filled yet
        key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
        position_bias = None if position_bias is None else position_bias[..., : mask.shape[1]]
    keys = key.shape[2]
    refusals.refuse_window(sliding_window, mask, keys)
    padding: Tensor | None = None
    by_query: Tensor | None = None
    if mask is not None and mask.dim() == 4 and mask.shape[2] == length:
        refusals.refuse_by_query(primal, heads)
        by_query, causal = _hiding(mask), False
    else:
        padding = None if mask is None else _hiding(mask if mask.dim() == 2 else mask[:, 0, 0])
        causal = _is_causal(module, is_causal)
    parts = parts_of(module)
    across = parts is not None and parts.across
    if not causal and by_query is None and (across or length != keys or getattr(module, "is_decoder", False)):
        refusals.refuse_across(primal)
    if position_bias is not None:
        refusals.refuse_bias(primal, heads)
        by_query = position_bias if by_query is None else _both(by_query, position_bias)
    offset = keys - length if causal else 0
    if offset < 0:
        raise UnsupportedError(
            f"{type(module).__name__} says that it is causal, and has {length} queries for {keys} keys: queries "
            f"must be the last tokens of the keys' sequence; give is_causal=False where they are of another one"
        )
    found = attention(
        query, key, value, primal,
        key_padding_mask=padding, query_padding_mask=padding if length == keys and not across else None,
        attn_mask=by_query, is_causal=causal, dropout_p=dropout if module.training else 0.0,
        parameters=_parameters(module, parts, primal, query, key), impl=impl, need_weights=bool(output_attentions),
        query_offset=offset, scale=_scale(scaling, head_dim),
    )  # fmt: skip
    out, weights = found if isinstance(found, tuple) else (found, None)
    if parts is not None and parts.bias is not None:
        out = out + parts.bias[:, None].to(out.dtype)
    return out.transpose(1, 2).contiguous(), weights


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In one dtype: rotary positions and norms leave queries and keys in another than values under autocast."""
    if query.dtype == key.dtype == value.dtype:
        return query, key, value
    device = value.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _is_causal(module: nn.Module, given: bool | None) -> bool:
    """The keyword, which is what a config says where it does, else what the attention says of itself."""
    if given is not None:
        return given
    own = getattr(module, "is_causal", None)
    if own is None:
        raise UnsupportedError(
            f"{type(module).__name__} does not say whether it is causal: it has no is_causal, and hands none over"
        )
    return bool(own)


def _scale(scaling: float | None, head_dim: int) -> float | None:
    """None where it is 1/√D."""
    return None if scaling is None or math.isclose(scaling, head_dim**-0.5, rel_tol=1e-6) else float(scaling)


def _hiding(mask: Tensor) -> Tensor:
    """Ours of theirs: True hides, and what is added hides by −inf, not by a dtype's lowest number."""
    if not mask.is_floating_point():
        return ~mask.bool()
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)


def _both(hidden: Tensor, bias: Tensor) -> Tensor:
    """A bias where nothing is hidden."""
    return bias.masked_fill(hidden, -torch.inf) if hidden.dtype == torch.bool else bias + hidden


def _parameters(
    module: nn.Module, parts: Parts | None, primal: Primal, query: Tensor, key: Tensor
) -> dict[str, Tensor] | None:
    if parts is not None:
        return parts.parameters_for(key.shape[2])
    if names := learned_names(primal, query.shape[1], key.shape[1], query.shape[3]):
        raise UnsupportedError(
            f"{primal!r} learns {', '.join(names)}, and {type(module).__name__} has no such parameters: call "
            f"primaldual.integrations.transformers.convert(model, mechanism), which adds them to the model"
        )
    return None
