"""RAdam, Adam and AdamW of one matrix, with coefficients that are computed ahead.

All are  p ← s_t p − a_t m / (b_t √v + c_t)  with the running means m of g and v of g². The coefficients follow from the
step alone: they are tabled in float64, so that a step in a graph waits for nothing and loses no precision (torch's
capturable RAdam computes them in float32, and begins to rectify a step early or late). A schedule is in a_t and s_t,
and in the share 1 − β₁ of g in m.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.encoder import clipped_update
from .schedule import BETA, Constant, Schedule

SQUARE_BETA = 0.999
"""β₂ unless a recipe says otherwise."""

OPTIMIZERS = ("radam", "adam", "adamw")


class Coefficients(NamedTuple):
    """Of one step: `a`, `b`, `c` of the formula, the share of the gradient in its mean, and what weights shrink to."""

    a: float
    b: float
    c: float
    share: float
    shrink: float


class Optimizer:
    """Updates a matrix in place by its `grad`.

    Args:
        matrix: the parameters, with a `grad` of their shape.
        kind: "radam", "adam" or "adamw", as torch's.
        learning_rate: what the schedule gives multiples of.
        steps: how many there will be; later ones are made like the last of them.
        schedule: of the learning rate.
        weight_decay: of "adamw".
        eps: what is added to √v.
        square_beta: β₂, the share of itself that v keeps.
        decayed: [columns], boolean: which weights the decay is for; None for all of them.
    """

    def __init__(
        self, matrix: Tensor, kind: str, learning_rate: float, steps: int, schedule: Schedule | None = None,
        weight_decay: float = 0.0, eps: float = 1e-8, square_beta: float = SQUARE_BETA, decayed: Tensor | None = None,
    ) -> None:  # fmt: skip
        schedule = schedule or Constant()
        self.matrix = matrix
        self.mean, self.square = torch.zeros_like(matrix), torch.zeros_like(matrix)
        self.done = torch.zeros(1, dtype=torch.int64, device=matrix.device)
        rows = [
            coefficients(
                kind,
                learning_rate * schedule.rate(step, steps),
                step + 1,
                schedule.beta(step, steps),
                weight_decay,
                eps,
                square_beta,
            )
            for step in range(steps)
        ]
        self._table = torch.tensor(rows, dtype=torch.float64).to(matrix)
        self._cycles, self._shrinks = schedule.cycles_beta, bool(weight_decay)
        self._square_share = 1 - square_beta
        self._decayed = decayed if weight_decay else None

    def tensors(self) -> dict[str, Tensor]:
        """What a step changes beside the matrix."""
        return {"mean": self.mean, "square": self.square, "done": self.done}

    def step(self) -> None:
        """One update."""
        gradient = self.matrix.grad
        assert gradient is not None
        row = self._table.index_select(0, self.done.clamp(max=len(self._table) - 1))
        a, b, c, share, shrink = row.unbind(1)
        self.done.add_(1)
        self.mean.lerp_(gradient, share if self._cycles else 1 - BETA)
        self.square.mul_(1 - self._square_share).addcmul_(gradient, gradient, value=self._square_share)
        if self._shrinks:
            self.matrix.mul_(shrink if self._decayed is None else torch.where(self._decayed, shrink, 1.0))
        self.matrix.sub_((self.mean * a).div_(self.square.sqrt().mul_(b).add_(c)))

    def clipped_step(self, norms: Tensor, clip: float, alive: Tensor, reduced: Tensor) -> None:
        """One update by the gradient, each row cut to the norm `clip` and 0 unless alive, in one pass over memory.

        Args:
            norms: of the gradient's rows.
            clip: the largest norm.
            alive: [rows].
            reduced: a copy of the last columns in another dtype, to be kept up to date; may be empty.
        """
        gradient = self.matrix.grad
        assert gradient is not None
        clipped_update(
            self.matrix, gradient, self.mean, self.square, reduced, norms, clip, alive, self._table, self.done,
            self._square_share, self._decayed,
        )  # fmt: skip
        self.done.add_(1)


def coefficients(
    kind: str, learning_rate: float, step: int, beta: float = BETA, weight_decay: float = 0.0, eps: float = 1e-8,
    square_beta: float = SQUARE_BETA,
) -> Coefficients:  # fmt: skip
    """Of a step, the first of which is 1."""
    first, second = 1 - beta**step, 1 - square_beta**step
    share, shrink = 1 - beta, 1 - learning_rate * weight_decay
    if kind != "radam":
        rate = learning_rate * math.sqrt(second) / first
        return Coefficients(rate, 1.0, eps * math.sqrt(second), share, shrink)
    longest = 2 / (1 - square_beta) - 1
    length = longest - 2 * step * square_beta**step / second
    if length <= 5.0:
        return Coefficients(learning_rate / first, 0.0, 1.0, share, shrink)
    ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return Coefficients(learning_rate * math.sqrt(ratio * second) / first, 1.0, eps, share, shrink)
