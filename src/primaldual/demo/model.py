"""A small transformer for multivariate time series, in the manner of mvts_transformer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..nn import TransformerEncoderLayer
from ..primal import Primal
from .recipe import Recipe


class SeriesTransformer(nn.Module):
    """Embed each step, add learned positions, encode, flatten, classify.

    Every mechanism starts from the same weights for a seed: none of the four has parameters of its own.
    """

    def __init__(self, primal: Primal, recipe: Recipe, *, channels: int, length: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(channels, recipe.d_model)
        self.positions = nn.Parameter(torch.empty(length, recipe.d_model).uniform_(-0.02, 0.02))
        self.dropout = nn.Dropout(recipe.dropout)
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                recipe.d_model, recipe.heads, recipe.feedforward, recipe.dropout, "gelu", batch_first=True,
                mechanism=primal,
            )
            for _ in range(recipe.layers)
        )  # fmt: skip
        for layer in self.encoder_layers():
            layer.self_attn.dropout = 0.0  # torch's fused attention has no dropout on a CPU
        self.classifier = nn.Linear(length * recipe.d_model, classes)

    def encoder_layers(self) -> list[TransformerEncoderLayer]:
        """The encoder's layers, as what they are."""
        return [layer for layer in self.layers if isinstance(layer, TransformerEncoderLayer)]

    def embed(self, series: Tensor) -> Tensor:
        """[batch, length, channels] to [batch, length, d_model]."""
        scaled = self.embedding(series) * math.sqrt(self.embedding.out_features)
        return self.dropout(scaled + self.positions)

    def forward(self, series: Tensor) -> Tensor:
        """[batch, length, channels] to logits [batch, classes]."""
        x = self.embed(series)
        for layer in self.layers:
            x = layer(x)
        x = self.dropout(nn.functional.gelu(x))
        return self.classifier(x.flatten(1))
