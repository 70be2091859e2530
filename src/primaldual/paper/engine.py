"""Engines: what takes a list of jobs and leaves their records in a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from ..base.leases import BusyError
from ..data import DataError
from ..training import Watch, train
from .families import family
from .job import Job

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """Why a set was not trained on; or one mechanism on it."""

    dataset: str
    mechanism: str | None
    message: str


@dataclass(frozen=True)
class Place:
    """Where an engine works.

    Args:
        folder: of the records, as in `Store`.
        data_dir, offline: as in `primaldual.data.load`.
        device: to train on.
        watching: gives for a job what is to be called after its evaluations.
    """

    folder: Path
    data_dir: Path | None = None
    offline: bool = False
    device: torch.device | str = "cpu"
    watching: Callable[[Job], AbstractContextManager[Watch]] | None = None


Engine = Callable[[Sequence[Job], Place], list[Failure]]
"""Trains what is not yet recorded, and says what could not be; a cluster's engine would hand jobs to its workers."""


def local(jobs: Sequence[Job], place: Place) -> list[Failure]:
    """One job after the other, in this process.

    What other processes do for the same folder is left to them; at the end their records are waited for.
    """
    failures, busy = _in_turn(jobs, place, wait=False)
    others, _ = _in_turn(busy, place, wait=True)
    return failures + others


def _in_turn(jobs: Sequence[Job], place: Place, wait: bool) -> tuple[list[Failure], list[Job]]:
    """What could not be done, and what another process does."""
    failures, busy = [], []
    for name, of_set in groupby(jobs, lambda job: job.dataset):
        try:
            data = family(name).load(name, place.data_dir, place.offline)
        except (DataError, OSError) as error:
            failures.append(Failure(name, None, str(error)))
            continue
        for job in of_set:
            try:
                task = family(name).task(data, job.primal, job.recipe)
                together = family(name).together(task) or len(job.seeds)
                for first in range(0, len(job.seeds), together):
                    with place.watching(job) if place.watching else nullcontext() as watch:
                        train(
                            task, None, job.recipe, job.seeds[first : first + together], folder=place.folder,
                            device=place.device, watch=[watch] if watch else [], wait=wait,
                        )  # fmt: skip
            except torch.OutOfMemoryError:
                failures.append(Failure(name, job.mechanism, "the device is out of memory"))
            except BusyError as error:
                logger.warning("%s, %s: %s, and trains it; on with the next", name, job.mechanism, error)
                busy.append(job)
    return failures, busy


ENGINES: dict[str, Engine] = {"local": local}
