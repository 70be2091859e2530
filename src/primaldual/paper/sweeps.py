"""Sweeps of β and of the scales: what has to be trained to see whether one value does for all sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data import manifest
from ..primal import Primal, mechanisms
from .families import family
from .job import Job, stated
from .numbers import BETAS, SCALES, SEEDS

Value = float | tuple[int, ...]
"""A β, or a scale per head."""

PARTS = {"beta": "bn", "scales": "sh"}
"""What can be swept, and the part of a mechanism that it is a setting of."""

DATASETS = ("JapaneseVowels", "Handwriting", "NATOPS")

VALUES: dict[str, tuple[Value, ...]] = {
    "beta": (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.2),
    "scales": (
        (1, 1, 1, 1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1, 1, 2, 2),
        (1, 1, 1, 1, 2, 2, 2, 2),
        (1, 1, 1, 1, 2, 2, 4, 4),
        SCALES,
        (2, 2, 2, 2, 2, 2, 2, 2),
        (1, 1, 4, 4, 8, 8, 16, 16),
        (4, 4, 4, 4, 8, 8, 8, 8),
    ),
}
"""From what changes nothing to what is harsh."""


@dataclass(frozen=True)
class Sweep:
    """One setting of one mechanism on some sets; all else as in the paper's recipes, but for a validation share.

    Args:
        setting: "beta" or "scales".
        mechanism: one that has it, such as `bn` or `bn+sh`.
        values: to try on every set; the paper's own value for a set is tried beside them.
        datasets, seeds: to train on, and with.
        other: of `bn+sh`: scales or β for all sets; else the paper's for each.
        changes: to the recipes, such as `epochs=2`; `validation` is 0.2 unless it is here.

    >>> [job.mechanism for job in Sweep("beta", "bn", (0.0, 0.5), ("NATOPS",)).jobs()]
    ['softmax', 'bn, β 0.5', 'bn, β 1']
    """

    setting: str
    mechanism: str
    values: tuple[Value, ...]
    datasets: tuple[str, ...] = DATASETS
    seeds: tuple[int, ...] = tuple(range(SEEDS))
    other: Value | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.setting not in PARTS:
            raise ValueError(f"a sweep is of {' or '.join(PARTS)}; got {self.setting!r}")
        part = PARTS[self.setting]
        if self.mechanism not in (able := [name for name in mechanisms() if part in _split(name)[1]]):
            raise ValueError(f"{self.mechanism!r} has no {self.setting}; those that have: {', '.join(able)}")
        if self.other is not None and len(_split(self.mechanism)[1]) < 2:
            raise ValueError(f"{self.mechanism!r} has no other setting than {self.setting}; leave it out")
        for name in self.datasets:
            if name not in manifest() or not manifest()[name].classes:
                known = ", ".join(entry.name for entry in manifest().values() if entry.classes)
                raise ValueError(f"there is no set {name!r} to classify. There are: {known}")
        object.__setattr__(self, "values", tuple(dict.fromkeys(self.values)))
        object.__setattr__(self, "changes", {"validation": 0.2} | self.changes)
        if len(self.values) < 2 or not self.datasets:
            raise ValueError("a sweep needs a set and two different values at least")
        if not self.changes["validation"]:
            raise ValueError("a sweep needs a validation share, such as 0.2: the test set never chooses")

    @property
    def baseline(self) -> str:
        """The mechanism without its parts."""
        return _split(self.mechanism)[0] or "softmax"

    @property
    def reduces(self) -> bool:
        """Whether a value that changes nothing leaves the baseline."""
        return len(_split(self.mechanism)[1]) == 1

    def paper(self, dataset: str) -> Value | None:
        """The paper's value for a set, if it has one."""
        if self.setting == "scales":
            return SCALES
        base, parts = _split(self.mechanism)
        found = BETAS.get(base or "softmax", {}).get(dataset)
        return found and found["sh" in parts]

    def tried(self, dataset: str) -> tuple[Value, ...]:
        """The values, and the paper's where it is not one of them."""
        paper = self.paper(dataset)
        if paper is None or paper in self.values:
            return self.values
        return tuple(sorted((*self.values, paper))) if self.setting == "beta" else (*self.values, paper)

    def job(self, dataset: str, value: Value | None) -> Job:
        """A value on a set; None for the baseline. A value that changes nothing is the mechanism without that part."""
        base, parts = _split(self.mechanism)
        if value is None:
            parts = ()
        elif neutral(value):
            parts = tuple(part for part in parts if part != PARTS[self.setting])
        name = "-".join(filter(None, (base, "+".join(parts)))) or "softmax"
        label = f"{name}, {labelled(value)}" if name == self.mechanism and value is not None else name
        recipe = family(dataset).recipe(dataset).having(**self.changes)
        return Job(dataset, label, self._primal(dataset, name, parts, value), recipe, self.seeds)

    def jobs(self) -> list[Job]:
        """All of them, set by set, the baseline first."""
        return list(dict.fromkeys(self.job(name, v) for name in self.datasets for v in (None, *self.tried(name))))

    def _primal(self, dataset: str, name: str, parts: Sequence[str], value: Value | None) -> Primal:
        settings: dict[str, Any] = {"beta": self.other, "scales": self.other or SCALES} | {self.setting: value}
        if "bn" in parts and settings["beta"] is None:
            betas = BETAS[_split(name)[0] or "softmax"]
            if dataset not in betas:
                raise ValueError(f"the paper has no β of {self.mechanism} for {dataset}; give one for all sets")
            settings["beta"] = betas[dataset][1]
        return stated(name, dataset, **{key: settings[key] for key, part in PARTS.items() if part in parts})


def neutral(value: Value) -> bool:
    """Whether a value changes nothing: β = 0, or every scale 1."""
    return set(value) == {1} if isinstance(value, tuple) else value == 0


def labelled(value: Value) -> str:
    """
    >>> labelled(0.25), labelled((1, 1, 2, 2))
    ('β 0.25', 'scales 1,1,2,2')
    """
    return f"scales {shown(value)}" if isinstance(value, tuple) else f"β {shown(value)}"


def shown(value: Value) -> str:
    """The value alone."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def _split(name: str) -> tuple[str, tuple[str, ...]]:
    """
    >>> _split("linear-bn+sh"), _split("sh")
    (('linear', ('bn', 'sh')), ('', ('sh',)))
    """
    base, _, parts = name.rpartition("-")
    return base, tuple(parts.split("+"))
