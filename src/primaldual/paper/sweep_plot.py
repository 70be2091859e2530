"""A panel per set, and one for the mean over them: accuracy by value, on validation and on test."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..base.style import COLOURS, INK, SOFT, figure, png, style
from .sweeps import Value, labelled
from .swept import Scores, Swept, always

_LINES = {"validation": COLOURS["sh"], "test": COLOURS["bn"]}
_LABELS = {"validation": "validation, best epoch", "test": "test at that epoch"}
_RING: Any = {"marker": "o", "ms": 12, "mfc": "none", "mec": INK, "mew": 1.4, "ls": "none"}
_STAR: Any = {"marker": "*", "ms": 13, "mec": "white", "mew": 0.8, "ls": "none"}


def sweep_plot(found: Swept) -> bytes | None:
    """A PNG; None when no set has a score for every value."""
    if not (sets := found.measured):
        return None
    sweep = found.sweep
    panels = len(sets) + (len(sets) > 1)
    columns = min(panels, 2)
    with style():
        drawing = figure(6.2 * columns, 1.1 + 3.2 * -(-panels // columns))
        axes = drawing.subplots(-(-panels // columns), columns, squeeze=False).flatten()
        for one, name in zip(axes, sets, strict=False):
            tried = [v for v in sweep.tried(name) if found.scores[name, v].last]
            scores = {v: found.scores[name, v] for v in tried}
            _panel(one, scores, found.scores[name, None], found.chosen(name), sweep.paper(name))
            one.set_title(name)
        if len(sets) > 1:
            scores = {v: found.over_sets(always(v)) for v in sweep.values}
            _panel(axes[len(sets)], scores, found.over_sets(always(None)), found.best, None)
            axes[len(sets)].set_title(f"mean of {len(sets)}: the best is {labelled(found.best)}")
        for one in axes[panels:]:
            one.set_visible(False)
        for i, one in enumerate(axes[:panels]):
            one.set_ylabel("accuracy, %" if i % columns == 0 else "")
            under = i + columns >= panels
            one.set_xlabel(("β" if sweep.setting == "beta" else "scales of the heads") if under else "")
        drawing.legend(handles=_handles(axes[0], sweep.baseline), loc="outside lower center", ncols=5)
        title = f"A sweep of {sweep.setting}, {sweep.mechanism}: mean ± std of {len(sweep.seeds)} seeds"
        drawing.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        return png(drawing, 150)


def _panel(
    axes: Axes, scores: dict[Value, Scores], baseline: Scores, chosen: Value, paper: Value | None
) -> None:  # fmt: skip
    x = {v: i if isinstance(v, tuple) else v for i, v in enumerate(scores)}
    for kind, colour in _LINES.items():
        mean = {v: one.mean(kind) for v, one in scores.items()}
        middle, spread = np.array(list(mean.values())), np.array([_std(one, kind) for one in scores.values()])
        above = np.minimum(middle + spread, 100)
        axes.fill_between(list(x.values()), middle - spread, above, color=colour, alpha=0.15, lw=0)
        axes.plot(list(x.values()), middle, "o-", color=colour, ms=4.5)
        axes.axhline(baseline.mean(kind), color=colour, ls="--", lw=1.2, zorder=1)
        if paper in mean:
            axes.plot(x[paper], mean[paper], color=colour, zorder=4, **_STAR)
        if kind == "validation":
            axes.plot(x[chosen], mean[chosen], zorder=5, **_RING)
    axes.set_xticks(list(x.values()), [_tick(v) for v in scores], fontsize=8)
    axes.margins(y=0.12)
    axes.grid(axis="y")


def _handles(axes: Axes, baseline: str) -> list[Any]:
    lines = [axes.plot([], [], "o-", color=colour, ms=4.5, label=_LABELS[kind])[0] for kind, colour in _LINES.items()]
    lines += axes.plot([], [], "--", color=SOFT, lw=1.2, label=baseline)
    lines += axes.plot([], [], color=SOFT, label="the paper's value", **_STAR)
    return [*lines, *axes.plot([], [], label="chosen on validation", **_RING)]


def _tick(value: Value) -> str:
    if not isinstance(value, tuple):
        return f"{value:g}"
    half = -(-len(value) // 2)
    return "\n".join(" ".join(map(str, part)) for part in (value[:half], value[half:]))


def _std(scores: Scores, kind: str) -> float:
    values: Sequence[float] = list(getattr(scores, kind).values())
    return stdev(values) if len(values) > 1 else 0.0
