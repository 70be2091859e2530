"""What has to be trained for a table. A run knows of no table: tables that need the same one share it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..data import Dataset, Split, manifest
from ..models import SeriesConfig
from ..primal import Primal, mechanism, mechanisms
from ..training import Recipe, Record
from ..training.recipe import VERSION
from .numbers import BETAS, SCALES, SEEDS
from .recipes import recipe_for, sizes_of
from .tables import Table, table


@dataclass(frozen=True)
class Run:
    """One mechanism on one set, all seeds together.

    Args:
        dataset: by name.
        mechanism: by name; `primal` is it with the paper's settings for this set.
        recipe: sizes and training.
        seeds: of the members.
    """

    dataset: str
    mechanism: str
    primal: Primal
    recipe: Recipe
    seeds: tuple[int, ...]

    def config(self) -> SeriesConfig:
        """The model, for a set of the published sizes; a ValueError where there is none."""
        config = sizes_of(self.recipe).config(blank(self.dataset), self.primal)
        self.primal.training_set.head_scales(config.heads)
        return config

    def find(self, records: Iterable[Record]) -> dict[int, Record]:
        """By seed: the records of this run. Which files the set came from is not looked at, only that all are alike."""
        recipe, primal = self.recipe.to_dict(), self.primal.to_dict()
        found: dict[int, Record] = {}
        for record in records:
            what = (record.data["name"], record.version, record.recipe, record.mechanism)
            if what != (self.dataset, VERSION, recipe, primal) or record.seed not in self.seeds:
                continue
            if record.seed in found and record.key != found[record.seed].key:
                raise ValueError(
                    f"{self.dataset}, {self.mechanism}, seed {record.seed}: two records from different files of the "
                    f"set ({record.key} and {found[record.seed].key}); keep one of them, or take another folder"
                )
            found[record.seed] = record
        return found


def runs(
    of: str | Table,
    only: Sequence[str] | None = None,
    mechanisms: Sequence[str] | None = None,
    seeds: Sequence[int] = tuple(range(SEEDS)),
    **changes: Any,
) -> list[Run]:
    """The runs behind a table, set by set.

    Args:
        of: a table, or its name.
        only: some of its sets.
        mechanisms: instead of the table's; others have no number of the paper beside theirs.
        seeds: of each run.
        changes: to the recipes of the paper, such as `epochs=2`.

    >>> [run.primal.inputs for run in runs("table-uea", ["JapaneseVowels"], ["bn"])]
    [(Recenter(beta=0.6, learnable=False),)]
    """
    of = table(of) if isinstance(of, str) else of
    datasets = of.datasets if only is None else _some(f"{of.name} has no set", only, of.datasets)
    columns = of.mechanisms if mechanisms is None else _some("there is no mechanism", mechanisms, _known())
    return [
        Run(name, column, settled(name, column), recipe_for(blank(name)).having(**changes), tuple(seeds))
        for name in datasets
        for column in columns
    ]


def settled(dataset: str, name: str) -> Primal:
    """A mechanism with the paper's β and scales for a set.

    >>> settled("PEMS-SF", "linear-sh").training_set.scales
    (1, 1, 2, 2, 4, 4, 8, 8)
    """
    base, _, tail = name.rpartition("-") if name != "qk-norm" else (name, "", "")
    parts, options = tail.split("+"), dict[str, Any]()
    if "sh" in parts:
        options["scales"] = SCALES
    if "bn" in parts:
        betas = BETAS[base or "softmax"]
        if dataset not in betas:
            raise ValueError(f"the paper has no β of {name} for {dataset}")
        options["beta"] = betas[dataset]["sh" in parts]
    return mechanism(name, **options)


def blank(name: str) -> Dataset:
    """A set of the published sizes without a single series: what recipes and models need to know of it."""
    entry = manifest()[name]
    target = torch.zeros(0) if entry.kind == "regression" else torch.zeros(0, dtype=torch.int64)
    part = Split(torch.zeros(0, entry.length, entry.channels), torch.zeros(0, dtype=torch.int64), target)
    one = torch.ones(entry.channels, dtype=torch.float64)
    return Dataset(name, entry.kind, tuple(map(str, range(entry.classes))), part, part, 0 * one, one, entry.length)


def _known() -> tuple[str, ...]:
    return tuple(name for name in mechanisms() if name != "conv2d")  # series have no grid


def _some(problem: str, chosen: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f". There are: {', '.join(known)}"
            raise ValueError(f"{problem} {name!r}{hint}")
    if not chosen:
        raise ValueError(f"nothing chosen. There are: {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))
