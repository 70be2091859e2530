"""Members that train together: their weights, optimiser and data on one device; one step, one evaluation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..data import Dataset
from ..models import SeriesTransformer
from ..primal import Primal
from .capture import Captured, WaitsForDeviceError
from .members import forward
from .optimizer import Optimizer
from .parts import Part, hold_out
from .recipe import DTYPES, Recipe
from .stacked import Stacked

logger = logging.getLogger(__name__)

EVALUATED = 1 << 17
"""Steps of all members that are evaluated at once."""


class Ensemble:
    """One member per seed; none of them knows of the others.

    A step does for each member what `SeriesTransformer`, torch's optimiser and gradient clipping do for one model.
    On a CUDA device it is a graph. A member whose loss or gradient is not finite has left the ensemble for good:
    `alive` says so, and its weights get no gradient any more.
    `class_weights` [classes], or None, weigh the cross-entropy; they may be set before the first step.

    Args:
        data: training series (less what is held out), and the test series.
        mechanism: of every member.
        recipe: sizes and training.
        seeds: one per member.
        device: where everything lives.
    """

    def __init__(
        self, data: Dataset, mechanism: str | Primal, recipe: Recipe, seeds: Sequence[int], device: torch.device
    ) -> None:
        computed = DTYPES[recipe.dtype]
        kept = torch.promote_types(computed, torch.float32)
        self.recipe, self.seeds, self.device, self.classifies = recipe, tuple(seeds), device, bool(data.classes)
        rows, held = hold_out(data, recipe.validation)
        self.target_mean, self.target_std = data.target_mean, data.target_std
        self.weights = Stacked(recipe.model(data, mechanism), seeds, device, kept, computed)
        wide = (
            -(-data.channels // 8) * 8 if self.weights.fused else data.channels
        )  # fast products want rows of 16 bytes
        self.train = Part.of(data.train, device, computed, rows, wide)
        self.parts = {"test": Part.of(data.test, device, computed, None, wide)} if len(data.test) else {}
        if held is not None:
            self.parts["validation"] = Part.of(data.train, device, computed, held, wide)
        steps = recipe.epochs * math.ceil(len(self.train) / recipe.batch_size)
        self.optimizer = Optimizer(self.weights.matrix, recipe.optimizer, recipe.learning_rate, steps)
        self.alive = torch.ones(len(self.seeds), dtype=torch.bool, device=device)
        self.total = torch.zeros(len(self.seeds), dtype=kept, device=device)
        self.class_weights: Tensor | None = None
        if recipe.balanced and self.classifies:
            counts = self.train.y.bincount(minlength=data.outputs).clamp(min=1)
            self.class_weights = (len(self.train) / (data.outputs * counts)).to(kept)
        self._pool: Any = None  # memory that all graphs share
        self._steps: dict[int, Callable[[Tensor], Tensor]] = {}
        self._evaluations: dict[str, Callable[[], Tensor]] = {}

    def tensors(self) -> dict[str, Tensor]:
        """All that a step changes, by name."""
        return (
            {"weights": self.weights.matrix, "alive": self.alive, "total": self.total}
            | {f"optimizer.{name}": x for name, x in self.optimizer.tensors().items()}
            | {f"buffers.{name}": x for name, x in self.weights.buffers.items()}
        )

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave."""
        for name, x in self.tensors().items():
            x.copy_(tensors[name])
        self.weights.refresh()

    def step(self, rows: Tensor) -> None:
        """Train every member on its own rows [members, batch] of the training series."""
        size = rows.shape[1]
        if size not in self._steps:
            self._steps[size] = self._captured(self._step, rows) if self.device.type == "cuda" else self._step
        self._steps[size](rows)

    @property
    def captured(self) -> bool:
        """Whether the steps made so far are CUDA graphs."""
        return all(isinstance(step, Captured) for step in self._steps.values())

    def _step(self, rows: Tensor) -> Tensor:
        padding = None if self.train.padding is None else self.train.padding[rows]
        losses = self._losses(forward(self.weights, self.train.x[rows], padding, True), self.train.y[rows])
        self.weights.gather(losses.sum())
        losses, gradient = losses.detach(), self.weights.matrix.grad
        assert gradient is not None
        norms = torch.linalg.vector_norm(gradient, dim=1)
        self.alive.logical_and_(losses.isfinite() & norms.isfinite())
        if self.weights.fused:
            self.optimizer.clipped_step(norms, self.recipe.clip, self.alive, self.weights.rough)
        else:
            gradient.mul_((self.recipe.clip / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1))
            gradient.masked_fill_(~self.alive.unsqueeze(1), 0.0)
            self.optimizer.step()
            self.weights.refresh()
        self.total.add_(losses * rows.shape[1])
        return losses

    def _losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """[members]: mean cross-entropy, or mean squared error."""
        scores = scores.to(self.total.dtype)
        if not self.classifies:
            return (scores - y).square().mean(1)
        each = cross_entropy(scores.flatten(0, 1), y.flatten(), self.class_weights, reduction="none").view_as(y)
        return each.mean(1) if self.class_weights is None else each.sum(1) / self.class_weights[y].sum(1)

    def evaluate(self, part: str) -> Tensor:
        """[members]: accuracy in percent, or root mean squared error in the targets' own unit, on a part."""
        if part not in self._evaluations:
            function = partial(self._evaluate, self.parts[part])
            self._evaluations[part] = self._captured(function) if self.device.type == "cuda" else function
        return self._evaluations[part]()

    @torch.no_grad()
    def _evaluate(self, part: Part) -> Tensor:
        total = torch.zeros_like(self.total)
        members, length = len(self.seeds), part.x.shape[1]
        size = max(1, EVALUATED // (members * length))
        for start in range(0, len(part), size):
            chosen = slice(start, start + size)
            x, y = part.x[chosen].expand(members, -1, -1, -1), part.y[chosen]
            padding = None if part.padding is None else part.padding[chosen].expand(members, -1, -1)
            scores = forward(self.weights, x, padding, False)
            total += (scores.argmax(-1) == y).sum(1) if self.classifies else (scores - y).square().sum(1)
        return 100.0 * total / len(part) if self.classifies else self.target_std * (total / len(part)).sqrt()

    def _captured(self, function: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Tensor]:
        """A graph; the warm-up leaves no trace, in the random state neither.

        A mechanism that copies from the host cannot be captured, and runs without.
        """
        before = {name: x.clone() for name, x in self.tensors().items()}
        random = self.generator.get_state()
        made: Callable[..., Tensor]
        try:
            made = Captured(function, inputs, self._pool)
            self._pool = made.pool
        except WaitsForDeviceError as error:
            logger.warning("training without CUDA graphs, which is slower: %s", error)
            made = function
        self.load(before)
        self.generator.set_state(random)
        return made

    @property
    def generator(self) -> torch.Generator:
        """What dropout draws from."""
        if self.device.type != "cuda":
            return torch.default_generator
        return torch.cuda.default_generators[self.weights.matrix.get_device()]

    def model(self, member: int) -> SeriesTransformer:
        """A member as a model of its own, on the CPU; what it predicts is in the targets' own unit."""
        model = self.weights.member(member)
        if not self.classifies:
            with torch.no_grad():
                model.head.weight *= self.target_std
                model.head.bias.mul_(self.target_std).add_(self.target_mean)
        return model
