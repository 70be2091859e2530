"""Runs: what is finished is looked up, what was interrupted goes on, the rest trains together."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..base import files
from ..base.environment import environment
from ..base.leases import BusyError, holding
from ..base.tensors import write
from ..data import Dataset
from ..primal import Primal
from .checkpoint import among, refusal
from .ensemble import Ensemble, check
from .loop import Training
from .progress import Watch
from .recipe import VERSION, Recipe
from .record import Record, key
from .series import series_task
from .store import Store
from .task import Task

logger = logging.getLogger(__name__)


def train(
    data: Dataset | Task,
    mechanism: str | Primal | None = None,
    recipe: Recipe | None = None,
    seeds: Sequence[int] = (0,),
    *,
    folder: str | Path | None = None,
    device: torch.device | str = "cpu",
    resume: bool = True,
    every: float = 15.0,
    watch: Sequence[Watch] = (),
    wait: bool = True,
) -> list[Record]:
    """Train one model per seed, all at once, and give a record of each, in the order of the seeds.

    With a folder, finished runs are read from it instead of being run again, and interrupted ones go on where they
    were: a run that was killed and resumed gives what it would have given. Without one, nothing is written.

    Args:
        data: time series, or any `Task`; a test part is evaluated with the others and never selected by.
        mechanism: for time series: a `Primal`, or the name of one; softmax unless given.
        recipe: for time series `series_recipe` of their kind unless given, mvts_transformer's; a task needs one.
        seeds: of initial weights, batch order and dropout.
        folder: for records, models and checkpoints.
        device: where to train.
        resume: whether interrupted runs go on; else they start anew.
        every: seconds of work that a kill may cost.
        watch: called after every evaluation, such as what `progress_bar` gives.
        wait: what to do where another process trains one of these seeds for the same folder: wait for its records, or
            raise a `BusyError`.
    """
    task, recipe = _as_task(data, mechanism, recipe)
    check(task, recipe)
    wanted = _checked(seeds)
    group = _Group(task, recipe, torch.device(device), None if folder is None else Store(folder), every, watch)
    if group.store is None:
        found = group.start(wanted)
        return [found[seed] for seed in wanted]
    keys = {seed: key(task, recipe, seed) for seed in wanted}
    said = False
    while True:
        done = {seed: record for seed in wanted if (record := group.store.record(keys[seed]))}
        if len(done) == len(wanted):
            group.tidy(done)
            return [done[seed] for seed in wanted]
        left = [group.store.lease(keys[seed]) for seed in wanted if seed not in done]
        try:
            with holding(left):
                group.train(wanted, keys, resume)
        except BusyError as error:
            if not wait:
                raise
            if not said:
                logger.warning("%s: %s, and trains the same; its records are waited for", task.name, error)
            said = True
            time.sleep(PAUSE)


PAUSE = 1.0
"""Seconds between two looks at whether another process has ended."""


def _as_task(data: Dataset | Task, mechanism: str | Primal | None, recipe: Recipe | None) -> tuple[Task, Recipe]:
    """What `train` is given as a task and a whole recipe."""
    if not isinstance(data, Task):
        return series_task(data, mechanism, recipe)
    if mechanism is not None:
        raise ValueError(f"{data.name}: a task has its own mechanism; leave it out, got mechanism={mechanism!r}")
    if recipe is None:
        raise ValueError(f"{data.name}: a task needs a recipe, such as Recipe(epochs=10)")
    return data, recipe


class _Group:
    """Members of one configuration on their way to records."""

    def __init__(
        self, task: Task, recipe: Recipe, device: torch.device, store: Store | None, every: float,
        watch: Sequence[Watch],
    ) -> None:  # fmt: skip
        self.task, self.recipe, self.device = task, recipe, device
        self.store, self.every, self.watch = store, every, watch
        self.configuration = key(task, recipe)

    def train(self, wanted: Sequence[int], keys: dict[int, str], resume: bool) -> None:
        """Records of all that are wanted: those of another process, which may have ended by now, are not made again."""
        assert self.store is not None
        done = {seed: record for seed in wanted if (record := self.store.record(keys[seed]))}
        if resume:
            for path, tensors, about in self.store.checkpoints(self.configuration):
                if among(about.get("seeds"), wanted):
                    done |= self.resume(path, tensors, about, done)
        if left := tuple(seed for seed in wanted if seed not in done):
            self.start(left)

    def tidy(self, done: dict[int, Record]) -> None:
        """Remove the checkpoint of who was killed after the last record was written."""
        assert self.store is not None
        for path, _, about in self.store.checkpoints(self.configuration):
            if among(about.get("seeds"), tuple(done)):
                files.remove(path)

    def start(self, seeds: tuple[int, ...]) -> dict[int, Record]:
        training = self._training(seeds)
        if self.store:  # a folder that cannot be written to is known before the work, not after it
            _save(self._place(self.store, seeds), training)
        return self._finish(training, {})

    def resume(
        self, path: Path, tensors: dict[str, torch.Tensor], about: dict[str, Any], done: dict[int, Record]
    ) -> dict[int, Record]:
        if set(about["seeds"]) <= set(done):  # killed after the last record was written
            files.remove(path)
            return {}
        training = self._training(tuple(about["seeds"]))
        if reason := refusal(training, tensors, about):
            logger.warning("%s is %s; its members start anew", path, reason)
            return {}
        training.load(tensors, about)
        logger.info("seeds %s go on from epoch %d, batch %d", about["seeds"], training.epoch, training.batch)
        return self._finish(training, done)

    def _training(self, seeds: tuple[int, ...]) -> Training:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return Training(Ensemble(self.task, self.recipe, seeds, self.device))

    def _finish(self, training: Training, done: dict[int, Record]) -> dict[int, Record]:
        """Train to the end. The checkpoint goes last: until then a kill costs nothing."""
        place = self._place(self.store, training.seeds) if self.store else None
        training.run(self.watch, None if place is None else lambda t: _save(place, t), self.every)
        found = {}
        for i, seed in enumerate(training.seeds):
            if seed in done:
                continue
            found[seed] = self._record(training, i)
            if self.store:
                if found[seed].failure is None:
                    model = training.ensemble.model(i)
                    self.store.add_model(found[seed].key, model, self.task.kept(model))
                self.store.add(found[seed])
        if place is not None:
            files.remove(place)
        return found

    def _place(self, store: Store, seeds: tuple[int, ...]) -> Path:
        return store.checkpoint(self.configuration, key(self.task, self.recipe, *seeds))

    def _record(self, training: Training, member: int) -> Record:
        task, seed = self.task, training.seeds[member]
        return Record(
            key(task, self.recipe, seed), VERSION, task.data(), task.stated, self.recipe.to_dict(), seed,
            list(training.seeds), task.metric.name, training.history[member], training.failures[member],
            training.ensemble.weights.count, round(training.seconds, 3), _peak(self.device), environment(self.device),
            task.metric.more_is_better, training.step, dict(task.about),
            self._speed(training),
        )  # fmt: skip

    def _speed(self, training: Training) -> dict[str, float]:
        step = training.seconds_per_step
        if not step:
            return {}
        cases = min(self.recipe.batch_size, len(training.ensemble.train)) * len(training.seeds)
        found = {"seconds_per_step": step} | self.task.speed(cases / step)
        return {name: float(f"{value:.4g}") for name, value in found.items()}


def _save(path: Path, training: Training) -> None:
    tensors, about = training.state()
    try:
        write(path, tensors, about | {"seeds": list(training.seeds)})
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise
        # another process that ran the same has ended, and tidied up


def _checked(seeds: Sequence[int]) -> tuple[int, ...]:
    wanted = tuple(seeds)
    if not wanted or len(set(wanted)) != len(wanted) or any(type(s) is not int or s < 0 for s in wanted):
        raise ValueError(f"seeds must be different integers of at least 0, got {list(wanted)!r}")
    return wanted


def _peak(device: torch.device) -> int | None:
    """Bytes: of the device, else the most that this process ever held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    scale = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
