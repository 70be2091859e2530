"""Do what is not recorded: so many fits at a time, each held by one process of all that share the folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ...base.leases import BusyError, holding
from ...data.sources import Source
from .fit import Task
from .job import Job
from .records import Record, Store
from .sets import SeriesSet, read_set
from .worker import Worker, first_of, preload

TURN = 0.5
"""Seconds between two looks at what is running, and at what other processes do."""


@dataclass(frozen=True)
class Limits:
    """What a fit may take.

    Args:
        processes: fits at a time.
        n_jobs: threads of each.
        seconds: from the start of a fit to its last prediction; None for any.
        memory: bytes of its process, where the system can hold it to them; None for any.
        retry: whether what failed before is tried again.
    """

    processes: int = 1
    n_jobs: int = 1
    seconds: float | None = None
    memory: int | None = None
    retry: bool = False


Watch = Callable[[Job, Record], None]


def open_jobs(wanted: Iterable[Job], store: Store, limits: Limits) -> list[Job]:
    """Those that are still to be done."""
    return [job for job in wanted if not _settled(store.record(job), limits)]


def run(
    wanted: Sequence[Job], sources: Sequence[Source], store: Store, limits: Limits, about: dict[str, Any], watch: Watch
) -> None:
    """Do all jobs that are open; `watch` hears of every record that comes to be, another process's too.

    What fails is recorded. Once a method was stopped on a set for its time, its other fits there are not begun.
    """
    _Run({source.name: source for source in sources}, store, limits, about, watch).run(wanted)


def _settled(record: Record | None, limits: Limits) -> bool:
    """A failure is final unless it is to be tried again, or has more time now."""
    if record is None or "failure" not in record:
        return record is not None
    had = record.get("time_limit")
    return not (limits.retry or (had is not None and (limits.seconds is None or limits.seconds > had)))


class _Run:
    def __init__(
        self, sources: dict[str, Source], store: Store, limits: Limits, about: dict[str, Any], watch: Watch
    ) -> None:
        self.sources, self.store, self.limits, self.about, self.watch = sources, store, limits, about, watch
        self.active: dict[Job, tuple[Worker, ExitStack]] = {}
        self.too_slow: dict[tuple[str, str], dict[str, Any]] = {}
        self.data: SeriesSet | None = None

    def run(self, wanted: Sequence[Job]) -> None:
        left, elsewhere = deque(open_jobs(wanted, self.store, self.limits)), deque[Job]()
        tried = set[Job]()
        preload(job.path for job in left)
        try:
            while left or elsewhere or self.active:
                while left and len(self.active) < self.limits.processes:
                    job = left.popleft()
                    if not self._begin(job, tried):
                        elsewhere.append(job)
                if self.active:
                    first_of([worker for worker, _ in self.active.values()], TURN)
                elif elsewhere:
                    time.sleep(TURN)
                self._collect()
                if not left:  # what others had in hand: done by now, or left behind by a process that was killed
                    left, elsewhere = elsewhere, deque()
        finally:
            for worker, held in self.active.values():
                worker.stop()
                held.close()

    def _begin(self, job: Job, tried: set[Job]) -> bool:
        """Whether a job is in hand or done; else another process has it."""
        held = ExitStack()
        try:
            held.enter_context(holding([self.store.lock(job)]))
        except BusyError:
            tried.add(job)
            return False
        with held:
            record = self.store.record(job)
            if record is not None and (job in tried or _settled(record, self.limits)):
                self.watch(job, record)
            elif slow := self.too_slow.get((job.dataset, job.method)):
                self._add(job, slow)
            else:
                try:
                    task = Task(job, *job.protocol.split(self._read(job), job.split), self.limits.n_jobs)
                except (ValueError, OSError) as error:  # a split that there is not, or a file that is gone
                    self._add(job, {"failure": str(error)})
                    return True
                worker = Worker(task, self.store.log(job), self.limits.seconds, self.limits.memory)
                self.active[job] = worker, held.pop_all()
        return True

    def _collect(self) -> None:
        for job, (worker, held) in list(self.active.items()):
            if (result := worker.result()) is not None:
                with held:
                    self._add(job, result | _sizes(worker.task))
                del self.active[job]
                if "time_limit" in result:
                    said = f"not begun: split {job.split}, seed {job.seed} was {result['failure']}"
                    self.too_slow[job.dataset, job.method] = result | {"failure": said}

    def _add(self, job: Job, result: dict[str, Any]) -> None:
        self.watch(job, self.store.add(job, result | {"n_jobs": self.limits.n_jobs}, self.about))

    def _read(self, job: Job) -> SeriesSet:
        if self.data is None or self.data.name != job.dataset:
            self.data = read_set(self.sources[job.dataset], job.protocol.train_only)
        if self.data.stated.digest != job.digest:
            raise ValueError(f"{job.dataset}: its files were changed while they were measured")
        return self.data


def _sizes(task: Task) -> dict[str, Any]:
    """Of the series, in the words of a record."""
    lengths = [x.shape[1] for x in task.train.x]
    return {
        "sizes": {
            "train": len(task.train), "test": len(task.test), "steps": max(lengths), "shortest": min(lengths),
            "channels": task.train.x[0].shape[0],
            "classes": len(set(task.train.y.tolist())) if task.job.kind == "classification" else 0,
        }
    }  # fmt: skip
