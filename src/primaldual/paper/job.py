"""What has to be trained for a table. A job knows of no table: tables that need the same one share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.suggestions import did_you_mean
from ..data import Dataset, Split, manifest
from ..models import SeriesConfig
from ..primal import Primal, mechanism, mechanisms
from ..training import Recipe, Record
from ..training.recipe import VERSION
from .numbers import BETAS, SCALES, SEEDS, STRIDE
from .recipes import recipe_for, sizes_of
from .tables import Table, table


@dataclass(frozen=True)
class Job:
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


Recorded = dict[Job, dict[int, Record]]
"""The records of every job, by seed."""


def recorded(jobs: Iterable[Job], records: Iterable[Record]) -> Recorded:
    """Which record is whose; those of other jobs are left aside.

    Which files a set came from is not looked at, only that all are alike.
    """
    of_set: dict[str, list[Record]] = {}
    for record in records:
        if record.version == VERSION:
            of_set.setdefault(record.data["name"], []).append(record)
    return {job: _of(job, of_set.get(job.dataset, [])) for job in jobs}


def _of(job: Job, records: list[Record]) -> dict[int, Record]:
    recipe, primal = job.recipe.to_dict(), job.primal.to_dict()
    found: dict[int, Record] = {}
    for record in records:
        if (record.recipe, record.mechanism) != (recipe, primal) or record.seed not in job.seeds:
            continue
        if record.seed in found and record.key != found[record.seed].key:
            raise ValueError(
                f"{job.dataset}, {job.mechanism}, seed {record.seed}: two records from different files of the "
                f"set ({record.key} and {found[record.seed].key}); keep one of them, or take another folder"
            )
        found[record.seed] = record
    return found


def jobs(
    of: str | Table,
    only: Sequence[str] | None = None,
    mechanisms: Sequence[str] | None = None,
    seeds: Sequence[int] = tuple(range(SEEDS)),
    **changes: Any,
) -> list[Job]:
    """The jobs behind a table, set by set.

    Args:
        of: a table, or its name.
        only: some of its sets.
        mechanisms: instead of the table's; others have no number of the paper beside theirs.
        seeds: of each.
        changes: to the recipes of the paper, such as `epochs=2`.

    >>> [job.primal.inputs for job in jobs("table-uea", ["JapaneseVowels"], ["bn"])]
    [(Recenter(beta=0.6, learnable=False),)]
    """
    of = table(of) if isinstance(of, str) else of
    datasets = of.datasets if only is None else _some(f"{of.name} has no set", only, of.datasets)
    columns = of.mechanisms if mechanisms is None else _some("there is no mechanism", mechanisms, _known())
    return [
        Job(name, column, as_in_paper(name, column), recipe_for(blank(name)).having(**changes), tuple(seeds))
        for name in datasets
        for column in columns
    ]


def as_in_paper(dataset: str, name: str) -> Primal:
    """A mechanism with the paper's β and scales for a set.

    >>> as_in_paper("PEMS-SF", "linear-sh").training_set.scales
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
    return stated(name, **options)


def stated(name: str, **options: Any) -> Primal:
    """A mechanism with these settings; the stride of a sparse one is that of every run here.

    >>> stated("sparse").training_set.pattern
    Strided(stride=None)
    """
    if name.startswith("sparse"):
        options["stride"] = STRIDE
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
            raise ValueError(f"{problem} {name!r}{did_you_mean(name, known)} There are: {', '.join(known)}")
    if not chosen:
        raise ValueError(f"nothing chosen. There are: {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))
