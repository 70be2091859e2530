"""What a training step is measured against: one model at a time, as the code bases of the field train it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss
from torch.nn.utils import clip_grad_norm_

from ..data import Dataset
from ..models import SequenceClassifier, build
from ..nn import MultiheadAttention
from ..training import Recipe, SequenceTask

if TYPE_CHECKING:
    from .training_case import TrainingCase


class SeriesLoop:
    """A model of time series in a plain torch loop: torch's fused softmax attention, the recipe's optimiser."""

    def __init__(self, case: TrainingCase, data: Dataset, device: torch.device) -> None:
        self.recipe, self.device, train = case.recipe, device, data.train.to(device)
        self.x, self.padding, self.y = train.x, train.padding, train.y
        self.loss = cross_entropy if data.classes else mse_loss
        self.model = build(case.config("sdpa" if case.mechanism == "softmax" else "auto"), 0).to(device).train()
        optimizer = {"radam": torch.optim.RAdam, "adam": torch.optim.Adam}[self.recipe.optimizer]
        self.optimizer = optimizer(self.model.parameters(), self.recipe.learning_rate)

    def __call__(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            scores = self.model(self.x[rows], None if self.padding is None else self.padding[rows])
        self.loss(scores.float(), self.y[rows]).backward()
        clip_grad_norm_(self.model.parameters(), self.recipe.clip or math.inf)
        self.optimizer.step()


class LongLoop:
    """A model of long sequences as the Long Range Arena is trained in torch: the map of every head is written out.

    Softmax attention, whatever the mechanism of the case: it is what people run today.
    """

    def __init__(self, task: SequenceTask, recipe: Recipe, device: torch.device) -> None:
        self.task, self.recipe, self.device = task, recipe, device
        model = SequenceClassifier(task.config)
        for layer in model.layers:
            layer.self_attn = Materialised(layer.self_attn)  # type: ignore[arg-type]
        self.model = model.to(device).train()
        self.tensors = task.tensors("train", torch.float32, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), recipe.learning_rate, eps=recipe.eps, weight_decay=recipe.weight_decay
        )

    def __call__(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            loss = self.task.loss(self.model, *self.task.take(self.tensors, rows))
        assert isinstance(loss, Tensor)
        loss.backward()
        self.optimizer.step()


class Materialised(nn.Module):
    """Softmax attention as written on paper, scores and weights in float32: what the field's code of 2021 does."""

    def __init__(self, layer: MultiheadAttention) -> None:
        super().__init__()
        assert layer.in_proj_weight is not None and layer.in_proj_bias is not None
        self.heads, self.dropout = layer.num_heads, layer.dropout
        self.weight, self.bias, self.out_proj = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, **others: object
    ) -> tuple[Tensor, None]:
        """As a layer of torch, for self-attention [batch, length, channels] without weights."""
        batch, length, _ = query.shape
        projected = nn.functional.linear(query, self.weight, self.bias)
        q, k, v = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).float()
        with torch.autocast(query.device.type, enabled=False):
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            if key_padding_mask is not None:
                scores = scores - 1e6 * key_padding_mask[:, None, None].float()
            weights = dropout(scores.softmax(-1), self.dropout, self.training)
            out = weights @ v
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, -1)), None
