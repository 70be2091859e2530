"""aeon's diagrams of results: the critical difference of mean ranks, and a scatter of every pair."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl

from ...base.packages import needed
from ...base.style import png
from .results import ENOUGH, Results

FEWEST = 3
"""Methods, and sets, that a critical difference is drawn of."""


def critical_difference(found: Results) -> bytes | None:
    """Methods on a line of mean ranks; bars join those that do not differ. None of too few methods or sets."""
    if len(found.measured) < FEWEST or len(found.complete) < FEWEST:
        return None
    with _quiet() as aeon:
        beside = 1.4 + 0.155 * max(map(len, found.measured))  # inches for the names
        drawing, _ = aeon.plot_critical_difference(
            found.scores().round(6), list(found.measured), lower_better=found.lower_is_better,
            width=3.6 + 2 * beside, textspace=beside,
        )  # fmt: skip
        return _closed(drawing)


def scatter(found: Results, rival: str) -> bytes | None:
    """A point per set: the first method against a rival. None of a single set."""
    first, scores = found.methods[0], found.scores()
    if len(scores) < 2 or not {first, rival} <= set(found.measured):
        return None
    ours, theirs = (scores[:, found.measured.index(name)] for name in (first, rival))
    unit, metric = (1.0, "RMSE") if found.lower_is_better else (100.0, "accuracy")  # aeon's accuracies end at 1
    needed("seaborn", "seaborn", "the scatter of pairs", '"primaldual[compare]"')
    with _quiet() as aeon:
        tested = len(scores) >= ENOUGH
        drawing, axes = aeon.plot_pairwise_scatter(
            ours / unit, theirs / unit, first, rival, metric=metric,
            lower_better=found.lower_is_better, statistic_tests=tested, figsize=(7.5, 7.5),
        )  # fmt: skip
        axes.set_xlabel(axes.get_xlabel(), loc="left")  # beside the note on dashed lines, not under it
        for points in axes.collections:
            points.set_clip_on(False)
        below = 0.21 if tested else 0.13
        drawing.subplots_adjust(left=0.13, right=0.95, top=0.96, bottom=below)
        if found.lower_is_better:  # aeon has the labels on the other sides
            drawing.subplots_adjust(left=0.05, right=0.87, top=0.87, bottom=0.24 if tested else 0.05)
        return _closed(drawing)


@contextmanager
def _quiet() -> Iterator[Any]:
    """aeon's module, which draws by pyplot: without a window, and with the caller's settings as they were."""
    aeon = needed("aeon.visualisation", "aeon", "the diagrams of a comparison", '"primaldual[compare]"')
    before = mpl.get_backend()
    with warnings.catch_warnings(), mpl.rc_context():
        warnings.simplefilter("ignore")
        mpl.use("agg")
        try:
            yield aeon
        finally:
            mpl.use(before)


def _closed(drawing: Any) -> bytes:
    from matplotlib import pyplot

    made = png(drawing, 120)
    pyplot.close(drawing)
    return made
