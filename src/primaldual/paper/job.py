"""What has to be trained for a table. A job knows of no table: tables that need the same one share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.suggestions import did_you_mean
from ..models import LanguageConfig, SequenceConfig, SeriesConfig
from ..primal import Primal, mechanism, mechanisms
from ..training import Recipe, Record
from ..training.recipe import VERSION
from .families import LONG, family
from .numbers import BETAS, MANUAL_PAGES, SEEDS
from .tables import Table, table

LEARNED = "learned-"
"""Begins the name of a mechanism whose β is learned."""


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

    def config(self) -> SeriesConfig | SequenceConfig | LanguageConfig:
        """The model, for a set of the published sizes; a ValueError where there is none."""
        config = family(self.dataset).config(self.dataset, self.primal, self.recipe)
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
    datasets = of.datasets if only is None else some(f"{of.name} has no set", only, of.datasets)
    columns = of.mechanisms if mechanisms is None else some("there is no mechanism", mechanisms, _known())
    return [
        Job(name, column, as_in_paper(name, column), family(name).recipe(name).having(**changes), tuple(seeds))
        for name in datasets
        for column in columns
    ]


def as_in_paper(dataset: str, name: str) -> Primal:
    """A mechanism with the paper's β and scales for a set; "learned-bn" learns β from there.

    On long sequences the linear and the sparse family have the softmax family's β: the paper prints no other.

    >>> as_in_paper("PEMS-SF", "linear-sh").training_set.scales
    (1, 1, 2, 2, 4, 4, 8, 8)
    >>> as_in_paper("lra-retrieval", "learned-bn").inputs
    (Recenter(beta=1.0, learnable=True),)
    """
    learned, name = name.startswith(LEARNED), name.removeprefix(LEARNED)
    base, _, tail = name.rpartition("-") if name != "qk-norm" else (name, "", "")
    parts, options = tail.split("+"), dict[str, Any]()
    if "sh" in parts:
        options["scales"] = family(dataset).scales
    if "bn" in parts:
        options["beta"] = _beta(dataset, name, base)["sh" in parts]
    if learned:
        options["learnable"] = True
    return stated(name, dataset, **options)


def _beta(dataset: str, name: str, base: str) -> tuple[float, float]:
    """Of BN, and of BN+SH, for a mechanism of a family."""
    long = family(dataset) is LONG
    betas = BETAS[base if base and not long else "softmax"]
    known = "lra-retrieval" if dataset == MANUAL_PAGES else dataset
    if known not in betas:
        raise ValueError(f"the paper has no β of {name} for {dataset}")
    return betas[known]


def stated(name: str, dataset: str, **options: Any) -> Primal:
    """A mechanism with these settings; the stride of a sparse one is that of every run here on such a set.

    >>> stated("sparse", "JapaneseVowels").training_set.pattern
    Strided(stride=None)
    """
    if name.startswith("sparse"):
        options["stride"] = family(dataset).stride(dataset)
    return mechanism(name, **options)


def _known() -> tuple[str, ...]:
    """Names that jobs may have: sequences have no grid; β may be learned wherever there is one."""
    names = [name for name in mechanisms() if name != "conv2d"]
    return (*names, *(f"{LEARNED}{name}" for name in names if "bn" in name.replace("-", "+").split("+")))


def some(problem: str, chosen: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The chosen names, each once; a ValueError where one is not known."""
    for name in chosen:
        if name not in known:
            raise ValueError(f"{problem} {name!r}{did_you_mean(name, known)} There are: {', '.join(known)}")
    if not chosen:
        raise ValueError(f"nothing chosen. There are: {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))
