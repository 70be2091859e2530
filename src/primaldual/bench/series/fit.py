"""One fit: train, predict, score. It runs in a process of its own."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from .job import Job
from .methods import build
from .prepared import Preparation
from .scores import log_loss, of_labels, of_numbers
from .sets import Part


@dataclass(frozen=True, eq=False)
class Task:
    """A job with its series."""

    job: Job
    train: Part
    test: Part
    n_jobs: int


def measured(task: Task) -> dict[str, Any]:
    """Scores, seconds and memory, and what was done to the series."""
    job = task.job
    torch.set_num_threads(task.n_jobs)
    with (
        import_module("threadpoolctl").threadpool_limits(task.n_jobs),
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
    ):
        warnings.simplefilter("ignore")  # a rival's, nothing that a reader could act on
        preparation = Preparation(job.path)
        estimator = build(job.path, dict(job.settings), job.seed, task.n_jobs)
        fitting = _Clock()
        estimator.fit(preparation.fit(task.train.x), task.train.y)
        fitted = fitting.read("fit")
        predicting = _Clock()
        scores = _scored(estimator, job.kind, preparation.apply(task.test.x), task.test.y)
        predicted = predicting.read("predict")
    if not all(value is None or np.isfinite(value) for value in scores.values()):
        raise ValueError("what it predicts is not finite")
    return {"scores": scores, **fitted, **predicted, "peak_bytes": _peak(), "notes": preparation.notes}


def _peak() -> int | None:
    """The most memory that this process had, its libraries included; None where the system does not say."""
    try:
        resource = import_module("resource")
    except ModuleNotFoundError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _scored(estimator: Any, kind: str, series: Any, true: np.ndarray) -> dict[str, float | None]:
    """One pass over the series where the labels follow from the probabilities, as aeon's do."""
    if kind == "regression":
        return {**of_numbers(true, np.asarray(estimator.predict(series)))}
    if not hasattr(estimator, "predict_proba"):
        return {**of_labels(true, estimator.predict(series)), "log_loss": None}
    probabilities = np.asarray(estimator.predict_proba(series))
    if hasattr(estimator, "get_class_tag"):
        labels = np.asarray(estimator.classes_)[probabilities.argmax(1)]
    else:
        labels = estimator.predict(series)
    return {**of_labels(true, labels), "log_loss": log_loss(true, probabilities, estimator.classes_)}


class _Clock:
    """Of the wall, and of this process's threads; what numba compiles is left out, for it does so once a machine."""

    def __init__(self) -> None:
        self.compiling = _Compiling() if "numba" in sys.modules else None
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self, what: str) -> dict[str, float]:
        """Seconds since this clock was made."""
        compiled = self.compiling.seconds() if self.compiling else 0.0
        return {
            f"{what}_seconds": max(time.perf_counter() - self.wall - compiled, 0.0),
            f"{what}_cpu_seconds": max(time.process_time() - self.cpu - compiled, 0.0),
        }


class _Compiling:
    """How long numba compiles."""

    def __init__(self) -> None:
        self.event = import_module("numba.core.event")
        self.timer = self.event.TimingListener()
        self.event.register("numba:compile", self.timer)

    def seconds(self) -> float:
        """Until now; nothing more is listened to."""
        self.event.unregister("numba:compile", self.timer)
        return float(self.timer.duration) if self.timer.done else 0.0
