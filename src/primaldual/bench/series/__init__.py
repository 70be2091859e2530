"""Estimators of time series beside their rivals: the same sets, splits and seeds, each fit in a process of its own."""

from .job import Job, jobs
from .methods import METHODS, Method, method
from .protocol import Folds, Protocol, Resamples
from .records import Store
from .run import Limits, run
from .sets import SeriesSet, Stated, sets_in

__all__ = [
    "METHODS", "Folds", "Job", "Limits", "Method", "Protocol", "Resamples", "SeriesSet", "Stated", "Store", "jobs",
    "method", "run", "sets_in",
]  # fmt: skip
