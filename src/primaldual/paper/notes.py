"""What a reader of a table must know: what is missing, what failed, what is not as in the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from ..training import Recipe
from .engine import Failure
from .families import family
from .job import Job, Recorded


def notes(found: Recorded, failures: Sequence[Failure], recipe: Callable[[Job], Recipe] | None = None) -> Iterator[str]:
    """All of it, in words.

    Args:
        found: what is recorded.
        failures: what an engine said about jobs without a record.
        recipe: what a job's would be if nothing were changed; that of the paper for its set unless given.
    """
    datasets = tuple(dict.fromkeys(job.dataset for job in found))
    whose = "the paper's" if recipe is None else "this table's"
    yield from _changed(tuple(found), whose, recipe or (lambda job: family(job.dataset).recipe(job.dataset)))
    yield from _missing(datasets, found, failures)
    yield from _failed(found)
    yield from _editions(datasets, found)


def _changed(wanted: Sequence[Job], whose: str, recipe: Callable[[Job], Recipe]) -> Iterator[str]:
    """What is not as in the recipe."""
    own = [(_settings(job.recipe), _settings(recipe(job))) for job in wanted]
    for name in own[0][0]:
        pairs = sorted({(str(b[name]), str(a[name])) for a, b in own})
        if theirs := [paper for paper, ours in pairs if paper != ours]:
            yield f"NOT {whose} recipe: {name} {pairs[0][1]} instead of {' or '.join(theirs)}"


def _settings(recipe: Recipe) -> dict[str, Any]:
    """By name, the sizes of the model first."""
    values = {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name != "model"}
    sizes = recipe.model
    return values if sizes is None else {f.name: getattr(sizes, f.name) for f in fields(sizes)} | values


def _missing(datasets: Sequence[str], found: Recorded, failures: Sequence[Failure]) -> Iterator[str]:
    said = {failure.dataset: failure.message for failure in failures if failure.mechanism is None}
    for name in datasets:
        of_set = {job: records for job, records in found.items() if job.dataset == name}
        if not any(of_set.values()) and not any(p.dataset == name and p.mechanism for p in failures):
            yield f"missing set {name}: {said.get(name, 'no run of it is recorded')}"
            continue
        for job, records in of_set.items():
            if left := [str(seed) for seed in job.seeds if seed not in records]:
                why = [p.message for p in failures if p.dataset == name and p.mechanism in (None, job.mechanism)]
                yield f"not run: {name}, {job.mechanism}, seeds {', '.join(left)}{f': {why[0]}' if why else ''}"


def _failed(found: Recorded) -> Iterator[str]:
    for job, records in found.items():
        for seed, record in sorted(records.items()):
            if record.failure:
                yield f"failed: {job.dataset}, {job.mechanism}, seed {seed}: {record.failure}"


def _editions(datasets: Sequence[str], found: Recorded) -> Iterator[str]:
    """Sets that are not as published; a set that is not the same for all mechanisms is an error."""
    for name in datasets:
        data = {
            r.data["hash"]: r.data for job, records in found.items() if job.dataset == name for r in records.values()
        }
        if len(data) > 1:
            raise ValueError(f"{name}: the records are from different files of the set; keep those of one")
        editions = [family(name).edition(name, about) for about in data.values()]
        yield from (edition for edition in editions if edition)
        yield from (f"{family(name).title(name)}: {note}" for about in data.values() for note in about.get("notes", ()))
