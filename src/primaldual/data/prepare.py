"""Series as models take them: gaps filled, standardised per channel, padded to one length.

As both reference code bases do it: gaps are interpolated linearly within a series and filled outwards at its ends;
every channel is standardised by the mean and the sample deviation (+ machine ε) of all training steps together; the
length is that of the longest training series: shorter series end in zeros, longer ones are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .dataset import Dataset, Split
from .errors import DataError, DataFormatError
from .ts import TsFile


def fill_gaps(series: np.ndarray) -> np.ndarray:
    """[length, channels] with NaN interpolated; a channel with no value at all stays NaN.

    >>> fill_gaps(np.array([[np.nan], [1.0], [np.nan], [3.0]])).ravel().tolist()
    [1.0, 1.0, 2.0, 3.0]
    """
    missing = np.isnan(series)
    if not missing.any():
        return series
    filled, steps = series.copy(), np.arange(len(series))
    for c in np.flatnonzero(missing.any(0) & ~missing.all(0)):
        gap = missing[:, c]
        filled[gap, c] = np.interp(steps[gap], steps[~gap], series[~gap, c])
    return filled


PADDED = 1 << 26, 256
"""Values that any series may have when they are padded; more of them so many times the values that they have."""


@dataclass(frozen=True, eq=False)
class Preparation:
    """What was learned from the training series, to be applied to any others.

    Args:
        mean, std: [channels], float64.
        length: steps after padding and cutting.
    """

    mean: np.ndarray
    std: np.ndarray
    length: int

    @staticmethod
    def fit(series: Sequence[np.ndarray]) -> Preparation:
        """From training series [length, channels] without gaps; a NaN has no vote."""
        count = np.sum([(~np.isnan(s)).sum(0) for s in series], axis=0)
        mean = np.sum([np.nansum(s, axis=0) for s in series], axis=0) / np.maximum(count, 1)
        squares = np.sum([np.nansum((s - mean) ** 2, axis=0) for s in series], axis=0)
        std = np.sqrt(squares / np.maximum(count - 1, 1))
        return Preparation(mean, std, max(len(s) for s in series))

    def apply(self, series: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """x [cases, length, channels], float32, and lengths [cases].

        Series of which one is so much longer than the others that there would be little but padding are refused.
        """
        size, values = len(series) * self.length * len(self.mean), sum(one.size for one in series)
        if size > max(PADDED[0], PADDED[1] * values):
            raise DataError(
                f"{len(series)} series of {values:,} values would be padded to {self.length:,} steps each, that is "
                f"{size:,} values; cut the longest ones, or leave them out"
            )
        x = np.zeros((len(series), self.length, len(self.mean)), dtype=np.float32)
        for row, one in zip(x, series, strict=True):
            cut = one[: self.length]
            row[: len(cut)] = (cut - self.mean) / (self.std + np.finfo(float).eps)
        lengths = [min(len(one), self.length) for one in series]
        return torch.from_numpy(x), torch.tensor(lengths, dtype=torch.int64)


def assemble(name: str, train: TsFile, test: TsFile | None) -> Dataset:
    """The data set of two files; without a test file its test split is empty."""
    if test is not None and (test.kind, test.channels) != (train.kind, train.channels):
        raise DataFormatError(
            test.file, None,
            f"the training file is {train.kind} with {train.channels} channels, the test file {test.kind} with "
            f"{test.channels}",
        )  # fmt: skip
    labels = (train.labels, [] if test is None else test.labels)
    classes = tuple(sorted({*labels[0], *labels[1]})) if train.kind == "classification" else ()
    if classes and len(set(train.labels)) == 1:
        raise DataFormatError(
            train.file, None, f"every series is of class {train.labels[0]!r}: there is nothing to learn"
        )
    parts = [[fill_gaps(s) for s in part] for part in (train.series, [] if test is None else test.series)]
    preparation = Preparation.fit(parts[0])
    of_train, of_test = (
        Split(*preparation.apply(part), _targets(of, classes)) for part, of in zip(parts, labels, strict=True)
    )
    mean, std = (torch.from_numpy(a) for a in (preparation.mean, preparation.std))
    longest = max(len(s) for part in parts for s in part)
    return Dataset(name, train.kind, classes, of_train, of_test, mean, std, longest, _notes(train, test, parts))


def _targets(labels: list[str], classes: tuple[str, ...]) -> Tensor:
    if not classes:
        return torch.tensor([float(label) for label in labels], dtype=torch.float32)
    index = {label: i for i, label in enumerate(classes)}
    return torch.tensor([index[label] for label in labels], dtype=torch.int64)


def _notes(train: TsFile, test: TsFile | None, filled: list[list[np.ndarray]]) -> tuple[str, ...]:
    """What happened on the way, in words."""
    notes = []
    longest = max(map(len, filled[0]))
    for part, raw, done in zip(("training", "test"), (train, test), filled, strict=True):
        if raw is None:
            continue
        empty = [int(np.isnan(s).sum()) for s in done]
        if filled_in := sum(int(np.isnan(s).sum()) for s in raw.series) - sum(empty):
            notes.append(f"{part}: {filled_in} missing values interpolated")
        if lost := sum(map(bool, empty)):
            notes.append(f"{part}: {lost} series with a channel that has no value at all: NaN, until Dataset.filled()")
        if longer := sum(len(s) > longest for s in done):
            notes.append(f"{part}: {longer} series longer than every training series, cut")
    return tuple(notes)
