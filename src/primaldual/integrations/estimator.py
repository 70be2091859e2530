"""What classifier and regressor share: parameters, training, files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..base.devices import device_of
from ..base.packages import needed
from ..data import Preparation
from ..models import BankSizes, PatternSizes, SeriesSizes
from ..primal import Primal, Spec
from ..regression import Diagnosis, diagnose
from ..training import ModernRecipe, Recipe, Watch
from ..training.predictor import Predictor
from .cases import dataset
from .explanation import Explanation, explain
from .fitted import Course, Fitted, fit_modern, fit_paper
from .recipes import PAPER, Given, modern_recipe, paper_recipe
from .saved import (
    SavedEstimatorError,
    from_json,
    plain,
    read_estimator,
    read_history,
    read_metadata,
    to_json,
    write_estimator,
)

needed("aeon.base", "aeon", "primaldual.integrations.aeon")

from aeon.base import BaseCollectionEstimator  # noqa: E402
from aeon.utils.validation import check_n_jobs  # noqa: E402
from sklearn.utils import check_random_state  # type: ignore[import-untyped]  # noqa: E402

NOT_KEPT = ("callbacks",)
"""Parameters that a file does not have."""


class AttentionEstimator(BaseCollectionEstimator):
    """Its state is plain arrays and values."""

    _tags: ClassVar[dict[str, Any]] = {
        "X_inner_type": "np-list", "algorithm_type": "deeplearning", "capability:multivariate": True,
        "capability:unequal_length": True, "capability:missing_values": True, "capability:multithreading": True,
    }  # fmt: skip

    configs_: list[Spec]
    weights_: list[dict[str, np.ndarray]]
    shares_: list[float]
    history_: list[dict[str, list[float]]]
    preparation_: Preparation

    def __init__(
        self,
        mechanism: str | Primal | None = None,
        *,
        recipe: Given = None,
        n_members: int | None = None,
        time_limit: float | None = None,
        warm_start: bool = False,
        n_jobs: int = 1,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = None,
        verbose: bool = False,
        callbacks: Sequence[Watch] | None = None,
    ) -> None:
        self.mechanism = mechanism
        self.recipe = recipe
        self.n_members = n_members
        self.time_limit = time_limit
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.device = device
        self.verbose = verbose
        self.callbacks = callbacks
        super().__init__()

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to series and their labels or targets.

        Args:
            X: series [cases, channels, steps], or a list of arrays [channels, steps].
            y: [cases].
            sample_weight: [cases], at least 0: a series with the weight 2 counts as two, one with 0 is left out.
        """
        # the base class forgets all attributes without two underscores when a fit begins
        self._given__ = sample_weight, getattr(self, "_earlier", None) if self.warm_start else None
        try:
            return super().fit(X, y)
        finally:
            del self._given__

    def explain_prediction(self, series: np.ndarray, windows: int | None = None) -> Explanation:
        """What a prediction rests on: attention over time by head, and what each channel and window contribute.

        Args:
            series: one, [channels, steps] or [steps].
            windows: of each channel that are hidden in turn; None for as many as take little time.
        """
        self._check_is_fitted()
        one = np.atleast_2d(np.asarray(series, dtype=np.float64))
        if one.ndim != 2 or len(one) != len(self.preparation_.mean):
            channels = len(self.preparation_.mean)
            raise ValueError(f"series must be [{channels}, steps], as the channels of fit; got {list(one.shape)}")
        (checked,) = self._preprocess_collection([one], store_metadata=False)
        return explain(self._predictor(), checked.T, device_of(self.device), windows, check_n_jobs(self.n_jobs))

    def diagnose(self, X: Any, *, member: int = 0, epsilon: float = 0.1, top: int = 5) -> Diagnosis:
        """The regression behind every attention head of a member on these series: `primaldual.regression.diagnose`."""
        self._check_is_fitted()
        predictor = self._predictor()
        members = [i for i, config in enumerate(predictor.configs) if getattr(config, "layers", 0)]
        if not members:
            raise ValueError(
                f"{type(self).__name__}: no member has attention layers, as the recipe has banks alone; give a "
                f"mechanism, or n_members"
            )
        if not 0 <= member < len(members):
            raise ValueError(
                f"there are {len(members)} members with attention layers, the first of which is 0; got {member}"
            )
        series = self._preprocess_collection(X, store_metadata=False)
        split = predictor.prepared([np.asarray(one).T for one in series])
        return diagnose(predictor.model(members[member]), (split.x, split.padding), epsilon=epsilon, top=top)

    def save(self, path: str | Path) -> None:
        """Keep a fitted estimator in one safetensors file, which `primaldual predict` reads, too.

        A `random_state` that is a generator, `callbacks`, and what `warm_start` goes on from are not kept.
        """
        self._check_is_fitted()
        about = {
            "parameters": {
                name: to_json(value) for name, value in self.get_params(deep=False).items() if name not in NOT_KEPT
            },
            "history": self.history_, "metadata": {name: plain(value) for name, value in self.metadata_.items()},
        }  # fmt: skip
        if (calibration := getattr(self, "calibration_", None)) is not None:
            about["calibration"] = list(calibration)
        write_estimator(Path(path), type(self).__name__, self._predictor(), about)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A fitted estimator that predicts what the saved one did."""
        predictor, about = read_estimator(Path(path), cls.__name__)
        try:
            made = cls(**{name: from_json(value) for name, value in about["parameters"].items()})
            made._restore(predictor, about)
            made.history_ = read_history(about["history"])
            made.metadata_ = read_metadata(about["metadata"], len(predictor.preparation.mean))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SavedEstimatorError(f"{path} is damaged: {error}") from None
        made.is_fitted = True
        return made

    def _preprocess_collection(self, X: Any, store_metadata: bool = True) -> list[np.ndarray]:
        """As aeon's, which does not look for these."""
        name = type(self).__name__
        parts = X if isinstance(X, list) else [X]
        if not parts or any(np.size(part) == 0 for part in parts):
            raise ValueError(f"{name}: X is empty; at least one series is needed, and one step in every series")
        series = super()._preprocess_collection(X, store_metadata)
        if any(np.isinf(one).any() for one in series):
            raise ValueError(f"{name}: X contains infinity; only NaN stands for a missing value")
        return series

    def _train(
        self, X: Sequence[np.ndarray], y: Tensor, weights: Tensor | None, labels: Sequence[Any] = (),
        class_weights: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Fit banks and members, or the paper's models."""
        name, course, (_, earlier) = type(self).__name__, self._course(), self._given__
        recipe = modern_recipe(self.recipe, self.mechanism, plain(self.n_members), bool(labels))
        if recipe is None and (weights is not None or self.warm_start):
            what = "sample_weight" if weights is not None else "warm_start"
            raise ValueError(f"{name}: the paper's recipe has no {what}; leave it out, or the recipe")
        members = len(recipe.members) if recipe else plain(self.n_members) or 1
        seed = int(check_random_state(self.random_state).randint(2**31 - 1 - members))
        data, self.preparation_ = dataset(name, X, y, labels)
        found: Fitted
        if recipe is None:
            given = None if class_weights is None else torch.from_numpy(class_weights)
            mechanism = PAPER if self.mechanism is None else self.mechanism
            found = fit_paper(data, paper_recipe(self.recipe, data), mechanism, members, seed, course, given)
        else:
            if class_weights is not None:
                of_class = torch.from_numpy(class_weights)[y]
                weights = of_class if weights is None else weights * of_class
            model, seed = earlier or (None, seed)
            found = fit_modern(data, recipe, seed, course, weights, model)
            if self.warm_start:
                self._earlier = found.modern, seed
        if found.failures:
            warnings.warn(
                f"{len(found.failures)} of {members} members are left out: their loss is not finite", stacklevel=5
            )
        self.configs_, self.shares_, self.history_ = found.configs, found.shares, found.history
        self.weights_ = [{name: x.numpy() for name, x in of.items()} for of in found.weights]
        if labels:
            self.calibration_ = found.calibration

    def _course(self) -> Course:
        """How the training goes, of parameters that are looked at."""
        name, members, limit = type(self).__name__, plain(self.n_members), plain(self.time_limit)
        if members is not None and (not isinstance(members, int) or isinstance(members, bool) or members < 1):
            raise ValueError(f"{name}: n_members must be an integer of at least 1, or None; got {self.n_members!r}")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise ValueError(f"{name}: time_limit must be a positive number of seconds, or None; got {limit!r}")
        self._n_jobs = check_n_jobs(self.n_jobs)
        return Course(device_of(self.device), tuple(self.callbacks or ()), bool(self.verbose), self._n_jobs, limit)

    def _together(self, X: Sequence[np.ndarray]) -> np.ndarray:
        """Probabilities [cases, classes], or numbers [cases]."""
        predictor = self._predictor()
        series = [np.asarray(one).T for one in X]
        outputs = predictor.outputs(series, device_of(self.device), check_n_jobs(self.n_jobs))
        return predictor.together(outputs).numpy()

    def _predictor(self) -> Predictor:
        """What predicts, without the parameters of the fit."""
        weights = [{name: torch.from_numpy(a) for name, a in held.items()} for held in self.weights_]
        calibration = getattr(self, "calibration_", None)
        classes, target = self._outcomes()
        return Predictor(
            self.configs_, weights, self.preparation_, classes, target, {}, self.shares_,
            1.0 if calibration is None else calibration.temperature,
        )  # fmt: skip

    def _outcomes(self) -> tuple[np.ndarray | None, tuple[float, float]]:
        """The classes; and what predictions are multiplied by, and what is added then."""
        raise NotImplementedError

    def _restore(self, predictor: Predictor, about: Mapping[str, Any]) -> None:
        """The inverse of `_predictor`."""
        self.configs_, self.preparation_ = list(predictor.configs), predictor.preparation
        self.weights_ = [{name: x.numpy() for name, x in held.items()} for held in predictor.weights]
        self.shares_ = list(predictor.shares or [1 / len(self.configs_)] * len(self.configs_))

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        member = PatternSizes(d_model=8, heads=2, layers=1, feedforward=8, widths=(3, 5), tokens=8)
        modern = ModernRecipe(banks=(BankSizes(prototypes=32),), members=(member,), steps=4)
        sizes = SeriesSizes(d_model=8, heads=2, layers=1, feedforward=8)
        paper = Recipe(sizes, epochs=2, batch_size=8, validation=0.3, patience=1)
        return [
            {"recipe": modern, "device": "cpu"},
            {"recipe": paper, "mechanism": "softmax", "n_members": 2, "device": "cpu"},
        ]
