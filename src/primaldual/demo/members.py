"""Models of a mechanism, trained together by the library, with what the demo shows of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data import Dataset
from ..primal import Primal
from ..regression import head_distance
from ..regression.calls import attention_calls
from ..regression.maps import head_maps
from ..training import Recipe, Record, Store, Watch, train
from .settings import SHOWN, DemoError


class Member(NamedTuple):
    """One trained model: the library's record of it, and its attention."""

    mechanism: str
    primal: Primal
    record: Record
    seconds: float
    """CPU time of training and of the evaluation after each epoch, shared among those that trained together."""
    head_distance: float
    maps: Tensor
    """Of the series that is shown, [layers, heads, length, length]."""

    @property
    def seed(self) -> int:
        """Of initial weights, batch order and dropout."""
        return self.record.seed

    @property
    def losses(self) -> list[float]:
        """Of training, per epoch."""
        return self.record.history["loss"]

    @property
    def accuracies(self) -> list[float]:
        """On the test set, in percent, per epoch."""
        return self.record.history["test"]

    @property
    def accuracy(self) -> float:
        """After the last epoch."""
        return self.accuracies[-1]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; attention maps are left out."""
        return {
            "mechanism": self.mechanism, "seed": self.seed, "trained_with": self.record.members,
            "losses": self.losses, "accuracies": self.accuracies, "seconds": self.seconds,
            "parameters": self.record.parameters, "head_distance": self.head_distance, "primal": self.primal.to_dict(),
        }  # fmt: skip


def train_members(
    name: str, primal: Primal, data: Dataset, recipe: Recipe, seeds: Sequence[int], watch: Watch
) -> list[Member]:
    """A model per seed.

    Raises:
        DemoError: one of them came to a loss that is not finite.
    """
    with TemporaryDirectory() as folder:
        start = time.process_time()  # a busy machine does not change it much
        records = train(data, primal, recipe, seeds, folder=folder, watch=[watch])
        seconds = (time.process_time() - start) / len(records)
        if failed := [record for record in records if record.failure]:
            raise DemoError(f"{name}, seed {failed[0].seed}: {failed[0].failure}. Please report this as a bug.")
        models = [Store(folder).model(record.key) for record in records]
    shown = int((data.test.y == data.classes.index(SHOWN)).nonzero()[0])
    return [
        Member(name, primal, record, seconds, _distance(model, data.test.x), _maps(model, data.test.x[shown]))
        for record, model in zip(records, models, strict=True)
    ]


def _distance(model: nn.Module, series: Tensor) -> float:
    """Between the maps of two heads, on average over pairs of heads, series and layers."""
    found = head_distance(model, series).shared
    assert found is not None  # mean pooling has weights to share
    return found.mean


def _maps(model: nn.Module, series: Tensor) -> Tensor:
    """The attention weights [layers, heads, length, length] of every layer; a window's is shared by its steps."""
    return torch.stack([head_maps(call, 0) for call in attention_calls(model, series.unsqueeze(0))])
