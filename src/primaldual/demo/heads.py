"""What each head looks at, and how much the heads differ."""

from __future__ import annotations

import torch
from torch import Tensor

from .model import SeriesTransformer


@torch.no_grad()
def head_maps(model: SeriesTransformer, series: Tensor) -> Tensor:
    """Attention weights [layers, batch, heads, length, length] over the tokens; the model must be in eval mode."""
    maps, x = [], model.embed(series)
    for layer in model.encoder_layers():
        # the layer is post-norm, so its attention sees its input as it is
        maps.append(layer.self_attn(x, x, x, need_weights=True, average_attn_weights=False)[1])
        x = layer(x)
    return torch.stack(maps)


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
