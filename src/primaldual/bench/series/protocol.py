"""Which series are trained on and which are predicted: the archive's split, resamples of it, or folds within training.

Splits depend on the set and on their number alone, so that every method and every seed has the same.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from ...data import DataError
from .sets import Part, SeriesSet


@dataclass(frozen=True)
class Resamples:
    """The archive's split, and stratified resamples of the same sizes, as aeon makes them.

    Args:
        count: how many; number 0 is the archive's own, number i is drawn with random state i.
        limit: at most so many series of every file, drawn with every class in proportion; None for all.
    """

    count: int = 1
    limit: int | None = None

    @property
    def train_only(self) -> bool:
        """Whether test files stay closed."""
        return False

    def split(self, data: SeriesSet, index: int) -> tuple[Part, Part]:
        """What is trained on, and what is predicted."""
        assert data.test is not None
        train, test = limited(data.train, self.limit), limited(data.test, self.limit)
        if index == 0:
            return train, test
        resampling = import_module("aeon.benchmarking.resampling")
        if data.kind == "classification":
            if set(train.y) != set(test.y):
                raise DataError(f"{data.name}: resamples need every class in both files")
            chosen = resampling.stratified_resample_data_indices(train.y, test.y, random_state=index)
        else:
            chosen = resampling.resample_data_indices(train.y, test.y, random_state=index)
        every = train + test
        return every.take(chosen[0]), every.take(chosen[1])

    def identity(self) -> dict[str, Any]:
        """What enters the name of a record; the number of resamples changes none of them."""
        return {"kind": "archive", "limit": self.limit}

    def words(self) -> str:
        """For a reader."""
        more = f" and {self.count - 1} stratified resamples of it" if self.count > 1 else ""
        return f"the archive's split{more}{_limit_words(self.limit)}"


@dataclass(frozen=True)
class Folds:
    """Stratified cross-validation within the training file; the test file is never opened.

    Args:
        count: how many folds.
        limit: as in `Resamples`.
        blocks: whether a fold is of neighbours in the file (in each class), and not drawn: where they are windows of
            one recording, a window of which the next one was trained on says little about other recordings.
    """

    count: int = 4
    limit: int | None = None
    blocks: bool = False

    @property
    def train_only(self) -> bool:
        """Whether test files stay closed."""
        return True

    def split(self, data: SeriesSet, index: int) -> tuple[Part, Part]:
        """What is trained on, and what is predicted."""
        part = limited(data.train, self.limit)
        if len(part) < self.count:
            raise DataError(f"{data.name}: {len(part)} training series do not make {self.count} folds")
        selection = import_module("sklearn.model_selection")
        stratified = data.kind == "classification"
        if stratified and max(np.unique(part.y, return_counts=True)[1]) < self.count:
            raise DataError(f"{data.name}: no class has {self.count} training series; give fewer --folds")
        kind = selection.StratifiedKFold if stratified else selection.KFold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class of fewer series than folds is absent from some of them
            drawn = {} if self.blocks else {"shuffle": True, "random_state": 0}
            folds = list(kind(self.count, **drawn).split(np.zeros(len(part)), part.y))
        train, held_out = folds[index]
        return part.take(train), part.take(held_out)

    def identity(self) -> dict[str, Any]:
        """What enters the name of a record."""
        return {"kind": "blocks" if self.blocks else "folds", "count": self.count, "limit": self.limit}

    def words(self) -> str:
        """For a reader."""
        what = "blocks of neighbours in" if self.blocks else "folds of"
        return f"{self.count} {what} the training file; test files were not opened{_limit_words(self.limit)}"


Protocol = Resamples | Folds


def limited(part: Part, limit: int | None) -> Part:
    """At most so many, in their order: of every class in proportion, drawn with a random state of 0."""
    if limit is None or len(part) <= limit:
        return part
    generator = np.random.default_rng(0)
    if part.y.dtype.kind == "f":
        return part.take(np.sort(generator.permutation(len(part))[:limit]))
    # the first of every class, then the second of every class, …: each by how far it is into its class
    place = np.empty(len(part))
    for label in np.unique(part.y):
        members = generator.permutation(np.flatnonzero(part.y == label))
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
        place[members[0]] = 0
    return part.take(np.sort(np.argsort(place, kind="stable")[:limit]))


def _limit_words(limit: int | None) -> str:
    return "" if limit is None else f"; at most {limit} series of every file"
