"""One training step on long sequences to measure: random documents, of which the longest fill the model's length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..data import sequences
from ..data.sequences import Cases, Documents, SequenceSet
from ..models import SequenceConfig
from ..paper.families import LONG
from ..training import Recipe, SequenceTask
from .rivals import LongLoop
from .training_case import TrainingCase

BATCHES = 4
"""So many batches of documents there are."""


@dataclass(frozen=True)
class LongCase(TrainingCase):
    """A task of the Long Range Arena. Batches are as long as the model: what real ones are cut to is not counted."""

    @property
    def _entry(self) -> Any:
        return sequences.known()[self.dataset]

    @property
    def length(self) -> int:
        return self._entry.length if self.steps is None else min(self.steps, self._entry.length)

    @property
    def recipe(self) -> Recipe:
        """The paper's, for so many steps as there are batches: the table of the optimiser's coefficients is short."""
        whole = LONG.recipe(self.dataset)
        return replace(whole, batch_size=self.batch or whole.batch_size, dtype=self.dtype, steps=100)

    @property
    def full_size(self) -> bool:
        whole = LONG.recipe(self.dataset)
        return self.length == self._entry.length and self.recipe.batch_size == whole.batch_size

    def config(self, impl: str | None = None) -> SequenceConfig:
        config = LONG.config(self.dataset, self.primal, self.recipe)
        self.primal.training_set.head_scales(config.heads)
        return replace(config, length=self.length, impl=impl or self.impl)

    def data(self) -> SequenceSet:
        """Documents of text are of half the model's length to all of it, pictures of all of it."""
        entry, draw = self._entry, np.random.default_rng(0)
        shape = (BATCHES * self.recipe.batch_size, *([2] if entry.pairs else []))
        many = int(np.prod(shape))
        shift = 0 if entry.pictures else 1
        lengths = draw.integers(self.length // 2, self.length + 1, many) if shift else np.full(many, self.length)
        raw = draw.integers(0, 256 - shift, int(lengths.sum())).astype(np.uint8)
        documents = Documents(raw, np.concatenate([[0], np.cumsum(lengths)]), shift)
        cases = Cases(np.arange(many).reshape(shape), draw.integers(0, entry.classes, shape[0]))
        return SequenceSet(
            self.dataset, entry.title, documents, {"train": cases}, tuple(map(str, range(entry.classes))), self.length,
            256,
        )  # fmt: skip

    def task(self, data: Any) -> SequenceTask:
        return SequenceTask(data, self.primal, self.recipe.model, impl=self.impl)  # type: ignore[arg-type]

    def about(self, data: Any) -> dict[str, Any]:
        series = len(data.parts["train"])
        return {"outputs": len(data.classes), "series": series, "padded": data.documents.shift == 1}

    @property
    def attended(self) -> int:
        return super().attended * (2 if self._entry.pairs else 1)

    @property
    def masked(self) -> bool:
        return True

    def rival(self, data: Any, device: torch.device) -> LongLoop:
        return LongLoop(self.task(data), self.recipe, device)
