"""The paper's tables, each described once: sets × mechanisms, and the metric."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.suggestions import did_you_mean
from .numbers import (
    AVERAGE,
    LEARNED_BETA,
    LEARNED_BETA_COLUMNS,
    LRA,
    LRA_CONV1D,
    MANUAL_PAGES,
    REGRESSION,
    UEA,
    UEA_LINEAR,
    UEA_MORE,
    UEA_SPARSE,
    MeanStd,
    Numbers,
)


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Args:
        name: on the command line.
        title: what it shows.
        metric: "accuracy", in percent, or "rmse", of which less is better.
        mechanisms: its columns; the first is the baseline.
        numbers: as printed, the average included.
        kinds: what is reported of a run: "best", "last" or "selected", as in `Record`.
        also: sets beside the paper's, which it has no numbers for.
    """

    name: str
    title: str
    metric: str
    mechanisms: tuple[str, ...]
    numbers: Numbers
    kinds: tuple[str, ...] = ("best", "last")
    also: tuple[str, ...] = ()

    @property
    def baseline(self) -> str:
        """What the others are compared with."""
        return self.mechanisms[0]

    @property
    def datasets(self) -> tuple[str, ...]:
        """Its rows."""
        return (*(name for name in self.numbers if name != AVERAGE), *self.also)

    def printed(self, dataset: str, mechanism: str) -> MeanStd | None:
        """What the paper prints; None where it has no such row or column.

        >>> table("table-uea").printed("JapaneseVowels", "bn")
        MeanStd(mean=99.55, std=0.31)
        """
        if dataset not in self.numbers:
            return None
        return dict(zip(self.mechanisms, self.numbers[dataset], strict=True)).get(mechanism)

    def gain(self, value: float, baseline: float) -> float:
        """By how much a value is better than the baseline's; negative where it is worse."""
        return value - baseline if self.metric == "accuracy" else baseline - value


def _family(base: str = "") -> tuple[str, ...]:
    return (base, *(f"{base}-{tail}" for tail in ("bn", "sh", "bn+sh"))) if base else ("softmax", "bn", "sh", "bn+sh")


def _long(name: str, title: str, mechanisms: tuple[str, ...], numbers: Numbers) -> Table:
    """A table of long sequences: weights are chosen on validation; manual pages stand beside what they stand for."""
    return Table(
        name, f"{title}, accuracy in %", "accuracy", mechanisms, numbers, ("selected", "last"), (MANUAL_PAGES,)
    )  # fmt: skip


_TABLES = {
    table.name: table
    for table in (
        Table("table-uea", "UEA classification, accuracy in %", "accuracy", _family(), UEA),
        Table("table-uea-linear", "UEA, linear attention, accuracy in %", "accuracy", _family("linear"), UEA_LINEAR),
        Table("table-uea-sparse", "UEA, sparse attention, accuracy in %", "accuracy", _family("sparse"), UEA_SPARSE),
        Table("table-uea-more", "15 more UEA sets, accuracy in %", "accuracy", _family(), UEA_MORE),
        Table("table-regression", "TSER regression, RMSE (less is better)", "rmse", _family(), REGRESSION),
        _long("table-lra", "Long Range Arena", _family(), LRA),
        _long("table-lra-conv1d", "Long Range Arena, convolutions", ("softmax", "conv1d"), LRA_CONV1D),
        _long("table-learnable-beta", "β learned or given", LEARNED_BETA_COLUMNS, LEARNED_BETA),
    )
}


def table_names() -> tuple[str, ...]:
    """The names of all tables."""
    return tuple(_TABLES)


def table(name: str) -> Table:
    """A table by name."""
    if name not in _TABLES:
        raise ValueError(f"unknown table {name!r}{did_you_mean(name, _TABLES)} There are: {', '.join(_TABLES)}")
    return _TABLES[name]
