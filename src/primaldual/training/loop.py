"""The training loop: batches, evaluations, and where an ensemble stands between any two batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..base.randomness import lent
from .batches import Chosen, mix
from .ensemble import Ensemble
from .progress import History, Progress, Watch, best_at

SAVING = 20.0
"""So many times as long as it takes to keep what is done, is worked before it is kept again."""


class Training:
    """An ensemble on its way. Nothing is drawn that does not follow from the seeds, the epoch and the batch.

    Args:
        ensemble: at its start, or as `load` finds it.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        self.ensemble, self.recipe, self.seeds = ensemble, ensemble.recipe, ensemble.seeds
        self.epoch, self.batch, self.step, self.seconds = 1, 0, 0, 0.0
        self.evaluated = 0  # the epoch, or step, after which it was last
        self.seen = 0  # cases behind the ensemble's total loss
        parts = (self.recipe.unit, "loss", *ensemble.parts)
        self.history: list[History] = [{part: [] for part in parts} for _ in self.seeds]
        self.active = [True] * len(self.seeds)
        self.failures: list[str | None] = [None] * len(self.seeds)
        self._chosen: dict[str, Tensor] = {}  # weights with the best validation metric so far
        if "validation" in ensemble.parts:
            self._chosen = {name: x.clone() for name, x in self._of_model().items()}
        self._random: Tensor | None = None
        self._batches: list[Chosen] = []  # those of the epoch
        self._since = time.perf_counter()
        self.paces: list[float] = []  # seconds of a step, between every two evaluations
        self._first: float | None = None  # the same of the first ones of a process, which prepare what follows
        self._pacing = (0, 0.0)  # since which step, and when

    @property
    def at(self) -> int:
        """How many epochs, or steps, are done."""
        return self.epoch - 1 if self.recipe.unit == "epoch" else self.step

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.evaluated >= self.recipe.end or not any(self.active)

    @property
    def seconds_per_step(self) -> float | None:
        """The median, without evaluations and without what is kept in between."""
        return median(self.paces) if self.paces else self._first

    def run(
        self, watch: Sequence[Watch] = (), save: Callable[[Training], None] | None = None, every: float = 15.0
    ) -> None:
        """Train to the end.

        Args:
            watch: called after every evaluation; on a CPU also between them, once a second.
            save: called between two batches, to keep `state()`; and at the end.
            every: seconds between two calls of `save`; more where they take long, so that they take a twentieth of the
                time at most. 0: after every batch.
        """
        with self._randomness(), self._on_device(), torch.enable_grad():
            self._since = saved = told = time.perf_counter()
            self._pacing, pause = (self.step, saved), every
            while not self.finished:
                if self.at > self.evaluated and self.recipe.evaluates(self.at):
                    self._pace()
                    progress = self._evaluate()
                    self._pacing = self.step, time.perf_counter()
                    for one in watch:
                        one(progress)
                    continue
                self.train_batch()
                now = time.perf_counter()
                if save and now - saved >= pause:
                    self._wait()
                    now = time.perf_counter()
                    save(self)
                    saved = time.perf_counter()
                    pause = max(every, SAVING * (saved - now)) if every else 0.0
                    self._pacing = self._pacing[0], self._pacing[1] + saved - now
                if self.ensemble.device.type == "cpu" and now - told >= 1.0:  # elsewhere steps are only queued
                    for one in watch:
                        one(self._progress(self._share, {}))
                    told = now
            self._clock()
            if save:
                save(self)
            if self._chosen:
                self.choose()
                if self.recipe.test_at_end and "test" in self.ensemble.parts:
                    self._test_chosen()

    def choose(self) -> None:
        """Take the weights that are the best on validation so far, where there is such a part."""
        if self._chosen:
            self.ensemble.load(self.ensemble.tensors() | self._chosen)

    def _randomness(self) -> AbstractContextManager[None]:
        """The caller's random state is left alone: on a GPU graphs draw from it, and one ensemble trains at a time."""
        generator = self.ensemble.generator
        return lent(generator) if generator.device.type == "cuda" else nullcontext()

    def _wait(self) -> None:
        """Until the device has done what it was given."""
        if self.ensemble.device.type == "cuda":
            torch.cuda.synchronize(self.ensemble.device)

    def _pace(self) -> None:
        """Note how long a step took since the evaluation before."""
        self._wait()
        step, since = self._pacing
        if self.step == step:
            return
        seconds = (time.perf_counter() - since) / (self.step - step)
        if self._first is None:
            self._first = seconds
        else:
            self.paces.append(seconds)

    def _on_device(self) -> AbstractContextManager[object]:
        """Graphs are captured and replayed on the current device."""
        device = self.ensemble.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def train_batch(self) -> None:
        """The next one. But for the order at the start of an epoch, nothing in it waits for the device."""
        ensemble = self.ensemble
        if self.batch == 0:
            if self.recipe.unit == "epoch":  # the loss is that of one epoch, however many lie between evaluations
                self._forget_loss()
            ensemble.generator.manual_seed(mix(1, self.epoch, *self.seeds))
        elif self._random is not None:
            ensemble.generator.set_state(self._random)
        self._random = None
        if self.batch == 0 or not self._batches:
            self._batches = ensemble.batches.of_epoch(self.epoch, self.seeds, ensemble.device)
        chosen = self._batches[self.batch]
        ensemble.step(chosen.rows) if chosen.length is None else ensemble.step(chosen.rows, chosen.length)
        self.seen += chosen.rows.shape[1]
        self.step += 1
        self.batch += 1
        if self.batch == len(self._batches):
            self.epoch, self.batch = self.epoch + 1, 0

    def _forget_loss(self) -> None:
        self.ensemble.total.zero_()
        self.seen = 0

    def _evaluate(self) -> Progress:
        """With what is kept, the only place that waits for the device."""
        ensemble, unit = self.ensemble, self.recipe.unit
        waits = {"test"} if self.recipe.test_at_end and self.at < self.recipe.end else set()
        due = [part for part in ensemble.parts if part not in waits]
        parts = ("loss", *due)
        found = [ensemble.total / self.seen, *(ensemble.evaluate(part) for part in due)]
        *rows, alive = torch.stack([*found, ensemble.alive.to(found[0].dtype)]).tolist()
        values = dict(zip(parts, rows, strict=True))
        stopped = []
        for i in range(len(self.seeds)):
            odd = [part for part in parts if not math.isfinite(values[part][i])]
            if self.active[i] and (odd or not alive[i]):
                what = f"the {odd[0]} is" if odd and alive[i] else "the loss or its gradient is"
                self.failures[i] = f"{what} not finite in {unit} {self.at}"
                self.active[i] = False
                stopped.append(i)
            if self.active[i]:
                for part in ("loss", *ensemble.parts):
                    self.history[i][part].append(values[part][i] if part in values else None)
                self.history[i][unit].append(self.at)
        others = ", the others go on" if any(self.active) else ""
        messages = [f"seed {self.seeds[i]} stops{others}: {self.failures[i]}" for i in stopped]
        if self._chosen:
            messages += self._validate()
        known = {
            part: tuple(x for x, active in zip(values[part], self.active, strict=True) if active) for part in parts
        }
        self.evaluated = self.at
        self._forget_loss()
        return self._progress(self.at, known, tuple(messages))

    def _progress(self, done: float, values: dict[str, tuple[float, ...]], messages: tuple[str, ...] = ()) -> Progress:
        seeds = tuple(seed for seed, active in zip(self.seeds, self.active, strict=True) if active)
        return Progress(done, self.recipe.end, seeds, values, messages, self.recipe.unit)

    @property
    def _share(self) -> float:
        """Epochs, or steps, with the share of the epoch that is under way."""
        return self.at + (self.batch / len(self.ensemble.batches) if self.recipe.unit == "epoch" else 0)

    def _validate(self) -> list[str]:
        """Keep the weights of members that are better than ever, and stop those that have not been for long."""
        better, messages = [False] * len(self.seeds), []
        unit = self.recipe.unit
        for i, history in enumerate(self.history):
            if not self.active[i]:
                continue
            best = best_at(history["validation"], self.ensemble.task.metric.more_is_better)
            better[i] = best == len(history[unit]) - 1
            if self.recipe.patience and self.at - history[unit][best] >= self.recipe.patience:
                self.active[i] = False
                messages.append(f"seed {self.seeds[i]} is done: best on validation in {unit} {history[unit][best]:.0f}")
        if any(better):
            mask = torch.tensor(better, device=self.ensemble.device)
            for name, x in self._of_model().items():
                self._chosen[name][mask] = x[mask]
        return messages

    def _test_chosen(self) -> None:
        """What the weights that validation chose give on the test part, to where they stand in the history."""
        more = self.ensemble.task.metric.more_is_better
        best = [best_at(history["validation"], more) if history["validation"] else None for history in self.history]
        if all(i is None or history["test"][i] is not None for i, history in zip(best, self.history, strict=True)):
            return  # they are the last ones
        values = self.ensemble.evaluate("test").tolist()
        for i, history, value in zip(best, self.history, values, strict=True):
            if i is not None:
                history["test"][i] = value

    def _of_model(self) -> dict[str, Tensor]:
        return {n: x for n, x in self.ensemble.tensors().items() if n == "weights" or n.startswith("buffers.")}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the rest of the training depends on: tensors, and what goes into JSON."""
        self._clock()
        tensors = {f"chosen.{name}": x for name, x in self._chosen.items()} | self.ensemble.tensors()
        about = {name: getattr(self, name) for name in (*_PLAIN, "paces")}
        return tensors | {"random": self.ensemble.generator.get_state()}, about

    def _clock(self) -> None:
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now

    def load(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        self.ensemble.load(tensors)
        for name, x in self._chosen.items():
            x.copy_(tensors[f"chosen.{name}"])
        self._random = tensors["random"]
        self._batches = []
        for name in _PLAIN:
            setattr(self, name, about[name])
        self.paces = list(about.get("paces", ()))  # of a version that kept none


_PLAIN = ("epoch", "batch", "step", "evaluated", "seen", "seconds", "history", "active", "failures")
