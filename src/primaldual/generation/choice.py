"""Which token comes next, of the scores of all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """The token of the largest score, or one that is drawn.

    Args:
        temperature: 0 takes the largest score; else tokens are drawn by the softmax of the scores over it.
        top_p: drawn is only among the most probable tokens that together have at least this probability.

    >>> Choice()(torch.tensor([[0.1, 2.0, 0.3]]))
    tensor([1])
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, int | float) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature!r}")
        if not (isinstance(self.top_p, int | float) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be over 0 and at most 1, got {self.top_p!r}")
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(f"top_p={self.top_p:g} says what is drawn among; give a temperature over 0 with it")

    def __call__(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[rows, vocabulary] to [rows]."""
        if self.temperature == 0:
            return scores.argmax(-1)
        # each token has a place on [0, 1) as long as it is probable; one number for every row says which it is
        ordered, tokens = self.probabilities(scores).sort(dim=-1, descending=True, stable=True)
        at = torch.rand(len(scores), 1, generator=generator, dtype=torch.float64, device=_of(generator))
        ends = ordered.cumsum(-1)
        place = (ends <= at.to(ends.device) * ends[:, -1:]).sum(-1, keepdim=True)
        last = (ordered > 0).sum(-1, keepdim=True) - 1
        return tokens.gather(-1, place.minimum(last)).squeeze(-1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Of every token, in float64; those that are not drawn among have none."""
        found = (scores.double() / self.temperature).softmax(-1)
        if self.top_p == 1:
            return found
        ordered, tokens = found.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= self.top_p
        return found.masked_fill(torch.zeros_like(beyond).scatter(-1, tokens, beyond), 0.0)


def _of(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device
