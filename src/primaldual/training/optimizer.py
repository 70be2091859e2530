"""RAdam and Adam of one matrix, with coefficients that are computed ahead.

Both are  p ← p − a_t m / (b_t √v + c_t)  with the running means m of g and v of g². The coefficients follow from the
step alone: they are tabled in float64, so that a step in a graph waits for nothing and loses no precision (torch's
capturable RAdam computes them in float32, and begins to rectify a step early or late).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8


class Optimizer:
    """Updates a matrix in place by its `grad`.

    Args:
        matrix: the parameters, with a `grad` of their shape.
        kind: "radam" or "adam", as torch's with weight decay 0.
        learning_rate: constant.
        steps: how many there will be; later ones are made like the last of them.
    """

    def __init__(self, matrix: Tensor, kind: str, learning_rate: float, steps: int) -> None:
        self.matrix = matrix
        self.mean, self.square = torch.zeros_like(matrix), torch.zeros_like(matrix)
        self.done = torch.zeros(1, dtype=torch.int64, device=matrix.device)
        rows = [coefficients(kind, learning_rate, step) for step in range(1, steps + 1)]
        self._table = torch.tensor(rows, dtype=torch.float64).to(matrix)

    def tensors(self) -> dict[str, Tensor]:
        """What a step changes beside the matrix."""
        return {"mean": self.mean, "square": self.square, "done": self.done}

    def step(self) -> None:
        """One update."""
        gradient = self.matrix.grad
        assert gradient is not None
        a, b, c = self._table.index_select(0, self.done.clamp(max=len(self._table) - 1)).unbind(1)
        self.done.add_(1)
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        self.matrix.sub_((self.mean * a).div_(self.square.sqrt().mul_(b).add_(c)))

    def clipped_step(self, norms: Tensor, clip: float, alive: Tensor, rough: Tensor) -> None:
        """One update by the gradient, each row cut to the norm `clip` and 0 unless alive, in one pass over memory.

        Args:
            norms: of the gradient's rows.
            clip: the largest norm.
            alive: [rows].
            rough: a copy of the last columns in another dtype, to be kept up to date; may be empty.
        """
        from ..kernels.encoder.update_kernel import update

        rows, count = self.matrix.shape
        update[(-(-count // 1024), rows)](
            self.matrix, self.matrix.grad, self.mean, self.square, rough, norms, alive, self._table, self.done, count,
            count - rough.shape[1], len(self._table), clip, 1 - BETAS[0], 1 - BETAS[1], BLOCK=1024,
            HAS_ROUGH=rough.shape[1] > 0,
        )  # fmt: skip
        self.done.add_(1)


def coefficients(kind: str, learning_rate: float, step: int) -> tuple[float, float, float]:
    """a, b and c of a step, the first of which is 1."""
    first, second = 1 - BETAS[0] ** step, 1 - BETAS[1] ** step
    if kind == "adam":
        return learning_rate * math.sqrt(second) / first, 1.0, EPS * math.sqrt(second)
    longest = 2 / (1 - BETAS[1]) - 1
    length = longest - 2 * step * BETAS[1] ** step / second
    if length <= 5.0:
        return learning_rate / first, 0.0, 1.0
    ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return learning_rate * math.sqrt(ratio * second) / first, 1.0, EPS
