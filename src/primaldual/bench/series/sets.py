"""The sets of a folder, read from their files; a test file is opened only where the protocol has test series."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...base.suggestions import did_you_mean
from ...data import DataError, DataNotFoundError, manifest
from ...data.sources import Source, data_directory, folders
from ...data.ts import Kind, TsFile


@dataclass(frozen=True, eq=False)
class Part:
    """Series, and what is to be predicted of each.

    Args:
        x: each [channels, steps], float64, NaN where missing, as aeon has them.
        y: labels as text, or targets in float64.
    """

    x: list[np.ndarray]
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def __add__(self, other: Part) -> Part:
        return Part(self.x + other.x, np.concatenate([self.y, other.y]))

    def take(self, index: np.ndarray) -> Part:
        """Some of them."""
        return Part([self.x[i] for i in index], self.y[index])


@dataclass(frozen=True)
class Stated:
    """What is known of a set without its series.

    Args:
        name: that of its files.
        digest: of all values and labels.
        size: how many values there are.
    """

    name: str
    kind: Kind
    digest: str
    size: int


@dataclass(frozen=True, eq=False)
class SeriesSet:
    """A set that was read; `test` is None where test files are not to be opened."""

    stated: Stated
    train: Part
    test: Part | None

    @property
    def name(self) -> str:
        """That of its files."""
        return self.stated.name

    @property
    def kind(self) -> Kind:
        """Of what is predicted."""
        return self.stated.kind


def sets_in(directory: Path, only: Sequence[str] | None = None) -> list[Source]:
    """Zips and pairs of `.ts` files in a folder and its folders, by name; those that are asked for, in that order."""
    data_directory(directory)
    found: dict[str, Source] = {}
    for folder in folders(directory):
        for path in sorted(folder.glob("*.zip")):
            found.setdefault(path.stem, Source(path.stem, (path,), str(path)))
        for path in sorted([*folder.glob("*_TRAIN.ts"), *folder.glob("*/*_TRAIN.ts")]):
            name = path.name.removesuffix("_TRAIN.ts")
            found.setdefault(name, Source(name, (path, path.with_name(f"{name}_TEST.ts")), str(path)))
    for name in only or ():
        if name not in found:
            raise DataNotFoundError(f"there is no set {name} in {directory}{did_you_mean(name, found, most=3)}")
    if not found:
        raise DataNotFoundError(f"there is neither a NAME.zip nor a NAME_TRAIN.ts in {directory}")
    return [found[name] for name in only or sorted(found)]


def read_set(source: Source, train_only: bool) -> SeriesSet:
    """Read the files of a set; with `train_only` its test file is not opened."""
    files = [_checked(source.name, source.read("TRAIN"))]
    if not train_only:
        if source.files[-1].suffix == ".ts" and not source.files[-1].is_file():
            raise DataNotFoundError(
                f"{source.name}: {source.files[-1]} is missing; --train-only needs the training file alone"
            )
        files.append(_checked(source.name, source.read("TEST")))
        if (files[0].kind, files[0].channels) != (files[1].kind, files[1].channels):
            raise DataError(f"{source.name}: the training and the test file differ in kind or channels")
    parts = [_part(file) for file in files]
    if files[0].kind == "classification" and len(set(parts[0].y)) < 2:
        raise DataError(f"{source.name}: every training series is of class {parts[0].y[0]!r}")
    size = sum(x.size for part in parts for x in part.x)
    stated = Stated(source.name, files[0].kind, _digest(parts), size)
    return SeriesSet(stated, parts[0], parts[1] if len(parts) > 1 else None)


def _checked(name: str, file: TsFile) -> TsFile:
    """A header may be wrong where the series are those of a published set."""
    entry = manifest().get(name)
    if entry is None or (entry.kind, entry.channels) != (file.kind, file.channels):
        file.refuse_doubts()
    return file


def _part(file: TsFile) -> Part:
    labels = np.array(file.labels) if file.kind == "classification" else np.array(file.labels, dtype=np.float64)
    return Part([np.ascontiguousarray(one.T) for one in file.series], labels)


def _digest(parts: Sequence[Part]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}\n".encode())
        for x, y in zip(part.x, part.y.tolist(), strict=True):
            digest.update(f"{x.shape} {y}\n".encode())
            digest.update(x.tobytes())
    return digest.hexdigest()
