"""What a sweep found. Validation chooses, the test set only tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ..training import Record
from .engine import Failure
from .notes import notes
from .paired import TIE
from .sweeps import Sweep, Value

Policy = Callable[[str], Value | None]
"""For a set: the value to take there; None for the baseline."""

SHUFFLES = 9999


def always(value: Value | None) -> Policy:
    """The same for every set."""
    return lambda _: value


class Scores(NamedTuple):
    """By seed: the best validation accuracy, the test accuracy at that epoch, and that after the last epoch."""

    validation: dict[int, float]
    test: dict[int, float]
    last: dict[int, float]

    def mean(self, kind: str) -> float:
        """Over the seeds; NaN where there is none."""
        values = getattr(self, kind).values()
        return fmean(values) if values else float("nan")


@dataclass(frozen=True)
class Swept:
    """What a sweep found.

    Args:
        sweep: what was asked.
        scores: by set and value; None is the baseline.
        notes: what is missing, what failed, what is not as in the paper.
    """

    sweep: Sweep
    scores: dict[tuple[str, Value | None], Scores]
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[str, ...]:
        """The sets with a score for every value and the baseline: what means are over."""
        wanted = (*self.sweep.values, None)
        return tuple(name for name in self.sweep.datasets if all(self.scores[name, v].last for v in wanted))

    def chosen(self, dataset: str) -> Value:
        """The best on validation, in the mean over the seeds; among equals the best for all sets, else the first."""
        means = {v: round(self.scores[dataset, v].mean("validation") / TIE) for v in self.sweep.values}
        return max(means, key=lambda v: (means[v], v == self.best))

    @property
    def best(self) -> Value:
        """The best for all sets: by the mean validation accuracy over them, and by mean rank among equals."""
        ranks = self.mean_ranks()
        means = {v: self.over_sets(always(v)).mean("validation") for v in ranks}
        return max(ranks, key=lambda v: (round(means[v] / TIE), -ranks[v]))

    def ranks(self, dataset: str) -> dict[Value, float]:
        """On validation, 1 the best; equals share the mean of their places."""
        means = {v: round(self.scores[dataset, v].mean("validation") / TIE) for v in self.sweep.values}
        above = {v: sum(other > mean for other in means.values()) for v, mean in means.items()}
        return {v: above[v] + (1 + sum(mean == other for other in means.values())) / 2 for v, mean in means.items()}

    def mean_ranks(self) -> dict[Value, float]:
        """Over the sets."""
        of_sets = [self.ranks(name) for name in self.measured]
        return {v: fmean(ranks[v] for ranks in of_sets) for v in self.sweep.values}

    def over_sets(self, policy: Policy) -> Scores:
        """The mean over the sets, for every seed that all of them have."""
        found = [self.scores[name, policy(name)] for name in self.measured]
        by_kind = [[getattr(one, kind) for one in found] for kind in Scores._fields]
        return Scores(*({s: fmean(m[s] for m in means) for s in _shared(means)} for means in by_kind))

    def gains(self, mine: Policy, other: Policy, kind: str) -> list[list[float]]:
        """By how much one policy is better than another: for every set, at each seed that both have."""
        pairs = [[getattr(self.scores[name, of(name)], kind) for of in (mine, other)] for name in self.measured]
        return [[one[seed] - two[seed] for seed in _shared([one, two])] for one, two in pairs]

    def p(self, kind: str, datasets: Sequence[str]) -> float:
        """How often values would differ as much if they did not matter: shuffled among themselves at every seed.

        It is a permutation test of the variance of the values' means, with a set's seed as the block.
        """
        found = [[getattr(self.scores[name, v], kind) for v in self.sweep.values] for name in datasets]
        blocks = np.array([[one[seed] for one in of_set] for of_set in found for seed in _shared(of_set)])
        shuffled = np.random.default_rng(0).permuted(np.broadcast_to(blocks, (SHUFFLES, *blocks.shape)), axis=2)
        as_large = shuffled.mean(1).var(1) >= blocks.mean(0).var() - TIE**2
        return float((1 + as_large.sum()) / (1 + SHUFFLES))


def swept(sweep: Sweep, records: Iterable[Record], failures: Sequence[Failure] = ()) -> Swept:
    """A sweep from records, such as `Store(folder).records()`; those of other runs are left aside."""
    given = list(records)
    found = {run: run.find(given) for run in sweep.runs()}
    tried = [(name, v) for name in sweep.datasets for v in (None, *sweep.tried(name))]
    return Swept(
        sweep, {(name, v): _scores(found[sweep.run(name, v)]) for name, v in tried}, tuple(notes(found, failures))
    )


def _scores(records: dict[int, Record]) -> Scores:
    """A member that failed does not count."""
    ended = {seed: record for seed, record in sorted(records.items()) if record.failure is None}
    return Scores(
        {seed: max(record.history["validation"]) for seed, record in ended.items()},
        {seed: record.selected.value for seed, record in ended.items() if record.selected},
        {seed: record.last.value for seed, record in ended.items() if record.last},
    )


def _shared(by_seed: Sequence[dict[int, float]]) -> list[int]:
    return [seed for seed in by_seed[0] if all(seed in one for one in by_seed)] if by_seed else []
