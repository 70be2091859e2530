"""How long what is left will take."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from .job import Job
from .records import Record


class Pace:
    """What fits took so far."""

    def __init__(self) -> None:
        self.took: dict[tuple[str, str], list[float]] = {}
        self.sizes: dict[str, int] = {}

    def add(self, job: Job, record: Record) -> None:
        """Learn from a fit that has ended."""
        stopped = record.get("time_limit", 0.0) if "failure" in record else 0.0
        seconds = record.get("fit_seconds", stopped) + record.get("predict_seconds", 0.0)
        self.took.setdefault((job.dataset, job.method), []).append(seconds)
        self.sizes[job.dataset] = job.size

    def seconds(self, left: Iterable[Job], processes: int = 1) -> float | None:
        """Of all that is left; None before anything is known.

        A fit takes as long as others of its method on its set did, else as long for its size as its method did, or as
        all did.
        """
        return sum(map(self._expected, left)) / processes if self.took else None

    def _expected(self, job: Job) -> float:
        if known := self.took.get((job.dataset, job.method)):
            return fmean(known)
        mine = {key: values for key, values in self.took.items() if key[1] == job.method} or self.took
        values = sum(self.sizes[name] * len(times) for (name, _), times in mine.items())
        return sum(map(sum, mine.values())) * job.size / max(values, 1)
