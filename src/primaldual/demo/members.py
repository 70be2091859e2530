"""Models of a mechanism, trained together by the library, with what the demo shows of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor

from ..data import Dataset
from ..primal import Primal
from ..training import Recipe, Record, Store, Watch, train
from .heads import head_distance, head_maps
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
    maps = [head_maps(model, data.test.x) for model in models]
    return [
        Member(name, primal, record, seconds, head_distance(each), each[:, shown].clone())
        for record, each in zip(records, maps, strict=True)
    ]
