"""Fitting the recipe for people: banks first, then members, side by side, and all of it within a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from ..base.threads import on_threads, side_by_side
from ..data import Dataset, Split
from ..models import BankSizes, PatternSizes
from .calibration import Calibration, calibrate
from .ensemble import Ensemble
from .loop import Training
from .modern import LEAST_STEPS, ModernRecipe
from .modern_model import FittedPart, ModernModel, Part, said, together
from .parts import hold_out
from .patterns import PatternTask
from .progress import Progress, Watch
from .solving import solved

PROBED = 3
"""Steps that tell how long one takes, where time is limited."""
SPENT = 0.8
"""Of the time that is left: the rest is for what is around the steps, and for steps that take longer."""
USEFUL = 100
"""Steps of a member that others have to wait for where time is short: one is worth more than many that have begun."""
NEARLY = 0.7
"""Of a member's steps: when so many are done it is kept although time is over."""


def fit(
    data: Dataset, recipe: ModernRecipe, seed: int, device: torch.device | str = "cpu", watch: Sequence[Watch] = (), *,
    overall: Sequence[Watch] = (), weights: Tensor | None = None, jobs: int = 1, seconds: float | None = None,
    before: ModernModel | None = None,
) -> ModernModel:  # fmt: skip
    """Train on the training series of a set; those of a regression have standardised targets.

    Every part is fitted by one thread of a CPU, so that nothing depends on how many of them are side by side.

    Args:
        data: the set.
        recipe: what is fitted.
        seed: of the first bank and member; the others have those that follow.
        device: where.
        watch: called after every epoch of a member.
        overall: called when a part is done, and on the way.
        weights: [cases], positive.
        jobs: how many parts are fitted side by side on a CPU.
        seconds: after which there are no more parts. Members share what banks leave of it, in as many steps as fit, and
            where it is little there are fewer of them; there is one bank, or one member as far as it came, in any case.
        before: what an earlier call found: of its parts those are kept that are to be fitted again, and members that
            are to have more steps go on.
    """
    fitting = _Fitting(data, recipe, torch.device(device), watch, overall, weights, jobs, seconds, before)
    banks = [Part(i, sizes, seed + i) for i, sizes in enumerate(recipe.banks)]
    members = [Part(i, sizes, seed + i) for i, sizes in enumerate(recipe.members)]
    if members and fitting.held is not None:
        members.append(Part(0, recipe.members[0], seed, calibrates=True))
    found = fitting.all(banks, members)
    model = ModernModel(found, recipe, bool(data.classes), None, tuple(fitting.failures))
    if not model.banks and not model.members:
        raise RuntimeError(f"{data.name}: {'; '.join(fitting.failures)}; lower the learning rate")
    return replace(model, calibration=fitting.calibration(model))


class _TimeIsOverError(Exception):
    """Ends a member."""


class _Fitting:
    """What the parts of one call share."""

    def __init__(
        self, data: Dataset, recipe: ModernRecipe, device: torch.device, watch: Sequence[Watch],
        overall: Sequence[Watch], weights: Tensor | None, jobs: int, seconds: float | None, before: ModernModel | None,
    ) -> None:  # fmt: skip
        self.data, self.recipe, self.device = data, recipe, device
        self.watch, self.overall = watch, overall
        self.weights = None if weights is None else weights / weights.mean()
        self.jobs = jobs if device.type == "cpu" else 1
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.before = {one.part: one for one in before.fitted} if before else {}
        self.members_go_on = before is not None and _trains_alike(before.recipe, recipe)
        self.held = _held_out(data, recipe.calibration)
        self.failures: list[str] = []
        self.lock = Lock()
        self.done: dict[Part, float] = {}  # the share of each part
        self.count, self.left, self.any = 0, 0, False

    def all(self, banks: list[Part], members: list[Part]) -> list[FittedPart]:
        """Every part for which there is time."""
        self.count, self.left = len(banks) + len(members), len(members)
        found = []
        for parts, do in ((banks, self.bank), (members, self.member)):
            found += [one for one in side_by_side(do, parts, self.jobs) if one is not None]
        return found

    def bank(self, part: Part) -> FittedPart | None:
        assert isinstance(part.sizes, BankSizes)
        if self.any and time.monotonic() > self.end:
            return None
        one = self.before.get(part)
        if one is None or one.held_out is None or len(one.held_out) != len(self.data.train):
            with self._threads():
                model, held_out = solved(self.data, part.sizes, part.seed, self.device, self.weights)
            one = FittedPart(part, model.cpu(), held_out=held_out)
        self.any = True
        self._tell(part, 1.0)
        return one

    def member(self, part: Part) -> FittedPart | None:
        with self._threads():
            return self._member(part)

    def _member(self, part: Part) -> FittedPart | None:
        sizes, recipe, data = part.sizes, self.recipe, self.data
        assert isinstance(sizes, PatternSizes)
        weights, held = self.weights, None
        if part.calibrates:
            assert self.held is not None
            rows, held = self.held
            data = replace(data, train=_of(data.train, rows), test=_of(data.train, held))
            weights = None if weights is None else weights[rows]
        training = recipe.training(data, sizes)
        wanted = max(LEAST_STEPS, training.end // 2) if part.calibrates else training.end
        train = replace(data, test=_of(data.train, torch.arange(0)))
        task = PatternTask(train, recipe.mechanism, sizes, recipe.augmentation, recipe.smoothing, weights)
        one = self.before.get(part) if self.members_go_on else None
        if one is not None and one.model.config != task.config:
            one = None
        lacking = wanted - (one.steps if one else 0)
        if one is None or lacking > 0:
            steps = self._affordable(task, sizes, lacking, part)
            if steps < min(LEAST_STEPS, lacking) and self.any:
                return one
            run = Training(Ensemble(task, recipe.of_steps(max(1, steps), data, sizes), [part.seed], self.device))
            if one is not None:
                run.ensemble.start_from(0, one.model.state_dict())
            try:
                run.run([self._watcher(part)])
            except _TimeIsOverError:
                if self.any and run.step < NEARLY * steps:
                    return one
            if run.failures[0] is not None:
                if not part.calibrates:
                    self.failures.append(run.failures[0])
                return None
            total = run.step + (one.steps if one else 0)
            one = FittedPart(part, run.ensemble.model(0), total, run.history[0])
        if held is not None:
            one = replace(one, held_out=said(one.model, data.test, self.device, True))
        self.any = self.any or not part.calibrates
        self._tell(part, 1.0)
        return one

    def _affordable(self, task: PatternTask, sizes: PatternSizes, steps: int, part: Part) -> int:
        """As many of these steps as there is time for, when members that are left have their share."""
        with self.lock:
            rounds = math.ceil(self.left / self.jobs)
            self.left -= 1
        if self.end == math.inf:
            return steps
        if time.monotonic() > self.end and self.any:
            return 0
        recipe = self.recipe.of_steps(PROBED, task.dataset, sizes)
        run = Training(Ensemble(task, recipe, [part.seed], self.device))
        probed = time.monotonic()
        run.run()
        pace = (time.monotonic() - probed) / PROBED
        whole = int(SPENT * max(0.0, self.end - time.monotonic()) / pace)
        return min(steps, max(whole // rounds, min(whole, USEFUL)))

    def calibration(self, model: ModernModel) -> Calibration | None:
        """By what banks say of cases that they leave out, and one member of those that it left out."""
        if not model.classifies:
            return None
        y, weights = self.data.train.y.cpu(), self.weights
        parts = {}
        if model.banks:
            parts["bank"] = torch.stack([one.held_out for one in model.banks if one.held_out is not None]).mean(0)
        if model.members:
            twins = [one.held_out for one in model.fitted if one.part.calibrates and one.held_out is not None]
            if not twins or self.held is None:
                return None
            _, held = self.held
            parts = {name: x[held] for name, x in parts.items()} | {"members": twins[0]}
            y, weights = y[held], None if weights is None else weights[held]
        return calibrate(together(parts, self.recipe.share), y, weights)

    def _threads(self) -> AbstractContextManager[None]:
        return on_threads(1) if self.device.type == "cpu" else nullcontext()

    def _watcher(self, part: Part) -> Watch:
        def watch(progress: Progress) -> None:
            with self.lock:
                for one in () if part.calibrates else self.watch:
                    one(progress)
            self._tell(part, progress.done / progress.total, progress.values)
            if time.monotonic() > self.end and progress.done < progress.total:
                raise _TimeIsOverError

        return watch

    def _tell(self, part: Part, share: float, values: dict[str, tuple[float, ...]] | None = None) -> None:
        with self.lock:
            self.done[part] = share
            known = values if share >= 1.0 and values else {}
            progress = Progress(sum(self.done.values()), self.count, (part.seed,), known, unit="part")
            for one in self.overall:
                one(progress)


def _of(split: Split, rows: Tensor) -> Split:
    return Split(split.x[rows], split.lengths[rows], split.y[rows])


def _held_out(data: Dataset, share: float) -> tuple[Tensor, Tensor] | None:
    """Rows to train on and to calibrate on; None where there are none for the latter."""
    y = data.train.y.cpu()
    if not data.classes or all(round(share * int(count)) == 0 for count in y.bincount()):
        return None
    return hold_out(data.name, len(y), y, share)


def _trains_alike(before: ModernRecipe, now: ModernRecipe) -> bool:
    """Whether members of a recipe go on in another: it may have more of them, more steps, and other banks."""
    free = ("banks", "members", "share", "steps", "passes", "work")
    first, second = (
        {name: x for name, x in one.to_dict().items() if name not in free} for one in (before, now)
    )  # fmt: skip
    return first == second
