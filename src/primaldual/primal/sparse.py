"""S of sparse heads: a subset for each query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .features import Parameters
from .patterns import Pattern, Strided
from .pooled import Pooled
from .training_sets import AllKeys, Points, TrainingSet

PAIRS_AT_ONCE = 1 << 20
"""A rule works with 64-bit integers: of a long sequence they would take more memory than all scores."""


@dataclass(frozen=True)
class Sparse(TrainingSet):
    """Each query is fitted to its own subset, given by a pattern in the coordinates of `over`."""

    pattern: Pattern = Strided()
    over: TrainingSet = AllKeys()

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise ValueError(f"Sparse: pattern must be a Pattern such as Strided(16), got {self.pattern!r}")
        if not isinstance(self.over, AllKeys | Pooled):
            raise ValueError(f"Sparse: over must be AllKeys() or Pooled(...), got {self.over!r}")
        if isinstance(self.over, Pooled) and self.over.how == "kmeans":
            raise ValueError("Sparse: k-means clusters have no order, so no pattern applies to them; pool by windows")

    def head_scales(self, heads: int) -> tuple[int, ...]:
        return self.over.head_scales(heads)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return self.over.learned(heads, head_dim)

    def reduce(self, keys: Tensor, values: Tensor, seen: Tensor, scale: int, parameters: Parameters) -> Points:
        return self.over.reduce(keys, values, seen, scale, parameters)

    def visible(self, scale: int, queries: int, tokens: int, device: torch.device) -> Tensor | None:
        i = self.coordinate(torch.arange(queries, device=device), scale, tokens)
        points = self.points(scale, tokens)
        j = torch.arange(points, device=device)
        if torch.compiler.is_compiling() or queries * points <= PAIRS_AT_ONCE:
            return self.pattern.allows(i[:, None], j, points)
        shown, rows = torch.empty(queries, points, dtype=torch.bool, device=device), max(1, PAIRS_AT_ONCE // points)
        for part, some in zip(shown.split(rows), i.split(rows), strict=True):
            part.copy_(self.pattern.allows(some[:, None], j, points))
        return shown

    def coordinate(self, index: Tensor, scale: int, tokens: int) -> Tensor:
        return self.over.coordinate(index, scale, tokens)

    def points(self, scale: int, tokens: int) -> int:
        return self.over.points(scale, tokens)

    def causal_refusal(self, scale: int) -> str | None:
        return self.pattern.causal_refusal() or self.over.causal_refusal(scale)

    def text(self, x: str = "x") -> str:
        return f"per query i the keys j with {self.pattern.text()}; of: {self.over.text()}"

    def latex(self, x: str = "x") -> str:
        return rf"\{{j : {self.pattern.latex()}\}} \subset {self.over.latex()}"
