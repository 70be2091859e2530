"""The transformers for multivariate time series that the paper's tables are made with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..base.randomness import DrawingFrom
from .blocks import flowformer_blocks, mvts_blocks
from .config import SeriesConfig


class SeriesTransformer(nn.Module):
    """Embed each step, add learned positions, encode, flatten, predict.

        x_t = √d · (W s_t + b) + p_t;   y = V flatten(mask(dropout(gelu(encoder(dropout(x)))))) + c

    There is no pooling over time, so a model has one length. Nothing in it depends on the values it sees: it can be
    captured in a graph, and members with stacked parameters can run together under `torch.vmap`.

    >>> model = SeriesTransformer(SeriesConfig(channels=3, length=20, outputs=4, mechanism="bn+sh"))
    >>> model(torch.randn(2, 20, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.config = config
        mvts = config.encoder == "mvts"
        self.embedding = nn.Linear(config.channels, config.d_model)
        self.positions = nn.Parameter(torch.empty(config.length, config.d_model).uniform_(-0.02, 0.02))
        self.layers = nn.ModuleList((mvts_blocks if mvts else flowformer_blocks)(config))
        self.norm = nn.Identity() if mvts else nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.length * config.d_model, config.outputs)
        self.hides_padding = mvts

    def forward(self, series: Tensor, padding: Tensor | None = None) -> Tensor:
        """Scores [batch, classes], or predictions [batch] for regression.

        Args:
            series: [batch, length, channels]; what stands at padded steps does not matter.
            padding: [batch, length], True after the end of a series, as `Split.padding` gives it.
        """
        expected = (self.config.length, self.config.channels)
        if series.dim() != 3 or series.shape[1:] != expected:
            raise ValueError(
                f"series must be [batch, length, channels] = [batch, {expected[0]}, {expected[1]}], got "
                f"{list(series.shape)}; pad or cut them to the length of the model"
            )
        if padding is not None:
            if padding.shape != series.shape[:2] or padding.dtype != torch.bool:
                raise ValueError(
                    f"padding must be boolean, [batch, length] = {list(series.shape[:2])}, got {padding.dtype} "
                    f"{list(padding.shape)}"
                )
            series = series.masked_fill(padding.unsqueeze(-1), 0.0)
        x = self.encode(series, padding)
        x = self.dropout(nn.functional.gelu(x))
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        y = self.head(x.flatten(1))
        return y.squeeze(-1) if self.config.task == "regression" else y

    def encode(self, series: Tensor, padding: Tensor | None = None) -> Tensor:
        """Embedded and encoded steps, [batch, length, d_model]."""
        x = self.embedding(series) * math.sqrt(self.config.d_model)
        x = self.dropout(x + self.positions)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding if self.hides_padding else None)
        return self.norm(x)


def build(config: SeriesConfig, seed: int) -> SeriesTransformer:
    """A model, on the CPU, with the initial weights of a seed; the caller's random state is left alone.

    For one seed every mechanism starts from the same weights: what a mechanism learns of its own is not drawn.
    """
    with DrawingFrom(torch.Generator().manual_seed(seed)):
        return SeriesTransformer(config)
