"""Engines: what takes a list of runs and leaves their records in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from ..data import DataError, load
from ..training import Watch, train
from .runs import Run


class Failure(NamedTuple):
    """Why there is no record of a set; or of one mechanism on it."""

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
        watching: gives for a run what is to be called after its evaluations.
    """

    folder: Path
    data_dir: Path | None = None
    offline: bool = False
    device: torch.device | str = "cpu"
    watching: Callable[[Run], AbstractContextManager[Watch]] | None = None


Engine = Callable[[Sequence[Run], Place], list[Failure]]
"""Trains what is not yet recorded, and says what could not be; a cluster's engine would hand runs to its workers."""


def local(runs: Sequence[Run], place: Place) -> list[Failure]:
    """One run after the other, in this process."""
    failures: list[Failure] = []
    for name, of_set in groupby(runs, lambda run: run.dataset):
        try:
            data = load(name, place.data_dir, offline=place.offline)
        except (DataError, OSError) as error:
            failures.append(Failure(name, None, str(error)))
            continue
        for run in of_set:
            try:
                with place.watching(run) if place.watching else nullcontext() as watch:
                    train(
                        data, run.primal, run.recipe, run.seeds, folder=place.folder, device=place.device,
                        watch=[watch] if watch else [],
                    )  # fmt: skip
            except torch.OutOfMemoryError:
                failures.append(Failure(name, run.mechanism, "the device is out of memory"))
    return failures


ENGINES: dict[str, Engine] = {"local": local}
