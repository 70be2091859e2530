"""What an estimator is given, as the training takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import Dataset, Preparation, Split, fill_gaps
from ..data.ts import Kind


def dataset(name: str, X: Sequence[np.ndarray], y: Tensor, labels: Sequence[Any]) -> tuple[Dataset, Preparation]:
    """A set of series [channels, steps] with classes or targets, and how others are prepared like them."""
    series = [fill_gaps(np.asarray(one, dtype=np.float64).T) for one in X]
    found = Preparation.fit(series)
    if found.length < 2:
        raise ValueError(f"{name}: series of one step have no order; give longer ones")
    # a channel that is constant in training says nothing: it is not to explode when it is not in predict
    std = np.where(found.std > 1e-12 * np.abs(found.mean), found.std, 1.0)
    preparation = Preparation(found.mean, std, found.length)
    train = Split(*preparation.apply(series), y)
    kind: Kind = "classification" if labels else "regression"
    data = Dataset(
        name, kind, tuple(map(str, labels)), train, Split(train.x[:0], train.lengths[:0], y[:0]),
        torch.from_numpy(found.mean), torch.from_numpy(std), found.length,
    )  # fmt: skip
    return data, preparation


def weighed(
    X: Sequence[np.ndarray], y: np.ndarray, given: Any
) -> tuple[Sequence[np.ndarray], np.ndarray, Tensor | None]:
    """Series and targets that have a weight, and their weights where a `sample_weight` is given."""
    if given is None:
        return X, y, None
    weights = np.asarray(given, dtype=np.float64)
    if weights.shape != (len(X),):
        raise ValueError(f"sample_weight must be a number per series, [{len(X)}]; got the shape {list(weights.shape)}")
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ValueError("sample_weight must be finite numbers of at least 0, and some of them larger")
    rows = np.flatnonzero(weights)
    return [X[i] for i in rows], y[rows], torch.from_numpy(weights[rows])
