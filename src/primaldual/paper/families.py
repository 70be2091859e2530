"""The kinds of sets that tables have, time series, long sequences and text, and what a table needs of each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..data import DataError, Dataset, Split, load, manifest, sequences, text
from ..data.text.loading import KNOWN as TEXTS
from ..models import LanguageConfig, LanguageSizes, SequenceConfig, SequenceSizes, SeriesConfig
from ..primal import Primal
from ..training import Recipe, SequenceTask, SeriesTask, Task, TextTask, text_recipe
from .numbers import LRA_SCALES, SCALES, STRIDE
from .recipes import long_range, recipe_for, sizes_of

CHECKPOINT = 16 * 2**20 - 2**17
"""Bytes of a checkpoint of long sequences at most, but for its header and history."""


class Family(ABC):
    """Sets that are loaded and trained on alike.

    Attributes:
        scales: of the heads, where there is SH.
    """

    scales: tuple[int, ...]

    @abstractmethod
    def title(self, name: str) -> str:
        """A set as tables show it."""

    @abstractmethod
    def recipe(self, name: str) -> Recipe:
        """What the paper's numbers for a set come from."""

    @abstractmethod
    def config(self, name: str, primal: Primal, recipe: Recipe) -> SeriesConfig | SequenceConfig | LanguageConfig:
        """The model for a set of the published sizes."""

    @abstractmethod
    def stride(self, name: str) -> int | str:
        """Of sparse attention on a set."""

    @abstractmethod
    def load(self, name: str, data_dir: Path | None, offline: bool) -> Any:
        """A set, for `task`."""

    @abstractmethod
    def missing(self, name: str, data_dir: Path | None) -> str | None:
        """Why a set is not to be had here, in words; nothing is downloaded or made to find out."""

    @abstractmethod
    def task(self, data: Any, primal: Primal, recipe: Recipe) -> Task:
        """What is trained."""

    def together(self, task: Task) -> int | None:
        """How many seeds train at once; None for all."""
        return None

    @abstractmethod
    def edition(self, name: str, data: Mapping[str, Any]) -> str | None:
        """What a record says of a set that is not as published, in words."""


class _Series(Family):
    scales = SCALES

    def title(self, name: str) -> str:
        return name

    def recipe(self, name: str) -> Recipe:
        return recipe_for(blank(name))

    def config(self, name: str, primal: Primal, recipe: Recipe) -> SeriesConfig:
        return sizes_of(recipe).config(blank(name), primal)

    def stride(self, name: str) -> str:
        return STRIDE

    def load(self, name: str, data_dir: Path | None, offline: bool) -> Dataset:
        return load(name, data_dir, offline=offline)

    def missing(self, name: str, data_dir: Path | None) -> str | None:
        try:
            load(name, data_dir, offline=True)
        except (DataError, OSError) as error:
            return str(error)
        return None

    def task(self, data: Dataset, primal: Primal, recipe: Recipe) -> SeriesTask:
        return SeriesTask.of(data, primal, recipe)

    def edition(self, name: str, data: Mapping[str, Any]) -> str | None:
        entry, cases = manifest()[name], (data["train"], data.get("test", 0))
        if cases == entry.cases[0] or entry.approximate:
            return None
        first = " + ".join(map(str, entry.cases[0]))
        return f"{name} has {cases[0]} + {cases[1]} cases here, the archive's {first}"


class _Long(Family):
    scales = LRA_SCALES

    def title(self, name: str) -> str:
        return sequences.known()[name].title

    def recipe(self, name: str) -> Recipe:
        return long_range(name)

    def config(self, name: str, primal: Primal, recipe: Recipe) -> SequenceConfig:
        if not isinstance(recipe.model, SequenceSizes):
            raise ValueError(f"a recipe for long sequences has model=SequenceSizes(…), got {recipe.model!r}")
        entry = sequences.known()[name]
        return SequenceConfig(
            **asdict(recipe.model), length=entry.length, outputs=entry.classes, pairs=entry.pairs, mechanism=primal
        )

    def stride(self, name: str) -> int:
        return round(math.sqrt(sequences.known()[name].length))

    def load(self, name: str, data_dir: Path | None, offline: bool) -> sequences.SequenceSet:
        return sequences.load(name, data_dir)

    def missing(self, name: str, data_dir: Path | None) -> str | None:
        return sequences.missing(name, data_dir)

    def task(self, data: sequences.SequenceSet, primal: Primal, recipe: Recipe) -> SequenceTask:
        return SequenceTask.of(data, primal, recipe)

    def together(self, task: Task) -> int:
        """As many as have a checkpoint of 16 MiB: one fills the device already, and it can be carried elsewhere.

        It holds the weights, those that validation chose, and two means of the optimiser, in float32.
        """
        with torch.device("meta"):
            numbers = sum(p.numel() for p in task.build().parameters())
        return max(1, CHECKPOINT // (4 * 4 * numbers))

    def edition(self, name: str, data: Mapping[str, Any]) -> str | None:
        cases = [data.get(part, 0) for part in ("train", "validation", "test")]
        published = sequences.known()[name].cases
        if published is None or cases == list(published):
            return None
        shown, first = (" / ".join(map(str, sizes)) for sizes in (cases, published))
        return f"{self.title(name)} has {shown} cases here, that of the benchmark {first}"


class _Text(Family):
    """Text, byte by byte; the paper has no such table."""

    scales = ()

    def title(self, name: str) -> str:
        return {"text-imdb": "IMDb"}[name]

    def recipe(self, name: str) -> Recipe:
        return text_recipe()

    def config(self, name: str, primal: Primal, recipe: Recipe) -> LanguageConfig:
        if not isinstance(recipe.model, LanguageSizes):
            raise ValueError(f"a recipe for text has model=LanguageSizes(…), got {recipe.model!r}")
        return recipe.model.config(text.Bytes.vocabulary, primal)

    def stride(self, name: str) -> int:
        return 32

    def load(self, name: str, data_dir: Path | None, offline: bool) -> text.TextSet:
        return text.load(name, data_dir)

    def missing(self, name: str, data_dir: Path | None) -> str | None:
        return text.missing(name, data_dir)

    def task(self, data: text.TextSet, primal: Primal, recipe: Recipe) -> TextTask:
        return TextTask.of(data, primal, recipe)

    def together(self, task: Task) -> int:
        """One after the other: each fills the device, and they would take turns."""
        return 1

    def edition(self, name: str, data: Mapping[str, Any]) -> str | None:
        found = tuple(data[part] for part in ("train", "validation", "test"))
        if found == TEXTS[name]:
            return None
        shown, first = (" / ".join(map(str, sizes)) for sizes in (found, TEXTS[name]))
        return f"{self.title(name)} has {shown} documents here, the archive {first}"


SERIES, LONG, TEXT = _Series(), _Long(), _Text()


def family(name: str) -> Family:
    """That of a set."""
    if name in TEXTS:
        return TEXT
    return LONG if name in sequences.known() else SERIES


def blank(name: str) -> Dataset:
    """A set of time series of the published sizes without a single one: what recipes and models need to know of it."""
    entry = manifest()[name]
    target = torch.zeros(0) if entry.kind == "regression" else torch.zeros(0, dtype=torch.int64)
    part = Split(torch.zeros(0, entry.length, entry.channels), torch.zeros(0, dtype=torch.int64), target)
    one = torch.ones(entry.channels, dtype=torch.float64)
    return Dataset(name, entry.kind, tuple(map(str, range(entry.classes))), part, part, 0 * one, one, entry.length)
