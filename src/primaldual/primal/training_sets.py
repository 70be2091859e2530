"""S, the training set that each head's regression is fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._spec import Spec
from .features import Parameters


class Points(NamedTuple):
    """The training pairs of some heads. R is 1, or the number of queries when each query has its own set.

    keys [B, H, R, W, D], values [B, H, R, W, Dv], seen [B, H or 1, R, W] (which points take part),
    share [B or 1, H or 1, R or 1, W, S] (how a point's weight is shared among tokens; None where it cannot be).
    """

    keys: Tensor
    values: Tensor
    seen: Tensor
    share: Tensor | None


@dataclass(frozen=True)
class TrainingSet(Spec):
    """Base class: which (key, value) pairs a head is fitted to.

    Override `reduce` to fit to fewer points than there are tokens, `visible` to give each query its own subset.
    """

    def head_scales(self, heads: int) -> tuple[int, ...]:
        """A positive integer per head; heads of one scale share one call of `reduce`."""
        return (1,) * heads

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """Initial values of what is learned, by name."""
        return {}

    def reduce(self, keys: Tensor, values: Tensor, seen: Tensor, scale: int, parameters: Parameters) -> Points:
        """From tokens to points.

        keys [B, H, S, D] and values [B, H, S, Dv] are those of the heads of this scale;
        seen [B, 1, R, S] says which tokens exist, for each query where R is not 1.
        """
        one_to_one = torch.eye(keys.shape[-2], dtype=keys.dtype, device=keys.device)
        return Points(keys.unsqueeze(2), values.unsqueeze(2), seen, one_to_one[None, None, None])

    def visible(self, scale: int, queries: int, tokens: int, device: torch.device) -> Tensor | None:
        """Boolean [queries, points], or None when every query is fitted to all points."""
        return None

    def coordinate(self, index: Tensor, scale: int, tokens: int) -> Tensor:
        """The point that a token index falls into."""
        return index

    def points(self, scale: int, tokens: int) -> int:
        """How many points `tokens` tokens become."""
        return tokens

    def causal_refusal(self, scale: int) -> str | None:
        """Why heads of this scale have no causal form; None when they have one."""
        if type(self).reduce is TrainingSet.reduce:
            return None
        return f"{type(self).__name__} does not say what its points are when later tokens are hidden"


@dataclass(frozen=True)
class AllKeys(TrainingSet):
    """every key is a training point"""

    def text(self, x: str = "x") -> str:
        return "all keys"

    def latex(self, x: str = "x") -> str:
        return r"\{1,\dots,N\}"
