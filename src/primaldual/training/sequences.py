"""Long sequences of tokens as a task: classification of documents, or of pairs of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data.sequences import Documents, SequenceSet
from ..models import SequenceClassifier, SequenceSizes
from ..primal import Primal, as_primal
from .members import Members
from .recipe import Recipe
from .sequence_forward import forward
from .stacked import Stacked
from .task import Batch, Loss, Metric, Task

BLOCK = 64
"""Batches are cut to a multiple of so many tokens, so that there are few lengths."""

EVALUATED = 1 << 19
"""Tokens that are evaluated at once."""


class SequenceTask(Task):
    """A set of documents, and the transformer that is trained on it.

    Documents lie on the device once, as compact as on the disk; a batch is read from there. Where documents are of
    unequal lengths batches are of similar ones (`Recipe.lengths`), and are cut.

    Args:
        data: documents and cases.
        mechanism: of the attention, or its name.
        sizes: of the model.
        impl: the executor of the attention, as in `primaldual.attention`.
    """

    metric = Metric("accuracy", more_is_better=True)
    precise = ("norm", "feature_")

    def __init__(
        self, data: SequenceSet, mechanism: str | Primal = "softmax", sizes: SequenceSizes | None = None, *,
        impl: str = "auto",
    ) -> None:  # fmt: skip
        self.dataset, self.sizes, self.mechanism = data, sizes or SequenceSizes(), as_primal(mechanism)
        self.config = self.sizes.config(data, self.mechanism, impl)
        self.name = data.name
        self.parts = {
            part: (torch.from_numpy(cases.documents), torch.from_numpy(cases.labels))
            for part, cases in data.parts.items()
        }
        self._stored: dict[torch.device, Stored] = {}

    @classmethod
    def of(cls, data: SequenceSet, mechanism: str | Primal, recipe: Recipe) -> SequenceTask:
        """The task that a recipe trains."""
        if recipe.model is not None and type(recipe.model) is not SequenceSizes:
            raise ValueError(f"long sequences need a recipe with model=SequenceSizes(…), got {recipe.model!r}")
        return cls(data, mechanism, recipe.model)

    def build(self) -> SequenceClassifier:
        return SequenceClassifier(self.config)

    def take(self, tensors: Batch, rows: Tensor | slice, length: int | None = None) -> Batch:
        """Tokens [..., length] of the documents in these rows, where there is none, and labels."""
        documents, labels = tensors
        assert documents is not None and labels is not None
        chosen = documents[rows]
        tokens, padding = self._on(chosen.device).read(chosen, length or self.dataset.length)
        if self.dataset.documents.shift == 0 and self.config.black_pixels_are_padding:
            return tokens, tokens == 0, labels[rows]
        return tokens, None if self._full else padding, labels[rows]

    @cached_property
    def _full(self) -> bool:
        """Whether every document is as long as the model's sequences."""
        return bool((self.dataset.documents.lengths == self.dataset.length).all())

    def _on(self, device: torch.device) -> Stored:
        if device not in self._stored:
            self._stored[device] = Stored.of(self.dataset.documents, device)
        return self._stored[device]

    def loss(self, model: nn.Module, *batch: Any) -> Loss:
        tokens, padding, y = batch
        return cross_entropy(_wide(model(tokens, padding)), y)

    def members(self, weights: Stacked, train: Batch) -> Members:
        return SequenceMembers(self, weights)

    def score(self, model: nn.Module, *batch: Any) -> tuple[Tensor, int]:
        tokens, padding, y = batch
        return (model(tokens, padding).argmax(-1) == y).sum(), len(y)

    def finish(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Accuracy in percent."""
        return 100.0 * total / count

    def lengths(self, part: str) -> Tensor | None:
        """Of the longer document of a case, up to a multiple of BLOCK; None where all are as long as can be."""
        if self._full:
            return None
        each = self.dataset.documents.lengths[self.dataset.parts[part].documents]
        longest = each if each.ndim == 1 else each.max(1)
        return torch.from_numpy(np.minimum(-(-longest // BLOCK) * BLOCK, self.dataset.length))

    def classes(self) -> Tensor | None:
        return torch.from_numpy(self.dataset.parts["train"].labels)

    @property
    def hash(self) -> str:
        """Of the set."""
        return self.dataset.hash

    @property
    def about(self) -> dict[str, Any]:
        """Nothing that recipe and data do not say, as a rule."""
        return {} if self.config.impl == "auto" else {"impl": self.config.impl}

    def identity(self) -> dict[str, Any]:
        return {"mechanism": self.stated, "data": self.hash} | self.about

    def data(self) -> dict[str, Any]:
        found = {"name": self.name, "hash": self.hash, "length": self.dataset.length}
        sizes = {part: len(cases) for part, cases in self.dataset.parts.items()}
        return found | sizes | {"classes": len(self.dataset.classes), "notes": list(self.dataset.notes)}


class SequenceMembers(Members):
    """All at once. A batch is tokens, their padding or None, and labels."""

    def __init__(self, task: SequenceTask, weights: Stacked) -> None:
        super().__init__(task, weights)
        self.config = task.config

    def losses(self, batch: Batch) -> Tensor:
        """Of every member, [members]."""
        tokens, padding, y = batch
        assert tokens is not None and y is not None
        scores = _wide(forward(self.config, self.weights, tokens, padding, True))
        return cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)

    def learn(self, batch: Batch) -> Tensor:
        losses = self.losses(batch)
        self.weights.gather(losses.sum())
        return losses.detach()

    def learn_part(self, batch: Batch, add: bool) -> tuple[Tensor, int]:
        assert batch[0] is not None
        count = batch[0].shape[1]
        sums = self.losses(batch) * count
        self.weights.gather(sums.sum(), add)
        return sums.detach(), count

    def score(self, batch: Batch) -> tuple[Tensor, int]:
        tokens, padding, y = batch
        assert tokens is not None and y is not None
        tokens, padding = (None if x is None else x.expand(self.weights.members, *x.shape) for x in (tokens, padding))
        assert tokens is not None
        scores = forward(self.config, self.weights, tokens, padding, False)
        return (scores.argmax(-1) == y).sum(1), len(y)

    def at_once(self, part: Batch) -> int:
        documents = self.weights.members * (2 if self.config.pairs else 1)
        return max(1, EVALUATED // (documents * self.config.length))


class Stored(NamedTuple):
    """Documents on a device: as in `Documents`, and where each of them begins and how long it is."""

    raw: Tensor
    starts: Tensor
    lengths: Tensor
    shift: int
    bits: int

    @classmethod
    def of(cls, documents: Documents, device: torch.device) -> Stored:
        """From the disk, or from memory."""
        starts, lengths = (torch.from_numpy(np.asarray(x)) for x in (documents.offsets[:-1], documents.lengths))
        raw = torch.from_numpy(documents.raw).to(device)
        return cls(raw, starts.to(device), lengths.to(device), documents.shift, documents.bits)

    def read(self, documents: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Ids [..., length] of documents […], 0 beyond their ends; and where that is.

        Longer documents are cut.
        """
        steps = torch.arange(length, device=documents.device)
        beyond = steps >= self.lengths[documents].unsqueeze(-1)
        places = (self.starts[documents].unsqueeze(-1) + steps).masked_fill_(beyond, 0)
        if self.bits == 8:
            tokens = self.raw[places].long()
        else:
            tokens = (self.raw[places >> 1].long() >> (4 * (places & 1))) & 15
        return tokens.add_(self.shift).masked_fill_(beyond, 0), beyond


def _wide(scores: Tensor) -> Tensor:
    """In at least float32."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
