"""`SeriesTransformer` for many members at once: a product per layer for all of them, few launches.

What has parameters is a batched product over members; what has none sees members as part of the batch.
"""

from __future__ import annotations

from torch import Tensor

from ..models import SeriesConfig
from .member_attention import attend_in_layer
from .operations import KernelOperations, Operations, TorchOperations
from .stacked import Stacked


def forward(config: SeriesConfig, weights: Stacked, series: Tensor, padding: Tensor | None, training: bool) -> Tensor:
    """Scores [members, batch, classes], or predictions [members, batch] for regression.

    Args:
        config: of every member.
        weights: of the members.
        series: [members, batch, length, channels], 0 at padded steps; there may be more channels than the model has.
        padding: [members, batch, length], True at padded steps.
        training: whether dropout and batch statistics are on.
    """
    do: Operations
    if weights.fused:
        do = KernelOperations(weights, config.dropout, padding, training, places=2 + 3 * config.layers)
    else:
        do = TorchOperations(weights, config.dropout, padding, training)
    batch = series.shape[1]
    x = do.embed(series, config.channels, config.d_model)
    for i in range(config.layers):
        layer = f"layers.{i}"
        projected, x_beside = do.project(f"{layer}.self_attn", x)
        hidden = do.padding if config.encoder == "mvts" else None
        attended = attend_in_layer(config, weights, f"{layer}.self_attn", projected, hidden, batch, training, x)
        x = do.add_and_norm(x_beside, attended, f"{layer}.self_attn.out_proj", f"{layer}.norm1")
        x = do.feed_forward(x, f"{layer}.linear1", f"{layer}.linear2", f"{layer}.norm2")
    if config.encoder == "flowformer":
        x = do.norm("norm", x)
    y = do.head("head", x, batch)
    return y.squeeze(-1) if config.task == "regression" else y
