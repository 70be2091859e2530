"""How members compute a batch: one after the other, which any model can, or all at once, which is a family's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..base.randomness import lent
from .stacked import Stacked
from .task import Batch, Loss, Task, as_mean, as_sum, built


class Members(ABC):
    """The members of an ensemble. A batch of theirs is [members, cases, …]; what is evaluated is the same for all."""

    def __init__(self, task: Task, weights: Stacked) -> None:
        self.task, self.weights = task, weights

    @abstractmethod
    def learn(self, batch: Batch) -> Tensor:
        """The mean loss of each member, [members]; its gradient goes into the weights' matrix."""

    @abstractmethod
    def learn_part(self, batch: Batch, add: bool) -> tuple[Tensor, Tensor | int]:
        """The sum of the losses of a part of a batch, [members], and a count; the sum's gradient is put or added."""

    @abstractmethod
    def score(self, batch: Batch) -> tuple[Tensor, Tensor | int]:
        """What the metric of each member is made of, for the same cases: a sum [members], and a count."""

    def at_once(self, part: Batch) -> int:
        """Cases of a part that are evaluated at once."""
        return self.task.evaluated_at_once


class InTurn(Members):
    """Any model: each member's own weights take the place of the model's in turn."""

    def __init__(self, task: Task, weights: Stacked) -> None:
        super().__init__(task, weights)
        self._inside = _Inside(built(task, 0).to(weights.matrix.device))
        self._parameters, self._states = [], []
        for i in range(weights.members):
            parameters, buffers = weights.of_member(i)
            self._parameters.append(parameters)
            self._states.append({f"model.{name}": x for name, x in (parameters | buffers).items()})

    def learn(self, batch: Batch) -> Tensor:
        losses = []
        with self._randomness():
            for i, loss in self._losses(batch):
                mean = as_mean(loss)
                self.weights.gather_member(mean, self._parameters[i], i)
                losses.append(mean.detach())
        return torch.stack(losses).to(self.weights.matrix.dtype)

    def learn_part(self, batch: Batch, add: bool) -> tuple[Tensor, Tensor | int]:
        size = next(x.shape[1] for x in batch if x is not None)
        sums, counts = [], []
        with self._randomness():
            for i, loss in self._losses(batch):
                total, count = as_sum(loss, size)
                self.weights.gather_member(total, self._parameters[i], i, add)
                sums.append(total.detach())
                counts.append(count)
        return torch.stack(sums).to(self.weights.matrix.dtype), _stacked(counts)

    def score(self, batch: Batch) -> tuple[Tensor, Tensor | int]:
        self._inside.eval()
        with self._randomness():
            found = [functional_call(self._inside, state, (self.task.score, *batch)) for state in self._states]
        return torch.stack([total for total, _ in found]), _stacked([count for _, count in found])

    def _randomness(self) -> AbstractContextManager[None]:
        """A model of one's own draws from what the process shares: on the CPU that is lent the members' numbers."""
        own = self.weights.generator
        return lent(torch.default_generator, own) if own.device.type == "cpu" else nullcontext()

    def _losses(self, batch: Batch) -> Iterator[tuple[int, Loss]]:
        """Of each member, one at a time: what a loss was computed with is let go before the next."""
        self._inside.train()
        for i, state in enumerate(self._states):
            own = (None if x is None else x[i] for x in batch)
            yield i, functional_call(self._inside, state, (self.task.loss, *own))


class _Inside(nn.Module):
    """Calls a function with a model inside `functional_call`, so that all of the model has the weights given there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *batch: Any) -> Any:
        return function(self.model, *batch)


def _stacked(counts: list[Tensor | int]) -> Tensor | int:
    """Of every member; one number where it is no tensor."""
    tensors = [x for x in counts if isinstance(x, Tensor)]
    return torch.stack(tensors) if tensors else counts[0]
