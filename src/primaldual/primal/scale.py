"""The temperature: queries and keys times a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._spec import is_number, operand
from .features import Parameters
from .inputs import Moments, PointMap


@dataclass(frozen=True)
class Scale(PointMap):
    """x ↦ c x, c a number or learned: a temperature on the scores.

    T maps queries and keys, so a softmax head has the scores c²·q·k/√D, and its temperature is 1/c². QK-norm with a
    temperature is `(RmsNorm(), Scale(learnable=True))`: the gain γ of `RmsNorm` is one for all heads, c one per head.

    This is exactly the paper's f, with T x = c x. As the last map under softmax it costs a pass over the queries, which
    are multiplied by c² alone (`RowConstantsCancel`); with a finite Φ both sides are mapped. Before `Recenter` it gives
    the same function as after it, and there the re-centring is what acts on the queries alone.

    Args:
        start: c, or where it begins.
        learnable: learn c.
        per_head: one c for each head; False: one for all heads.
    """

    start: float = 1.0
    learnable: bool = False
    per_head: bool = True

    def __post_init__(self) -> None:
        if not is_number(self.start) or not 0 < self.start < math.inf:
            raise ValueError(
                f"Scale: start must be a positive number, since c² is what multiplies a score; got {self.start!r}"
            )

    @property
    def by_head(self) -> tuple[str, ...]:
        return ("factor",) if self.per_head else ()

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"factor": torch.full((heads if self.per_head else 1,), float(self.start))} if self.learnable else {}

    def factor(self, x: Tensor, parameters: Parameters) -> Tensor | float:
        """c, as it broadcasts against points; heads are dimension 1."""
        if not self.learnable or "factor" not in parameters:
            return float(self.start)
        return parameters["factor"].reshape(-1, *(1,) * (x.dim() - 2))

    def apply(self, x: Tensor, moments: Moments, parameters: Parameters) -> Tensor:
        return (x * self.factor(x, parameters)).to(x.dtype)

    def text(self, x: str = "x") -> str:
        return f"{'c' if self.learnable else format(self.start, 'g')} {operand(x)}"

    def latex(self, x: str = "x") -> str:
        return f"{'c' if self.learnable else format(self.start, 'g')}\\,{operand(x)}"

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        if latex:
            return (r"Queries and keys are both multiplied by $c$, so a score $q^\top k$ is multiplied by $c^2$.",)
        return ("Queries and keys are both multiplied by c, so a score q·k is multiplied by c².",)
