"""Softmax attention with rotary positions as people write it in torch: what a layer of a language model is today."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention


class RotarySoftmax(nn.Module):
    """One product for queries, keys and values, rotary positions from tables, torch's fused attention, a product.

    Called as a `MultiheadAttention`, for self-attention without weights. The tables and the rotation are in the dtype
    of the tensors, as in most code.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, heads: int, head_dim: int, length: int, **factory: Any) -> None:
        super().__init__()
        self.heads, width = heads, heads * head_dim
        self.back_end: SDPBackend | None = None  # whichever torch takes
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width, **factory), nn.Linear(width, width, **factory)
        turns = 10000.0 ** (-torch.arange(head_dim // 2, dtype=torch.float64) / (head_dim // 2))
        angle = torch.outer(torch.arange(length, dtype=torch.float64), turns).repeat(1, 2)
        self.register_buffer("cos", angle.cos().to(**factory))
        self.register_buffer("sin", angle.sin().to(**factory))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, is_causal: bool = False
    ) -> tuple[Tensor, None]:
        batch, length, _ = query.shape
        projected = linear(query, self.in_proj.weight, self.in_proj.bias)
        q, k, v = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (x * self.cos + _half_turned(x) * self.sin for x in (q, k))
        with nullcontext() if self.back_end is None else sdpa_kernel(self.back_end):
            out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, -1)), None


def _half_turned(x: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([-other, one], dim=-1)


def compiled(layer: RotarySoftmax, back_end: SDPBackend) -> nn.Module:
    """The same layer by `torch.compile`, for its shapes alone, with one of torch's fused back ends.

    The back end is named inside: torch does not look at one outside when it decides whether to compile again.
    """
    same = copy(layer)
    same.back_end = back_end
    made: nn.Module = torch.compile(same, dynamic=False)  # type: ignore[assignment]
    return made
