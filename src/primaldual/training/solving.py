"""A bank of prototypes for a set of series, and the values that a regression gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from ..data import Dataset
from ..models import BankConfig, BankSizes, PrototypeBank, SolvedBank
from ..models.bank import mean_steps
from ..models.solved_bank import bank_features
from ..svr.ridge import ALPHAS, ridge
from .series import series_tensors

TEMPERATURES = tuple(2.0 ** (i / 2) for i in range(-2, 13))
"""What the scores of a regression on ±1 are multiplied by before a softmax: the best on left-out cases is taken."""
FEATURES, LEAST = 20_000_000, 256
"""Of all training series together: where those are many there are fewer prototypes, but no fewer than LEAST."""
SHRUNK = 1e-2
"""The largest penalty of each feature where there are classes."""
STILL = 1e-6
"""Features that move no more say nothing but how float32 was rounded."""


class Solved(NamedTuple):
    """A model, and what it says of every training series when its values are solved for without that one."""

    model: SolvedBank
    held_out: Tensor  # probabilities [cases, classes], or numbers [cases, 1]


def solved(data: Dataset, sizes: BankSizes, seed: int, device: torch.device, weights: Tensor | None = None) -> Solved:
    """A bank, the values of its prototypes, and the temperature under which left-out cases are most likely."""
    x, padding, y = series_tensors(data.train, torch.float32, device)
    assert x is not None and y is not None
    fewer = max(LEAST, FEATURES // (len(x) * sizes.features))
    bank = PrototypeBank.drawn(replace(sizes, prototypes=min(sizes.prototypes, fewer)), x, padding, seed)
    features = bank_features(bank, x, padding).cpu()
    y = y.cpu()
    config = BankConfig.of(bank, data.channels, data.length, mean_steps(x, padding), data.outputs, data.kind)
    if not data.classes:
        values = ridge(features, y.unsqueeze(1), weights=weights, least=STILL)
        return Solved(SolvedBank.of(config, bank, values), values.held_out)
    loss = log_loss(y, weights)
    # squared errors of ±1 would shrink scores of many classes too much, and of few series to the shares of the classes
    values = ridge(
        features, 2.0 * one_hot(y, data.outputs) - 1.0, [alpha for alpha in ALPHAS if alpha <= SHRUNK],
        lambda scores: min(loss(t * scores) for t in TEMPERATURES), weights, STILL,
    )  # fmt: skip
    temperature = min(TEMPERATURES, key=lambda t: loss(t * values.held_out))
    return Solved(SolvedBank.of(config, bank, values, temperature), (temperature * values.held_out).softmax(1))


def log_loss(y: Tensor, weights: Tensor | None) -> Callable[[Tensor], float]:
    """The mean cross-entropy of logits."""
    if weights is None:
        return lambda scores: float(cross_entropy(scores, y))
    share = (weights / weights.sum()).double()
    return lambda scores: float(share @ cross_entropy(scores, y, reduction="none").double())
