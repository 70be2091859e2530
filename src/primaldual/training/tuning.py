"""β and scales chosen on a share of the training set that is held out; the test set takes no part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..base.leases import BusyError, holding
from ..base.packages import needed
from ..data import Dataset
from ..models import SeriesSizes
from ..primal import BatchNorm, InputMap, Pooled, Primal, Recenter, Sparse, TrainingSet, as_primal
from .batches import mix
from .recipe import Recipe
from .record import key
from .run import train
from .series import series_task
from .series_recipe import series_recipe

VALIDATION = 0.2
COARSEST = (1, 2, 4, 8, 16)
BETAS = (0.0, 1.2)
"""What the paper's own choices lie in."""


@dataclass(frozen=True)
class Tuned:
    """The best of the trials: its mechanism, its settings, and the mean over seeds of its best validation metric."""

    primal: Primal
    settings: dict[str, Any]
    value: float
    trials: int


def tune(
    data: Dataset,
    mechanism: str | Primal,
    recipe: Recipe | None = None,
    seeds: Sequence[int] = (0,),
    *,
    folder: str | Path,
    trials: int = 20,
    device: torch.device | str = "cpu",
    watch: Callable[[int, dict[str, Any], float], None] | None = None,
) -> Tuned:
    """Search β and the scales of a mechanism with Optuna.

    Trials are kept in `tune.sqlite3`, and their runs beside it: a search that was interrupted goes on.

    Args:
        data, mechanism, recipe, seeds, device: as in `train`; `recipe.validation` is 0.2 unless it is set.
        folder: for the trials.
        trials: how many are complete in the end, those of earlier calls included.
        watch: called after every trial with its number, settings and value.
    """
    optuna = needed("optuna", "optuna", "tuning")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    primal, recipe = as_primal(mechanism), recipe or series_recipe(data.kind)
    recipe = replace(recipe, validation=recipe.validation or VALIDATION)
    if not tunable(primal):
        raise ValueError(f"there is nothing to tune in {primal!r}: it has neither a fixed β nor scales")
    place = Path(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(holding([place / "tune.lock"]))
        except BusyError as error:
            raise ValueError(f"{error}: a search is under way in this folder; wait for it, or take another") from None
        return _search(data, primal, recipe, seeds, place, trials, device, watch)


def _search(
    data: Dataset, primal: Primal, recipe: Recipe, seeds: Sequence[int], place: Path, trials: int,
    device: torch.device | str, watch: Callable[[int, dict[str, Any], float], None] | None,
) -> Tuned:  # fmt: skip
    """In a folder that no other process searches in."""
    optuna, (task, recipe) = import_module("optuna"), series_task(data, primal, recipe)
    assert isinstance(recipe.model, SeriesSizes)
    heads = recipe.model.heads
    study = optuna.create_study(
        storage=f"sqlite:///{(place / 'tune.sqlite3').as_posix()}", study_name=key(task, recipe, *seeds),
        direction="maximize" if data.classes else "minimize", load_if_exists=True,
    )  # fmt: skip
    if not study.trials:
        study.enqueue_trial({name: 1.0 if name == "beta" else 8 for name in tunable(primal)})
    states = optuna.trial.TrialState
    for trial in _in_state(study, states.RUNNING):  # interrupted: again from its checkpoint
        study.enqueue_trial(trial.params)
        study.tell(trial.number, state=states.FAIL)

    while len(complete := _in_state(study, states.COMPLETE)) < trials:
        begun = len(study.trials) - len(_in_state(study, states.FAIL))
        if begun >= 2 * trials + 10:
            break
        study.sampler = optuna.samplers.TPESampler(seed=mix(2, begun) % 2**32)
        trial = study.ask()
        given: dict[str, Any] = {}
        if "beta" in tunable(primal):
            given["beta"] = trial.suggest_float("beta", *BETAS, step=0.05)
        if "coarsest" in tunable(primal):
            given["coarsest"] = trial.suggest_categorical("coarsest", COARSEST)
        value = score(data, with_settings(primal, heads, **given), recipe, seeds, folder=place, device=device)
        state = states.PRUNED if value is None else states.COMPLETE
        study.tell(trial, value, state, skip_if_finished=True)
        if watch and value is not None:
            watch(trial.number, given, value)
    if not complete:
        raise RuntimeError("no trial ended with a finite loss; lower the learning rate")
    best = study.best_trial
    return Tuned(with_settings(primal, heads, **best.params), best.params, best.value, len(complete))


def score(
    data: Dataset, primal: Primal, recipe: Recipe, seeds: Sequence[int], *, folder: Path | None = None,
    device: torch.device | str = "cpu",
) -> float | None:  # fmt: skip
    """The mean over seeds of the best validation metric; None when a member failed."""
    records = train(data, primal, recipe, seeds, folder=folder, device=device)
    if any(record.failure for record in records):
        return None
    best = max if data.classes else min
    return fmean(best(record.history["validation"]) for record in records)


def tunable(primal: Primal) -> tuple[str, ...]:
    """What a search can vary: "beta", "coarsest"."""
    centred = any(isinstance(m, Recenter | BatchNorm) and not m.learnable for m in primal.inputs)
    names = {"beta": centred, "coarsest": _pooled(primal.training_set) is not None}
    return tuple(name for name, there in names.items() if there)


def with_settings(primal: Primal, heads: int, beta: float | None = None, coarsest: int | None = None) -> Primal:
    """The same mechanism with another β, or with scales from 1 to the coarsest, as many heads at each as can be.

    >>> with_settings(as_primal("sh"), 8, coarsest=4).training_set.scales
    (1, 1, 1, 2, 2, 2, 4, 4)
    """

    def map_of(map_: InputMap) -> InputMap:
        return replace(map_, beta=beta) if isinstance(map_, Recenter | BatchNorm) and beta is not None else map_

    chosen = primal.training_set
    if coarsest is not None:
        levels = coarsest.bit_length()
        scales = tuple(2 ** (head * levels // heads) for head in range(heads))
        pooled = _pooled(chosen)
        assert pooled is not None
        pooled = replace(pooled, scales=scales)
        chosen = replace(chosen, over=pooled) if isinstance(chosen, Sparse) else pooled
    return replace(primal, inputs=tuple(map_of(m) for m in primal.inputs), training_set=chosen)


def _pooled(training_set: TrainingSet) -> Pooled | None:
    inner = training_set.over if isinstance(training_set, Sparse) else training_set
    return inner if isinstance(inner, Pooled) else None


def _in_state(study: Any, state: Any) -> list[Any]:
    return study.get_trials(deepcopy=False, states=(state,))
