"""FLOPs of a language model for each token, in closed form.

    products    2 for each weight of a matrix that a token passes, the table of tokens once, as the product at the end
    attention   4 D for each pair of a query and a point that it sees, in every head of D channels: the mean over the
                places of a window. Query i of N sees the windows of scale s among its i tokens, ⌈i / s⌉, the one under
                way among them; in all, Σ_i ⌈i / s⌉. A finite Φ of F features takes 4 F (D + 1) for each token instead
    maps        of what pools, re-centres and convolves, and of gates, by `Expansion.cost`

A multiply-add is two. Norms, softmax and what else takes some operations for each number are not counted. The backward
pass takes twice the forward pass. This is what the model needs; what an executor computes beside it, such as pairs
under a mask or scores for a second time, is not in it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..dual import derive
from ..primal import Primal
from .language import LanguageConfig, LanguageModel


class LanguageFlops(NamedTuple):
    """Of the forward pass, for a token, by part of the model."""

    products: float
    attention: float
    maps: float

    @property
    def forward(self) -> float:
        """All parts together."""
        return self.products + self.attention + self.maps

    @property
    def training(self) -> float:
        """Forward and backward."""
        return 3 * self.forward

    def to_dict(self) -> dict[str, float]:
        """The parts and their sums, rounded to whole operations."""
        sums = {"forward": self.forward, "training": self.training}
        return {name: float(round(value)) for name, value in (self._asdict() | sums).items()}


def flops(config: LanguageConfig) -> LanguageFlops:
    """For a token of a window that is as long as the model's context.

    >>> from primaldual.models import LANGUAGE_SIZES
    >>> softmax, scaled = (flops(LANGUAGE_SIZES["small"].config(256, name)) for name in ("softmax", "sh"))
    >>> round(scaled.attention / softmax.attention, 2), round(softmax.forward / 1e6, 1)
    (0.58, 26.2)
    """
    context, heads, head_dim = config.context, config.heads, config.d_model // config.heads
    with torch.device("meta"):
        model = LanguageModel(config)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and _is_product(name))
    cost = derive(config.primal).cost(queries=context, keys=context, heads=heads, head_dim=head_dim)
    attention = sum(_of_head(config.primal, scale, context, head_dim) for scale in _scales(config))
    return LanguageFlops(2.0 * weights, config.layers * attention / context, config.layers * cost.maps / context)


def _scales(config: LanguageConfig) -> tuple[int, ...]:
    return config.primal.training_set.head_scales(config.heads)


def _is_product(name: str) -> bool:
    """Whether a parameter with two dimensions is a factor of a product that maps do not have: no place, no kernel."""
    return name != "positions" and ".learned." not in name and ".made." not in name


@lru_cache(maxsize=256)
def _of_head(primal: Primal, scale: int, context: int, head_dim: int) -> int:
    """Of the attention of one head over a window."""
    training_set = primal.training_set
    visible = training_set.visible(scale, context, context, torch.device("cpu"))
    if visible is not None:
        own = training_set.coordinate(torch.arange(context), scale, context)
        pairs = int((visible & (torch.arange(visible.shape[1]) <= own[:, None])).sum())
    elif primal.features.finite:
        return 4 * context * primal.features.dim(head_dim) * (head_dim + 1)
    else:
        pairs = sum(training_set.points(scale, tokens) for tokens in range(1, context + 1))
    return 4 * head_dim * pairs
