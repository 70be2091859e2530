"""How good predictions are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEAST = 1e-3
"""A probability below it counts as so much in the log loss: certainty that is wrong would else decide every mean."""


def of_labels(true: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Accuracy in percent, and the mean of the F1 of every class that is there or is predicted, in percent.

    >>> of_labels(np.array(["a", "a", "b", "b"]), np.array(["a", "b", "b", "a"]))
    {'accuracy': 50.0, 'macro_f1': 50.0}
    """
    f1 = []
    for label in np.union1d(true, predicted):
        both = ((true == label) & (predicted == label)).sum()
        f1.append(2 * both / ((true == label).sum() + (predicted == label).sum()))
    return {"accuracy": 100 * float((true == predicted).mean()), "macro_f1": 100 * float(np.mean(f1))}


def log_loss(true: np.ndarray, probabilities: np.ndarray, classes: Sequence[str] | np.ndarray) -> float | None:
    """The mean of −log p of the true class; None where every probability is 0 or 1: there is none to judge."""
    if np.isin(probabilities, (0.0, 1.0)).all():
        return None
    place = {label: i for i, label in enumerate(classes)}
    of_true = [row[place[label]] if label in place else 0.0 for row, label in zip(probabilities, true, strict=True)]
    return float(-np.log(np.maximum(of_true, LEAST)).mean())


def of_numbers(true: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Root mean squared and mean absolute error.

    >>> of_numbers(np.array([0.0, 0.0]), np.array([1.0, -7.0]))
    {'rmse': 5.0, 'mae': 4.0}
    """
    error = predicted.astype(np.float64) - true
    return {"rmse": float(np.sqrt((error**2).mean())), "mae": float(np.abs(error).mean())}
