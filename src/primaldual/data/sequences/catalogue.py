"""The sets that are known by name: what they are, how large, and what each is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Protocol

from ...base.suggestions import did_you_mean
from ..errors import DataNotFoundError
from . import image, listops, pathfinder, retrieval, text
from .chunks import Progress, settings_hash
from .documents import SequenceSet
from .raw import Format


class Source(Protocol):
    """What a set is made from: raw files, or a generator with its settings."""

    @property
    def origin(self) -> str:
        """In words."""

    @property
    def others(self) -> str:
        """How a set came about that is not made from it."""

    def stamp(self) -> str:
        """As long as it is the same, so is the source."""

    def digest(self) -> str:
        """The `source_hash` of the set that would be made."""

    def prepare(self, processes: int | None = None, progress: Progress | None = None) -> SequenceSet:
        """Make the set."""


@dataclass(frozen=True)
class Generator:
    """Makes a set out of seed 0 and settings.

    Args:
        module: with `generate`, and the `VERSION` of what it makes.
        settings: of `generate`, all that the result depends on.
    """

    module: ModuleType
    settings: Mapping[str, object]
    origin: str = "its generator"
    others: str = "by another version of its generator"

    @property
    def name(self) -> str:
        """Of the generator."""
        return self.module.__name__.rpartition(".")[2]

    def stamp(self) -> str:
        return self.digest()

    def digest(self) -> str:
        return settings_hash(self.name, self.module.VERSION, seed=0, **self.settings)

    def prepare(self, processes: int | None = None, progress: Progress | None = None) -> SequenceSet:
        made: SequenceSet = self.module.generate(0, **self.settings, processes=processes, progress=progress)
        return made


@dataclass(frozen=True)
class Entry:
    """A set that is known by name.

    Args:
        cases: of the training, validation and test parts; None where there may be any number.
        length: tokens of a padded sequence.
        classes: how many.
        made: from what.
        pairs: whether a case is a pair of documents.
        pictures: whether tokens are grey values.
    """

    name: str
    title: str
    cases: tuple[int, int, int] | None
    length: int
    classes: int
    made: Format | Generator
    pairs: bool = False
    pictures: bool = False

    @property
    def generated(self) -> bool:
        """Rather than read from files."""
        return isinstance(self.made, Generator)

    @property
    def how(self) -> str:
        """How it is had, in words."""
        return f"read from {self.made.names}; {self.made.get}" if isinstance(self.made, Format) else "generated"

    def source(self, directory: Path | None) -> Source | None:
        """What it would be made from, given a data directory."""
        if isinstance(self.made, Generator):
            return self.made
        return None if directory is None else self.made.find(directory)

    def differences(self, data: SequenceSet) -> list[str]:
        """What is not as it is published."""
        found = tuple(len(cases) for cases in data.parts.values())
        if self.cases is None or found == self.cases:
            return []
        mine, published = (" + ".join(map(str, cases)) for cases in (found, self.cases))
        return [f"it has {mine} cases, published are {published}"]


@cache
def known() -> dict[str, Entry]:
    """Every set by name.

    >>> known()["lra-text"].cases
    (25000, 25000, 25000)
    """
    plain, solvable = (Generator(listops, {"brackets": b, "sizes": listops.SIZES}) for b in (False, True))
    entries = [
        Entry("lra-listops", "ListOps", listops.SIZES, 2048, 10, plain),
        Entry("lra-listops-brackets", "ListOps (with brackets)", listops.SIZES, 2048, 10, solvable),
        Entry("lra-text", "Text", (25_000, 25_000, 25_000), 4096, 2, text.IMDB),
        Entry("lra-retrieval", "Retrieval", retrieval.AAN_CASES, 4096, 2, retrieval.AAN, pairs=True),
        Entry("lra-retrieval-manpages", "Retrieval (manual pages)", None, 4096, 2, retrieval.MANUAL_PAGES, pairs=True),
        Entry("lra-image", "Image", (45_000, 5_000, 10_000), 1024, 10, image.CIFAR, pictures=True),
        _pathfinder("lra-pathfinder", "Pathfinder", "hard"),
        _pathfinder("lra-pathfinder-intermediate", "Pathfinder (intermediate)", "intermediate"),
        _pathfinder("lra-pathfinder-easy", "Pathfinder (easy)", "easy"),
    ]
    return {entry.name: entry for entry in entries}


def _pathfinder(name: str, title: str, level: str) -> Entry:
    made = Generator(pathfinder, {"level": level, "images": 200_000})
    return Entry(name, title, (160_000, 20_000, 20_000), 1024, 2, made, pictures=True)


def entry(name: str) -> Entry:
    """A set by name; an error with the nearest names where there is none."""
    if name not in known():
        raise DataNotFoundError(
            f"there is no set of long sequences {name}{did_you_mean(name, known())} There are {', '.join(known())}"
        )
    return known()[name]


def names_in(directory: Path) -> list[str]:
    """The sets whose raw files are in a data directory, or some of them."""
    return [entry.name for entry in known().values() if isinstance(entry.made, Format) and entry.made.is_in(directory)]
