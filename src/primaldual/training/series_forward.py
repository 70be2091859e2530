"""`SeriesTransformer` for many members at once: a product per layer for all of them, few launches.

What has parameters is a batched product over members; what has none sees members as part of the batch.
"""

from __future__ import annotations

from torch import Tensor

from ..models import SequenceConfig, SeriesConfig
from ..primal import Primal
from .member_attention import SideBySide, attend
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
        projected, x = do.project(f"{layer}.self_attn", x)
        hidden = do.padding if config.encoder == "mvts" else None
        attended = attend_in_layer(config, weights, f"{layer}.self_attn", projected, hidden, batch, training)
        x = do.add_and_norm(x, attended, f"{layer}.self_attn.out_proj", f"{layer}.norm1")
        x = do.feed_forward(x, f"{layer}.linear1", f"{layer}.linear2", f"{layer}.norm2")
    if config.encoder == "flowformer":
        x = do.norm("norm", x)
    y = do.head("head", x, batch)
    return y.squeeze(-1) if config.task == "regression" else y


def attend_in_layer(
    config: SeriesConfig | SequenceConfig, weights: Stacked, name: str, projected: Tensor, padding: Tensor | None,
    batch: int, training: bool,
) -> Tensor:  # fmt: skip
    """Self-attention of queries, keys and values side by side, [members, batch · length, d_model].

    Args:
        name: of the attention module.
        projected: [members, batch · length, 3 · d_model].
        padding: [members, batch, length], what is hidden from attention.
    """
    heads = config.heads
    parts = (part.unflatten(1, (batch, -1)).unflatten(-1, (heads, -1)) for part in SideBySide.apply(projected))
    q, k, v = (part.transpose(2, 3) for part in parts)  # [members, batch, heads, length, head_dim]
    p = config.dropout if config.attention_dropout is None else config.attention_dropout
    learned, fixed = f"{name}.learned.", f"{name}.feature_"
    assert isinstance(config.mechanism, Primal)
    out = attend(
        q, k, v, config.mechanism, padding, p if training else 0.0, config.impl,
        {n.removeprefix(learned): x for n, x in weights.parameters.items() if n.startswith(learned)},
        {n.removeprefix(fixed): x[0] for n, x in weights.buffers.items() if n.startswith(fixed)},
    )  # fmt: skip
    if (bias := weights.parameters.get(f"{name}.mechanism_bias")) is not None:
        out = out + bias[:, None, :, None]
    return out.transpose(2, 3).flatten(3).flatten(1, 2)
