"""One temperature for the probabilities of banks and members together, chosen on cases that were held out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .solving import log_loss

TEMPERATURES = tuple(2.0 ** (i / 8) for i in range(-24, 25))
PRIOR = 1.0
"""Times the squared logarithm of a temperature: what cases have to outweigh in their log loss."""
SURE = 1e-12
"""No probability is taken to be smaller."""


class Calibration(NamedTuple):
    """How probabilities were calibrated.

    Args:
        temperature: what their logarithms are divided by.
        cases: that were held out.
        before, after: their log loss without and with it.
    """

    temperature: float
    cases: int
    before: float
    after: float


def calibrated(probabilities: Tensor, temperature: float) -> Tensor:
    """p^(1/T), normalised.

    >>> calibrated(torch.tensor([[0.8, 0.2]]), 0.5)
    tensor([[0.9412, 0.0588]])
    """
    return probabilities if temperature == 1.0 else (probabilities.clamp(min=SURE).log() / temperature).softmax(-1)


def calibrate(probabilities: Tensor, y: Tensor, weights: Tensor | None = None) -> Calibration:
    """The temperature under which held-out cases are most likely; near 1 where those are few.

    Args:
        probabilities: [cases, classes], none of them of a model that has seen its case.
        y: [cases], the classes.
        weights: [cases].
    """
    logs, loss = probabilities.clamp(min=SURE).log(), log_loss(y, weights)
    prior = PRIOR / len(y)
    at = torch.tensor(TEMPERATURES, dtype=torch.float64).log()
    costs = [loss(logs / t) + prior * float(log) ** 2 for t, log in zip(TEMPERATURES, at, strict=True)]
    best = TEMPERATURES[min(range(len(costs)), key=costs.__getitem__)]
    return Calibration(best, len(y), loss(logs), loss(logs / best))
