"""The encoder blocks of the two reference code bases; both normalise after each residual."""

from __future__ import annotations

from copy import deepcopy

from torch import Tensor, nn

from ..nn import MultiheadAttention, TransformerEncoderLayer
from .config import SeriesConfig


class StepBatchNorm(nn.BatchNorm1d):
    """Batch norm of [batch, length, channels], per channel over batch × time; padded steps take part."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, length, channels], the same out."""
        return super().forward(input.flatten(0, 1)).view_as(input)


def block(config: SeriesConfig) -> TransformerEncoderLayer:
    """Attention, then linear – GELU – dropout – linear; each with dropout, a residual and LayerNorm after it."""
    layer = TransformerEncoderLayer(
        config.d_model, config.heads, config.feedforward, config.dropout, "gelu", batch_first=True,
        mechanism=config.mechanism, impl=config.impl, left_padding=False,
    )  # fmt: skip
    if config.attention_dropout is not None:
        layer.self_attn.dropout = config.attention_dropout
    return layer


def mvts_blocks(config: SeriesConfig) -> list[TransformerEncoderLayer]:
    """BatchNorm for LayerNorm; copies of one block, so that all start from the same weights."""
    first = block(config)
    for name in ("norm1", "norm2"):
        setattr(first, name, StepBatchNorm(config.d_model, eps=1e-5))
    return [first, *(deepcopy(first) for _ in range(config.layers - 1))]


def flowformer_blocks(config: SeriesConfig) -> list[TransformerEncoderLayer]:
    """Drawn one by one; query, key, value and output projections start as plain linear layers do."""
    layers = [block(config) for _ in range(config.layers)]
    for layer in layers:
        projections_as_linear(layer.self_attn)
    return layers


def projections_as_linear(attention: MultiheadAttention) -> None:
    """Draw the projections of queries, keys, values and output as four plain linear layers start."""
    assert attention.in_proj_weight is not None and attention.in_proj_bias is not None
    bound = attention.embed_dim**-0.5
    for parameter in (attention.in_proj_weight, attention.in_proj_bias):
        nn.init.uniform_(parameter, -bound, bound)
    attention.out_proj.reset_parameters()
