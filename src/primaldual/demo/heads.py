"""What each head looks at, and how much the heads differ."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ..nn import MultiheadAttention


@torch.no_grad()
def attention_inputs(model: nn.Module, series: Tensor) -> list[tuple[MultiheadAttention, Tensor]]:
    """Every attention layer of a model in eval mode, with what it sees of the series."""
    found: list[tuple[MultiheadAttention, Tensor]] = []
    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, MultiheadAttention):
                hook = layer.register_forward_pre_hook(lambda layer, inputs: found.append((layer, inputs[0])))
                hooks.callback(hook.remove)
        model(series)
    return found


@torch.no_grad()
def head_maps(model: nn.Module, series: Tensor) -> Tensor:
    """Attention weights [layers, batch, heads, length, length] of a model in eval mode."""
    seen = attention_inputs(model, series)
    return torch.stack([layer(x, x, x, need_weights=True, average_attn_weights=False)[1] for layer, x in seen])


def head_distance(maps: Tensor) -> float:
    """Mean L2 distance between the maps of two heads, over all pairs of heads, series and layers.

    >>> maps = torch.zeros(1, 1, 2, 3, 3)
    >>> maps[0, 0, 1, 0, 0], maps[0, 0, 1, 0, 1] = 3.0, 4.0
    >>> head_distance(maps)
    5.0
    """
    flat = maps.flatten(-2).flatten(0, 1)  # [layers × batch, heads, length²]
    heads = flat.shape[-2]
    if heads < 2:
        return 0.0
    distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")  # zero on the diagonal
    return float(distances.sum((-2, -1)).mean()) / (heads * (heads - 1))
