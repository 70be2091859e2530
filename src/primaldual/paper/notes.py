"""What a reader of a table must know: what is missing, what failed, what is not as in the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from ..data import manifest
from ..training import Recipe, Record
from .engine import Failure
from .recipes import recipe_for, sizes_of
from .runs import Run, blank

Found = dict[Run, dict[int, Record]]
"""The records of every run, by seed."""


def notes(found: Found, failures: Sequence[Failure]) -> Iterator[str]:
    """All of it, in words.

    Args:
        found: what is recorded.
        failures: what an engine said about runs without a record.
    """
    datasets = tuple(dict.fromkeys(run.dataset for run in found))
    yield from _changed(tuple(found))
    yield from _missing(datasets, found, failures)
    yield from _failed(found)
    yield from _editions(datasets, found)


def _changed(wanted: Sequence[Run]) -> Iterator[str]:
    """What is not as in the recipe."""
    own = [(_settings(run.recipe), _settings(recipe_for(blank(run.dataset)))) for run in wanted]
    for name in own[0][0]:
        pairs = sorted({(str(b[name]), str(a[name])) for a, b in own})
        if theirs := [paper for paper, ours in pairs if paper != ours]:
            yield f"NOT the paper's recipe: {name} {pairs[0][1]} instead of {' or '.join(theirs)}"


def _settings(recipe: Recipe) -> dict[str, Any]:
    """By name, the sizes of the model first."""
    values = {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name != "model"}
    sizes = sizes_of(recipe)
    return {f.name: getattr(sizes, f.name) for f in fields(sizes)} | values


def _missing(datasets: Sequence[str], found: Found, failures: Sequence[Failure]) -> Iterator[str]:
    said = {one.dataset: one.message for one in failures if one.mechanism is None}
    for name in datasets:
        of_set = {run: records for run, records in found.items() if run.dataset == name}
        if not any(of_set.values()) and not any(p.dataset == name and p.mechanism for p in failures):
            yield f"missing set {name}: {said.get(name, 'no run of it is recorded')}"
            continue
        for run, records in of_set.items():
            if left := [str(seed) for seed in run.seeds if seed not in records]:
                why = [p.message for p in failures if p.dataset == name and p.mechanism in (None, run.mechanism)]
                yield f"not run: {name}, {run.mechanism}, seeds {', '.join(left)}{f': {why[0]}' if why else ''}"


def _failed(found: Found) -> Iterator[str]:
    for run, records in found.items():
        for seed, record in sorted(records.items()):
            if record.failure:
                yield f"failed: {run.dataset}, {run.mechanism}, seed {seed}: {record.failure}"


def _editions(datasets: Sequence[str], found: Found) -> Iterator[str]:
    """Sets that are not the archive's; a set that is not the same for all mechanisms is an error."""
    for name in datasets:
        data = {
            r.data["hash"]: r.data for run, records in found.items() if run.dataset == name for r in records.values()
        }
        if len(data) > 1:
            raise ValueError(f"{name}: the records are from different files of the set; keep those of one")
        entry = manifest()[name]
        for about in data.values():
            cases = (about["train"], about["test"])
            if cases != entry.cases[0] and not entry.approximate:
                first = " + ".join(map(str, entry.cases[0]))
                yield f"{name} has {cases[0]} + {cases[1]} cases here, the archive's {first}"
