"""The sizes of the archives' sets, as they are published: `manifest.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from .dataset import Dataset
from .ts import Kind


@dataclass(frozen=True)
class Entry:
    """One set of the archives.

    Args:
        cases: (training, test) of every edition that is about.
        length: of the longest series of either file.
        classes: how many; 0 for regression.
        approximate: whether the cases are known roughly only; other numbers are then no error.
    """

    name: str
    kind: Kind
    cases: tuple[tuple[int, int], ...]
    length: int
    channels: int
    classes: int
    approximate: bool = False

    def differences(self, data: Dataset) -> list[str]:
        """What is not as it is published."""
        found = []
        if data.kind != self.kind:
            found.append(f"it is a {data.kind} set, the archive's is {self.kind}")
        cases = (len(data.train), len(data.test))
        if cases not in self.cases and not self.approximate:
            known = " or ".join(f"{train} + {test}" for train, test in self.cases)
            found.append(f"it has {cases[0]} + {cases[1]} cases, the archive's {known}")
        for what, mine, published in (
            ("channels", data.channels, self.channels),
            ("steps", data.longest, self.length),
            ("classes", len(data.classes), self.classes),
        ):
            if mine != published:
                found.append(f"it has {mine} {what}, the archive's {published}")
        return found


@cache
def manifest() -> dict[str, Entry]:
    """Every set of known size by name.

    >>> manifest()["JapaneseVowels"].cases
    ((270, 370),)
    """
    rows = json.loads(files(__package__).joinpath("manifest.json").read_text(encoding="utf-8"))
    return {row["name"]: Entry(**row | {"cases": tuple(map(tuple, row["cases"]))}) for row in rows}
