"""The mask that a model of transformers hands to its attention: what is padding, and else what each query sees.

A model makes its masks once and gives them to all layers. Under our names it makes one of three, True where a key is
seen: None; [batch, keys], which says what is padding and leaves causality to the attention; or [batch, 1, queries,
keys] where keys are hidden from single queries in any other way (sliding windows, packed sequences, a model's own).

Means and pooled keys need to know padding apart from causality, so the second is the rule. It has a column for every
token that there is: a static cache has more keys, which are not filled yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask


def mask_of(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None,
    use_vmap: bool = False, device: torch.device | str = "cpu", **others: Any,
) -> Tensor | None:  # fmt: skip
    """What `AttentionMaskInterface` calls, with its arguments."""
    offset = int(q_offset)

    def by_query(padding: Tensor | None) -> Tensor:
        mask = sdpa_mask(
            batch_size, q_length, kv_length, offset, kv_offset, mask_function, padding,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        assert mask is not None
        return mask

    causal = mask_function is causal_mask_function
    if not causal and mask_function is not bidirectional_mask_function:
        pattern = None if kv_offset or torch.compiler.is_compiling() else by_query(None)
        causal = pattern is not None and torch.equal(pattern, _past(pattern, offset))
        if pattern is None or not (causal or bool(pattern.all())):
            return by_query(attention_mask)
    elif kv_offset:  # the cache has dropped the first tokens: places cannot be counted from them
        return by_query(attention_mask)
    tokens = offset + q_length if causal else kv_length
    return _padding(attention_mask, batch_size, tokens, kv_length, device)


def _past(pattern: Tensor, offset: int) -> Tensor:
    """Causality in the shape of a pattern [B, 1, L, S]."""
    return torch.ones_like(pattern).tril(offset)


def _padding(mask: Tensor | None, batch: int, tokens: int, keys: int, device: torch.device | str) -> Tensor | None:
    """[B, tokens], True where a token is valid; None where all are, and all keys are tokens."""
    if mask is None:
        return None if tokens == keys else torch.ones(batch, tokens, dtype=torch.bool, device=device)
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be [batch, tokens], got the shape {list(mask.shape)}")
    mask = mask[:, :tokens]
    if not torch.compiler.is_compiling() and mask.shape[1] == keys and bool(mask.all()):
        return None
    return mask
