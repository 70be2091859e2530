"""A sweep as tables, and what follows from it in words."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, stdev
from typing import NamedTuple

from ..base.spread import spread, spread_text
from . import render
from .paired import outcome
from .render import Grid
from .sweeps import Value, labelled, neutral, shown
from .swept import Policy, Scores, Swept, always

LEVEL = 0.05
"""A p below it is called a difference."""

KINDS = Scores._fields
LEGEND = (
    "validation: the best of all epochs on what is held out of the training set. test: at that epoch. last: test after "
    "the last epoch. Accuracy in %, mean ± std (n − 1) over the seeds; of a mean over sets, over the seeds' means.",
    "chosen: the best for a set on validation, the best single value among equals. best: the single value with the "
    "best mean validation accuracy over the sets. It goes by points and not by ranks, which make as much of noise on a "
    "set where all values do alike as of a real difference. rank: on validation, 1 is the best. The paper's own value "
    "is tried beside the others, and not chosen from.",
    "wins / ties / losses, p: of the two-sided exact sign test, ties left out, over every seed of every set. p of the "
    "values: how often values that do not matter would differ as much, from shuffles among the values of every seed. "
    "As seeds of one set are much alike, p says something about these sets, not about others.",
)


class Row(NamedTuple):
    """One value on one set, or over the sets."""

    set: str
    value: str
    scores: Scores
    rank: float | None
    remark: str


def rows(found: Swept) -> Iterator[Row]:
    """Set by set, then the means over them."""
    sweep, baseline = found.sweep, found.sweep.baseline
    same = [v for v in sweep.values if neutral(v)] if sweep.reduces else []  # the baseline by another name
    for name in sweep.datasets:
        ranks = found.ranks(name) if name in found.measured else {}
        if not same:
            yield Row(name, baseline, found.scores[name, None], None, "")
        for v in sweep.tried(name):
            marks = {
                baseline: v in same,
                "paper's": v == sweep.paper(name),
                "chosen": ranks and v == found.chosen(name),
            }
            yield Row(name, shown(v), found.scores[name, v], ranks.get(v), ", ".join(m for m in marks if marks[m]))
    if not found.measured:
        return
    over, ranks = f"mean of {len(found.measured)}", found.mean_ranks()
    if not same:
        yield Row(over, baseline, found.over_sets(always(None)), None, "")
    for v in sweep.values:
        marks = {baseline: v in same, "best": v == found.best}
        yield Row(over, shown(v), found.over_sets(always(v)), ranks[v], ", ".join(m for m in marks if marks[m]))
    for name, policy in policies(found).items():
        if name != baseline:
            yield Row(over, name, found.over_sets(policy), None, "")


def policies(found: Swept) -> dict[str, Policy]:
    """What the best single value has to stand up to."""
    sweep = found.sweep
    known = all(sweep.paper(name) is not None for name in found.measured)
    paper: dict[str, Policy] = {"the paper's": sweep.paper} if known else {}
    return {"chosen per set": found.chosen, **paper, sweep.baseline: always(None)}


def grids(found: Swept) -> tuple[Grid, ...]:
    """The numbers, and the best single value against all else."""
    sweep, lines, above = found.sweep, list[tuple[str, ...]](), ""
    for row in rows(found):
        texts = [spread_text(getattr(row.scores, kind).values(), len(sweep.seeds)) for kind in KINDS]
        texts.insert(1, "" if row.rank is None else f"{row.rank:.3g}")
        lines.append((row.set if row.set != above else "", row.value, *texts, row.remark))
        above = row.set
    header = ("set", "β" if sweep.setting == "beta" else "scales", "validation", "rank", "test", "last", "")
    numbers = Grid(f"A sweep of {sweep.setting}, {sweep.mechanism}: accuracy in %", header, tuple(lines))
    if not found.measured:
        return (numbers,)
    left = [v for v in sweep.values if v != found.best and not (sweep.reduces and neutral(v))]
    others: dict[str, Policy] = {shown(v): always(v) for v in left} | policies(found)
    compared = [
        (name if kind == KINDS[0] else "", kind, *_compared(found, policy, kind))
        for name, policy in others.items()
        for kind in KINDS
    ]
    title = f"The best single value, {labelled(found.best)}, against the others"
    return numbers, Grid(title, ("against", "", "points", "wins / ties / losses (p)"), tuple(compared))


def verdict(found: Swept) -> tuple[str, ...]:
    """What the numbers say, in words."""
    if not found.measured:
        return ("Nothing to compare: no set has a score for every value.",)
    sweep, sets, best = found.sweep, found.measured, found.best
    means = sorted((found.over_sets(always(v)).mean("validation") for v in sweep.values), reverse=True)
    ranks = found.mean_ranks()
    by_rank = min(ranks, key=lambda v: ranks[v])
    chosen = ", ".join(f"{name} {shown(found.chosen(name))}{_paper(found, name)}" for name in sets)
    of_sets = ", ".join(f"{name} {found.p('test', [name]):.2g}" for name in sets)
    p = found.p("test", sets)
    return (
        f"The best single value is {_named(found, best)}: the best mean validation accuracy over "
        f"{len(sets)} set{'s' * (len(sets) > 1)}, {means[0]:.2f} (the next best value: {means[1]:.2f}). By mean rank "
        f"it would be {'the same' if by_rank == best else labelled(by_rank)}.",
        f"Chosen per set: {chosen}.",
        f"Do the values differ by more than seeds do? {'Yes' if p < LEVEL else 'Not shown'}: on test p = {p:.2g} over "
        f"all sets; by set: {of_sets}. Between the best and the worst value lie {_range(found):.2f} points on test in "
        f"the mean over sets; the std between seeds of one value is {_noise(found):.2f}.",
        *(f"On test, that value against {name}: {_words(found, policy)}." for name, policy in policies(found).items()),
    )


def markdown(found: Swept, plot: str | None = None) -> str:
    """For reading: the words first.

    Args:
        plot: the name of the picture, if there is one.
    """
    title, rest = render.markdown(grids(found), found.notes, LEGEND).split("\n", 1)
    words = [f"- {line}" for line in verdict(found)]
    return "\n".join([title, "", *words, *(["", f"![the sweep]({plot})"] if plot else []), rest])


def csv(found: Swept) -> str:
    """For computing: a line per set and value, then the means."""
    means = [f"{kind}_{part}" for kind in KINDS for part in ("mean", "std")]
    columns = ("set", found.sweep.setting, "seeds", "rank", *means, "remark")
    lines = []
    for row in rows(found):
        by_kind = [getattr(row.scores, kind).values() for kind in KINDS]
        numbers = [x for values in by_kind for x in (spread(values) if values else (None, None))]
        texts = (row.set, row.value, len(by_kind[0]), row.rank, *numbers, row.remark)
        lines.append(dict(zip(columns, texts, strict=True)))
    return render.csv(columns, lines)


def _compared(found: Swept, other: Policy, kind: str) -> tuple[str, str]:
    """By how many points the best single value is better in the mean over sets; and how often."""
    by_set = [gains for gains in found.gains(always(found.best), other, kind) if gains]
    if not by_set:
        return "–", "–"
    pairs = outcome(gain for gains in by_set for gain in gains)
    counts = " / ".join(map(str, pairs))
    return f"{fmean(map(fmean, by_set)):+.2f}", counts if pairs.p is None else f"{counts} ({pairs.p:.2g})"


def _words(found: Swept, other: Policy) -> str:
    pairs = outcome(gain for gains in found.gains(always(found.best), other, "test") for gain in gains)
    points, counts = _compared(found, other, "test")
    if not any(pairs):
        return "nothing measured"
    told = "a difference" if pairs.p is not None and pairs.p < LEVEL else "not told apart"
    return f"{points} points, {counts}: {told}"


def _named(found: Swept, value: Value) -> str:
    plain = f", which is {found.sweep.job(found.measured[0], value).mechanism}" if neutral(value) else ""
    return f"{labelled(value)}{plain}"


def _paper(found: Swept, name: str) -> str:
    paper = found.sweep.paper(name)
    if paper is None:
        return ""
    return " (the paper's)" if paper == found.chosen(name) else f" (the paper's: {shown(paper)})"


def _range(found: Swept) -> float:
    means = [found.over_sets(always(v)).mean("test") for v in found.sweep.values]
    return max(means) - min(means)


def _noise(found: Swept) -> float:
    """The std over seeds on test, in the mean over sets and values."""
    spreads = [list(found.scores[name, v].test.values()) for name in found.measured for v in found.sweep.values]
    return fmean([stdev(values) for values in spreads if len(values) > 1] or [0.0])
