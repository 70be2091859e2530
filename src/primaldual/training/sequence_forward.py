"""`SequenceClassifier` for many members at once: a product per layer for all of them, few launches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ..models import SequenceConfig
from ..models.sequences import of_pair
from .member_attention import attend_in_layer
from .operations import KernelOperations, Operations, TorchOperations
from .stacked import Stacked


def forward(config: SequenceConfig, weights: Stacked, tokens: Tensor, padding: Tensor | None, training: bool) -> Tensor:
    """Scores [members, batch, classes].

    Args:
        config: of every member.
        weights: of the members.
        tokens: [members, batch, length], or [members, batch, 2, length] for pairs.
        padding: of the same shape, True where there is no token; None for nowhere.
        training: whether dropout is on.
    """
    if config.pairs:
        tokens, padding = tokens.flatten(1, 2), None if padding is None else padding.flatten(1, 2)
    _, batch, length = tokens.shape
    do: Operations
    if weights.fused:
        do = KernelOperations(weights, config.dropout, padding, training, places=1 + 3 * config.layers)
    else:
        do = TorchOperations(weights, config.dropout, padding, training)
    x = do.add_positions(_looked_up(weights.parameters["tokens.weight"], tokens), length)
    normal, x = do.norm_beside("layers.0.norm1", x)
    for i in range(config.layers):
        layer, following = f"layers.{i}", f"layers.{i + 1}.norm1" if i + 1 < config.layers else "norm"
        name = f"{layer}.self_attn"
        projected, _ = do.project(name, normal)
        attended = attend_in_layer(config, weights, name, projected, do.padding, batch, training, normal)
        normal, x = do.add_and_norm_beside(x, attended, f"{layer}.self_attn.out_proj", f"{layer}.norm2")
        normal, x = do.feed_forward_beside(normal, x, f"{layer}.linear1", f"{layer}.linear2", following)
    means = _sums(normal.unflatten(1, (batch, length)), do.padding) / config.length
    if config.pairs:
        means = of_pair(*means.unflatten(1, (-1, 2)).unbind(2))
    return do.linear("head", do.linear("hidden", means).relu())


def _looked_up(tables: Tensor, tokens: Tensor) -> Tensor:
    """Rows [members, batch · length, width] of each member's table [members, ids, width]."""
    members, ids, _ = tables.shape
    first = torch.arange(members, device=tokens.device) * ids
    return embedding((tokens.flatten(1) + first.unsqueeze(1)), tables.flatten(0, 1))


def _sums(x: Tensor, padding: Tensor | None) -> Tensor:
    """Over the tokens that are there, [members, batch, width]: a product, which adds up in float32, without a copy."""
    shape = x.shape[:-1]
    here = x.new_ones(shape) if padding is None else (~padding).to(x.dtype)
    return (here.unsqueeze(-2) @ x).squeeze(-2)
