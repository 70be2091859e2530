"""Members that train together: their weights, optimiser and data on one device; one step, one evaluation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Batches
from .capture import Captured, WaitsForDeviceError
from .optimizer import Optimizer
from .parts import Part, hold_out
from .recipe import DTYPES, Recipe
from .stacked import Stacked
from .task import Batch, Task, built, cases

logger = logging.getLogger(__name__)

PIECES = 16
"""A part of at most so many pieces is evaluated by one graph."""


class Ensemble:
    """One member per seed; none of them knows of the others.

    A step does for each member what its model, torch's optimiser and gradient clipping do for one model. On a CUDA
    device it is a graph, one for every size of batch. A member whose loss or gradient is not finite has left the
    ensemble for good: `alive` says so, and its weights get no gradient any more.

    Args:
        task: what is learned.
        recipe: how.
        seeds: one per member.
        device: where everything lives.
    """

    def __init__(self, task: Task, recipe: Recipe, seeds: Sequence[int], device: torch.device) -> None:
        check(task, recipe)
        computed = DTYPES[recipe.dtype]
        kept = torch.promote_types(computed, torch.float32)
        self.task, self.recipe, self.seeds, self.device = task, recipe, tuple(seeds), device
        rows = held = None
        if recipe.validation:
            rows, held = hold_out(task.name, cases(task.parts["train"]), task.classes(), recipe.validation)
        self.weights = Stacked(
            [built(task, seed) for seed in seeds], device, kept, computed, task.precise, task.left_out
        )
        whole = Part.of(task, "train", computed, device)
        self.train = whole if rows is None else whole.rows(rows)
        self.parts = {part: Part.of(task, part, computed, device).by_length() for part in task.parts if part != "train"}
        if held is not None:
            self.parts["validation"] = whole.rows(held).by_length()
        self.members = task.members(self.weights, self.train.tensors)
        self.batches = Batches(len(self.train), recipe.batch_size, self.train.lengths, recipe.lengths)
        steps = recipe.steps or recipe.end * len(self.batches)
        others = any(not task.decays(name, x.shape[1:]) for name, x in self.weights.parameters.items())
        self.optimizer = Optimizer(
            self.weights.matrix,
            recipe.optimizer,
            recipe.learning_rate,
            steps,
            recipe.schedule,
            recipe.weight_decay,
            recipe.eps,
            recipe.square_beta,
            self.weights.columns(task.decays) if others else None,
        )
        self.alive = torch.ones(len(self.seeds), dtype=torch.bool, device=device)
        self.total = torch.zeros(len(self.seeds), dtype=kept, device=device)
        self._pool: Any = None  # memory that all graphs share
        self._steps: dict[tuple[int, int | None], Callable[[Tensor], Tensor]] = {}
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

    def start_from(self, member: int, state: Mapping[str, Tensor]) -> None:
        """Give a member weights of a model; what the optimiser knows stays."""
        with torch.no_grad():
            for name, x in self.weights.named(self.weights.matrix[member]):
                x.copy_(state[name])
            for name, x in self.weights.buffers.items():
                x[member].copy_(state[name])
        self.weights.refresh()

    def step(self, rows: Tensor, length: int | None = None) -> None:
        """Train every member on its own rows [members, batch] of the training part, cut to a length if one is given."""
        size = rows.shape[1], length
        if size not in self._steps:
            step = partial(self._step, length=length)
            self._steps[size] = self._captured(step, rows) if self.device.type == "cuda" else step
        self._steps[size](rows)

    @property
    def captured(self) -> bool:
        """Whether the steps made so far are CUDA graphs."""
        return all(isinstance(step, Captured) for step in self._steps.values())

    def _step(self, rows: Tensor, length: int | None = None) -> Tensor:
        losses, gradient = self._losses(rows, length), self.weights.matrix.grad
        assert gradient is not None
        norms = torch.linalg.vector_norm(gradient, dim=1)
        self.alive.logical_and_(losses.isfinite() & norms.isfinite())
        clip = math.inf if self.recipe.clip is None else self.recipe.clip
        if self.weights.fused:
            self.optimizer.clipped_step(norms, clip, self.alive, self.weights.reduced)
        else:
            gradient.mul_((clip / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1))
            gradient.masked_fill_(~self.alive.unsqueeze(1), 0.0)
            self.optimizer.step()
            self.weights.refresh()
        self.total.add_(losses * rows.shape[1])
        return losses

    def _losses(self, rows: Tensor, length: int | None) -> Tensor:
        """[members]; the gradient of their mean over the batch is in the matrix."""
        if self.recipe.accumulate == 1:
            return self.members.learn(self._batch(rows, length))
        parts = [
            self.members.learn_part(self._batch(part, length), add=i > 0)
            for i, part in enumerate(rows.tensor_split(min(self.recipe.accumulate, rows.shape[1]), 1))
        ]
        total, count = torch.stack([total for total, _ in parts]).sum(0), sum(count for _, count in parts)
        gradient = self.weights.matrix.grad
        assert gradient is not None
        gradient.div_(count.unsqueeze(1) if isinstance(count, Tensor) else count)
        return total / count

    def _batch(self, rows: Tensor, length: int | None) -> Batch:
        """The tensors [members, cases, …] of these rows."""
        return self.task.take(self.train.tensors, rows, length)

    def evaluate(self, part: str) -> Tensor:
        """[members]: the metric on a part."""
        if part not in self._evaluations:
            self._evaluations[part] = self._evaluation(self.parts[part])
        return self._evaluations[part]()

    def _evaluation(self, part: Part) -> Callable[[], Tensor]:
        if len(part) > PIECES * self.members.at_once(part.tensors):
            return partial(self._evaluate_in_pieces, part, {})
        whole = partial(self._evaluate, part)
        return self._captured(whole) if self.device.type == "cuda" else whole

    @torch.no_grad()
    def _evaluate(self, part: Part) -> Tensor:
        total = torch.zeros_like(self.total)
        count: Tensor | int = 0
        size = self.members.at_once(part.tensors)
        for rows, length in part.pieces(size):
            found, many = self.members.score(self.task.take(part.tensors, rows, length))
            total = total + found
            count = count + many
        return self.task.finish(total, count)

    def _evaluate_in_pieces(self, part: Part, made: dict[tuple[int, int | None], Callable[[Tensor], Tensor]]) -> Tensor:
        """The same with a graph for every size of piece, of which there are few, and not one of all pieces."""
        sums = torch.zeros(2, len(self.seeds), dtype=self.total.dtype, device=self.device)
        for piece, length in part.pieces(self.members.at_once(part.tensors)):
            rows = torch.arange(piece.start, min(piece.stop, len(part)), device=self.device)
            size = len(rows), length
            if size not in made:
                score = partial(self._score, part, length)
                made[size] = self._captured(score, rows) if self.device.type == "cuda" else score
            sums = sums + made[size](rows)
        return self.task.finish(*sums.unbind())

    @torch.no_grad()
    def _score(self, part: Part, length: int | None, rows: Tensor) -> Tensor:
        """[2, members]: of these rows of a part, the sum and the count."""
        found, many = self.members.score(self.task.take(part.tensors, rows, length))
        return torch.stack([found, torch.zeros_like(found) + many])

    def _captured(self, function: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Tensor]:
        """A graph; the warm-up leaves no trace, in the random state neither.

        What copies from the host cannot be captured, and runs without.
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
        return self.weights.generator

    def model(self, member: int) -> nn.Module:
        """A member as a model of its own, on the CPU, as the task delivers it."""
        return self.task.deliver(self.weights.load_into(built(self.task, self.seeds[member]), member))


def check(task: Task, recipe: Recipe) -> None:
    """A ValueError where a recipe is not for this task."""
    if "train" not in task.parts:
        raise ValueError(f"{task.name}: parts must have 'train', got {sorted(task.parts)}")
    if recipe.model != task.sizes:
        raise ValueError(
            f"{task.name}: the recipe's model must be {task.sizes!r}, as the task's is; got {recipe.model!r}"
        )
    if recipe.balanced != task.balanced:
        raise ValueError(f"{task.name}: the recipe says balanced={recipe.balanced}, the task {task.balanced}")
    if recipe.validation and "validation" in task.parts:
        raise ValueError(f"{task.name} has a validation part; leave out the recipe's share, {recipe.validation:g}")
    if recipe.patience and not (recipe.validation or "validation" in task.parts):
        raise ValueError(
            f"{task.name}: patience needs a validation share, such as 0.2, or a task with such a part; the test part "
            f"is never used for it"
        )
