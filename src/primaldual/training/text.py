"""A language model as a task: which token comes next, in bits per byte of text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data.text import TextPart, TextSet
from ..models import LanguageModel, LanguageSizes
from ..models.language_flops import flops
from ..primal import Primal, as_primal
from .recipe import Recipe
from .task import Batch, Loss, Metric, Task

EVALUATED = 1 << 16
"""Tokens that are evaluated at once, with few different ones."""
SCORES = 1 << 28
"""Scores that are computed at once in an evaluation, at most."""


class TextTask(Task):
    """A text, and the language model that is trained on it.

    The text lies on the device once, as compact as on the disk; a batch is read from there. Cases are windows, of as
    many tokens as the model has context. They lie side by side, so that an epoch passes every token once, and each
    begins anew: its first tokens are predicted from few. The last window of a part ends where the part ends, over some
    of the one before, which an evaluation leaves out: there, every token of a part is predicted once. What is reported
    is the sum of −log₂ p over all of them, separators among them, divided by the bytes of the documents with one for
    each separator; so it is comparable between tokenizers.

    Members compute in turn: one of these models fills a device, and the memory for the activations is that of one.

    Args:
        data: the text.
        mechanism: of the attention, or its name.
        sizes: of the model.
        impl: the executor of the attention, as in `primaldual.attention`.
    """

    metric = Metric("bits per byte", more_is_better=False)
    precise = ("norm", "feature_")

    def __init__(
        self, data: TextSet, mechanism: str | Primal = "softmax", sizes: LanguageSizes | None = None, *,
        impl: str = "auto",
    ) -> None:  # fmt: skip
        sizes = sizes or LanguageSizes()
        self.dataset, self.sizes, self.mechanism = data, sizes, as_primal(mechanism)
        self.config = sizes.config(data.vocabulary, self.mechanism, impl)
        self.name = data.name
        self.parts = {part: self._windows(part, where) for part, where in data.parts.items()}
        tokens = min(EVALUATED, SCORES // data.vocabulary)
        self.evaluated_at_once = max(1, tokens // self.config.context)
        self._stored: dict[torch.device, Tensor] = {}

    @classmethod
    def of(cls, data: TextSet, mechanism: str | Primal, recipe: Recipe) -> TextTask:
        """The task that a recipe trains."""
        if type(recipe.model) is not LanguageSizes:
            raise ValueError(f"text needs a recipe with model=LanguageSizes(…), got {recipe.model!r}")
        return cls(data, mechanism, recipe.model)

    def _windows(self, part: str, where: TextPart) -> Batch:
        """Of each window: where it begins, how many of its last tokens an evaluation counts, and their bytes."""
        context, predicted = self.config.context, where.predicted
        if predicted < context:
            raise ValueError(
                f"{self.dataset.name}: the {part} part has {predicted} tokens to predict, a window {context}; "
                f"give a smaller context, or more text"
            )
        starts = torch.arange(0, predicted, context)
        counted = (predicted - starts).clamp(max=context)
        bytes_ = counted.double() * (where.bytes / predicted)
        return where.start + starts.clamp(max=predicted - context), counted, bytes_

    def build(self) -> LanguageModel:
        return LanguageModel(self.config)

    def tensors(self, part: str, dtype: torch.dtype, device: torch.device) -> Batch:
        return tuple(x if x is None else x.to(device) for x in self.parts[part])

    def take(self, tensors: Batch, rows: Tensor | slice, length: int | None = None) -> Batch:
        """Tokens [..., context + 1] of the windows in these rows, how many are counted, and their bytes."""
        starts, counted, bytes_ = tensors
        assert starts is not None and counted is not None and bytes_ is not None
        first = starts[rows].unsqueeze(-1)
        places = first + torch.arange(self.config.context + 1, device=first.device)
        return self._on(first.device)[places].long(), counted[rows], bytes_[rows]

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._stored:
            self._stored[device] = torch.from_numpy(np.asarray(self.dataset.tokens)).to(device)
        return self._stored[device]

    def loss(self, model: nn.Module, *batch: Any) -> Loss:
        return self._each(model, batch[0]).mean()

    def score(self, model: nn.Module, *batch: Any) -> tuple[Tensor, Tensor]:
        tokens, counted, bytes_ = batch
        context = self.config.context
        here = torch.arange(context, device=tokens.device) >= context - counted.unsqueeze(-1)
        return (self._each(model, tokens).double() * here).sum(), bytes_.sum()

    def _each(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """−log p of every token but the first, [batch, context], in at least float32."""
        scores = model(tokens[:, :-1])
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(tokens[:, 1:])

    def finish(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Bits per byte."""
        return total / count / math.log(2)

    def decays(self, name: str, shape: torch.Size) -> bool:
        """Matrices alone, and of those none that a mechanism learns, which start at something else than noise."""
        return len(shape) > 1 and ".learned." not in name

    def speed(self, cases_per_second: float) -> dict[str, float]:
        return {"tokens_per_second": cases_per_second * self.config.context}

    @property
    def hash(self) -> str:
        """Of the text."""
        return self.dataset.hash

    @property
    def about(self) -> dict[str, Any]:
        """What follows from the model: for the record alone, but for an executor that was asked for."""
        counted = {"flops_per_token": flops(self.config).to_dict()}
        return counted if self.config.impl == "auto" else counted | {"impl": self.config.impl}

    def identity(self) -> dict[str, Any]:
        found = {"mechanism": self.stated, "data": self.hash}
        return found if self.config.impl == "auto" else found | {"impl": self.config.impl}

    def data(self) -> dict[str, Any]:
        """Of every part the documents and the bytes."""
        data = self.dataset
        found: dict[str, Any] = {"name": self.name, "hash": self.hash, "tokenizer": data.tokenizer}
        found |= {part: one.documents for part, one in data.parts.items()}
        return found | {"bytes": {part: one.bytes for part, one in data.parts.items()}, "notes": list(data.notes)}
