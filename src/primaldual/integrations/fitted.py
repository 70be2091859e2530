"""What both recipes come to: models that predict together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..data import Dataset
from ..primal import Primal, Spec
from ..training import Ensemble, ModernModel, ModernRecipe, Progress, Recipe, SeriesTask, Training, Watch, progress_bar
from ..training.calibration import Calibration
from ..training.modern_fit import fit
from ..training.progress import History


@dataclass(frozen=True, eq=False)
class Fitted:
    """Models that predict together.

    Args:
        configs, weights, shares, history: of every one of them; a bank has no history.
        calibration: of their probabilities, where there is one.
        failures: of members that are left out.
        modern: what a later fit goes on from.
    """

    configs: list[Spec]
    weights: list[dict[str, Tensor]]
    shares: list[float]
    history: list[History]
    calibration: Calibration | None = None
    failures: Sequence[str] = ()
    modern: ModernModel | None = None


@dataclass(frozen=True)
class Course:
    """How a training is run and watched, whatever it is of.

    Args:
        device: where.
        watch: what is called after every evaluation.
        verbose: whether progress is shown.
        jobs: how many parts are fitted side by side.
        seconds: that it takes at most.
    """

    device: torch.device
    watch: Sequence[Watch]
    verbose: bool
    jobs: int
    seconds: float | None

    @contextmanager
    def shown(self, title: str) -> Iterator[list[Watch]]:
        """A bar on a terminal and lines elsewhere, or nothing."""
        if not self.verbose:
            yield []
            return
        with progress_bar(Console(stderr=True), title) as watch:
            yield [watch]


def fit_modern(
    data: Dataset, recipe: ModernRecipe, seed: int, course: Course, weights: Tensor | None, before: ModernModel | None
) -> Fitted:
    """Banks and members."""
    with course.shown(data.name) as overall:
        model = fit(
            data, recipe, seed, course.device, course.watch, overall=overall, weights=weights, jobs=course.jobs,
            seconds=course.seconds, before=before,
        )  # fmt: skip
    parts = [*model.banks, *model.members]
    return Fitted(
        [one.model.config for one in parts], [one.model.state_dict() for one in parts], model.shares,
        [one.history for one in parts], model.calibration, model.failures, model,
    )  # fmt: skip


class _TimeIsOverError(Exception):
    """Ends a training."""


def fit_paper(
    data: Dataset, recipe: Recipe, mechanism: str | Primal, members: int, seed: int, course: Course,
    class_weights: Tensor | None,
) -> Fitted:  # fmt: skip
    """All members at once, as the paper's tables are trained."""
    task = SeriesTask.of(data, mechanism, recipe, class_weights)
    training = Training(Ensemble(task, recipe, range(seed, seed + members), course.device))
    end = None if course.seconds is None else time.monotonic() + course.seconds

    def in_time(progress: Progress) -> None:
        if end is not None and time.monotonic() > end and progress.done < progress.total:
            raise _TimeIsOverError

    with course.shown(data.name) as shown:
        try:
            training.run([*shown, *course.watch, in_time])
        except _TimeIsOverError:
            training.choose()
    kept = [i for i, failure in enumerate(training.failures) if failure is None]
    lost = [failure for failure in training.failures if failure is not None]
    if not kept:
        raise RuntimeError(f"{data.name}: {lost[0]}; lower the learning rate")
    models: list[Any] = [training.ensemble.model(i) for i in kept]
    return Fitted(
        [model.config for model in models], [model.state_dict() for model in models], [1 / len(models)] * len(models),
        [training.history[i] for i in kept], None, lost,
    )  # fmt: skip
