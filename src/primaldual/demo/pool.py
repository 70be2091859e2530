"""Runs in parallel: processes of one thread each.

These models are too small to fill two threads, and threads that wait for each other on a busy machine cost
several times what they gain; independent runs do not wait.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat

import torch

from .data import Data
from .recipe import Recipe
from .train import Job, Run, train


class Pool(AbstractContextManager["Pool"]):
    """Trains jobs as workers come free. With one worker, in this process."""

    def __init__(self, data: Data, recipe: Recipe) -> None:
        self.workers = recipe.workers or min(4, cores())
        self._data, self._recipe = data, recipe
        self._longest: float | None = None
        self._executor: ProcessPoolExecutor | None = None
        if self.workers > 1:
            # not fork: torch's own threads do not survive it
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_prepare_worker)

    def rounds(self, rounds: Sequence[Sequence[Job]], left: Callable[[], float], tick: Callable[[], None]) -> list[Run]:
        """Round after round, as long as the next one should end within the seconds that `left` gives.

        The very first round is always run. `tick` is called after every run.
        """
        done: list[Run] = []
        for jobs in rounds:
            before = left()
            if self._longest is not None and self._longest > before:
                break
            for run in self._run(jobs):
                done.append(run)
                tick()
            self._longest = max(self._longest or 0.0, before - left())
        return done

    def _run(self, jobs: Sequence[Job]) -> Iterator[Run]:
        """The runs, in the order of their jobs."""
        if self._executor is None:
            for job in jobs:
                yield train(job, self._data, self._recipe)
            return
        yield from self._executor.map(train, jobs, repeat(self._data), repeat(self._recipe))

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread inside, as before outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare_worker() -> None:
    # on Ctrl-C a worker just ends; the parent says what happened
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
