"""A data set as tensors, ready to be put on a device whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .ts import Kind


@dataclass(frozen=True, eq=False)
class Split:
    """Training or test series.

    Args:
        x: [cases, length, channels], float32, standardised, 0 after the end of each series.
        lengths: [cases], int64: how many steps of each are its own.
        y: [cases]: class indices (int64), or targets (float32) as the file states them, unless they are standardised.
    """

    x: Tensor
    lengths: Tensor
    y: Tensor

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def padding(self) -> Tensor | None:
        """[cases, length], True after the end of a series; None where all are of full length."""
        steps = torch.arange(self.x.shape[1], device=self.x.device)
        mask = steps >= self.lengths[:, None]
        return mask if bool(mask.any()) else None

    def to(self, device: torch.device | str) -> Split:
        """The same on a device."""
        return Split(self.x.to(device), self.lengths.to(device), self.y.to(device))


def mean_and_std(y: Tensor) -> tuple[float, float]:
    """Of targets; 1 where they are all alike."""
    mean, std = float(y.double().mean()), float(y.double().std(correction=0))
    return mean, std if std > 1e-12 * abs(mean) else 1.0


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test series, prepared alike.

    Args:
        name: in the archive.
        kind: "classification" or "regression".
        classes: in alphabetical order, so that `classes[y]` is a label; empty for regression.
        train, test: the archive's own split.
        mean, std: [channels], float64: what was taken off and divided by, from the training series alone.
        longest: steps of the longest series of either file.
        notes: what a user of the set should know.
        origin: where the raw files were.
        source_hash: of the raw files and of what read them.
        target_mean, target_std: what was taken off the targets, and what they were divided by; 0 and 1 as a rule.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: Tensor
    std: Tensor
    longest: int
    notes: tuple[str, ...] = ()
    origin: str = ""
    source_hash: str = ""
    target_mean: float = 0.0
    target_std: float = 1.0

    @property
    def length(self) -> int:
        """Steps: those of the longest training series."""
        return self.train.x.shape[1]

    @property
    def channels(self) -> int:
        """Of every series."""
        return self.train.x.shape[2]

    @property
    def outputs(self) -> int:
        """What a model has to give: one score per class, or one number."""
        return len(self.classes) or 1

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name."""
        for part in ("train", "test"):
            for name in ("x", "lengths", "y"):
                yield f"{part}.{name}", getattr(getattr(self, part), name)
        yield from (("mean", self.mean), ("std", self.std))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything that a model sees; where the files lay and how they were packed does not enter."""
        unit = [] if (self.target_mean, self.target_std) == (0.0, 1.0) else [self.target_mean, self.target_std]
        digest = hashlib.sha256(json.dumps([self.kind, self.classes, *unit]).encode())
        for name, tensor in self.tensors():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        return digest.hexdigest()

    def filled(self) -> Dataset:
        """With 0, the training mean, for the channels that have no value at all; those are NaN in the archive."""
        train, test = (replace(part, x=part.x.nan_to_num(nan=0.0)) for part in (self.train, self.test))
        return replace(self, train=train, test=test)

    def standardised(self) -> Dataset:
        """With targets of mean 0 and standard deviation 1 on the training series: their unit does not matter then."""
        if self.kind != "regression":
            return self
        mean, std = mean_and_std(self.train.y)
        train, test = (replace(part, y=((part.y.double() - mean) / std).float()) for part in (self.train, self.test))
        return replace(
            self, train=train, test=test,
            target_mean=self.target_mean + self.target_std * mean, target_std=self.target_std * std,
        )  # fmt: skip

    def to(self, device: torch.device | str) -> Dataset:
        """The same with all series on a device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))
