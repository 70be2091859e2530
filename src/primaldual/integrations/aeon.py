"""Estimators for aeon, and so for scikit-learn: fit series, predict labels or numbers.

Missing values are interpolated, channels standardised by the training series, shorter series padded. Series that are
longer than every training series are cut to that length, with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch

from ..base.packages import needed
from ..data.dataset import mean_and_std
from ..primal import Primal
from ..training import Watch
from ..training.calibration import Calibration
from ..training.predictor import Predictor
from .cases import weighed
from .recipes import Given

needed("aeon.regression", "aeon", "primaldual.integrations.aeon")

from aeon.classification import BaseClassifier  # noqa: E402
from aeon.regression import BaseRegressor  # noqa: E402
from sklearn.utils.class_weight import compute_class_weight  # type: ignore[import-untyped]  # noqa: E402

from .estimator import AttentionEstimator  # noqa: E402

__all__ = ["AttentionClassifier", "AttentionRegressor"]


class AttentionClassifier(AttentionEstimator, BaseClassifier):
    """Classifies time series by attention: to prototypes with solved values, and between the steps of a series.

    A bank of prototypes is fitted in closed form, a few small transformers by gradient descent, and their probabilities
    are averaged and calibrated. Takes series of one or many channels, of unequal lengths, with missing values.

    Args:
        mechanism: of the transformers' attention: a `Primal`, or the name of one (`primaldual.primal.mechanisms()`);
            None for the recipe's own, which is "bn+sh" for the paper's.
        recipe: a `ModernRecipe`, which has all settings; None or "modern" for its defaults. The paper's transformers
            are trained by "paper", or a `Recipe` with `SeriesSizes`.
        n_members: so many transformers, with the recipe's sizes in turn; None for as many as the recipe has (one, of
            the paper's).
        class_weight: "balanced", or a weight per label; labels that are not named weigh 1.
        time_limit: seconds for `fit`. Banks come first, then members, in as many steps as there is time for; there is
            one of either in any case.
        warm_start: whether a second `fit`, on the same series, keeps what the first one found: there may be more
            members, and those that are to have more steps, or were cut by `time_limit`, go on.
        n_jobs: how many banks or members are fitted side by side on a CPU, each by one thread; -1 for as many as there
            are cores. The result does not depend on it. The paper's members train as one, by torch's threads.
        random_state: of all that is drawn; the same integer gives the same model.
        device: such as "cuda"; None or "auto" for a GPU where there is one.
        verbose: whether to show progress: a bar on a terminal, lines elsewhere, on standard error.
        callbacks: called with a `primaldual.training.Progress` after every epoch of a member, such as
            `csv_log("fit.csv")` of `primaldual.training`; what one raises ends the fit. They are not kept in a file.

    Attributes after `fit`: `configs_`, `weights_`, `shares_` and `history_` of every bank and then every member;
    `calibration_`, with the temperature of the probabilities and the log loss of held-out series without and with it;
    `classes_`.

    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat(["low", "high"], 8)
    >>> X = rng.normal(size=(16, 2, 10)) + 2 * (y == "high")[:, None, None]
    >>> model = AttentionClassifier(random_state=0, device="cpu", time_limit=1)
    >>> model.fit(X, y).predict(X[[0, -1]]).tolist()
    ['low', 'high']
    """

    calibration_: Calibration | None

    def __init__(
        self,
        mechanism: str | Primal | None = None,
        *,
        recipe: Given = None,
        n_members: int | None = None,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        time_limit: float | None = None,
        warm_start: bool = False,
        n_jobs: int = 1,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = None,
        verbose: bool = False,
        callbacks: Sequence[Watch] | None = None,
    ) -> None:
        self.class_weight = class_weight
        super().__init__(
            mechanism, recipe=recipe, n_members=n_members, time_limit=time_limit, warm_start=warm_start, n_jobs=n_jobs,
            random_state=random_state, device=device, verbose=verbose, callbacks=callbacks,
        )  # fmt: skip

    def _fit(self, X: list[np.ndarray], y: np.ndarray) -> Self:
        series, y, weights = weighed(X, y, self._given__[0])
        of_class = None
        if self.class_weight is not None:
            of_class = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            if not (np.isfinite(of_class) & (of_class > 0)).all():
                raise ValueError(f"class_weight must be positive numbers, got {self.class_weight!r}")
        index = np.searchsorted(self.classes_, y).astype(np.int64)
        self._train(series, torch.from_numpy(index), weights, self.classes_.tolist(), of_class)
        return self

    def _predict_proba(self, X: list[np.ndarray]) -> np.ndarray:
        return self._together(X)

    def _predict(self, X: list[np.ndarray]) -> np.ndarray:
        return self.classes_[self._predict_proba(X).argmax(1)]

    def _outcomes(self) -> tuple[np.ndarray | None, tuple[float, float]]:
        return self.classes_, (1.0, 0.0)

    def _restore(self, predictor: Predictor, about: Mapping[str, Any]) -> None:
        super()._restore(predictor, about)
        if predictor.classes is None:
            raise ValueError("it has no classes")
        self.classes_ = predictor.classes
        self.n_classes_ = len(self.classes_)
        self._class_dictionary = {label: i for i, label in enumerate(self.classes_)}
        given = about.get("calibration")
        self.calibration_ = None if given is None else Calibration(*given)
        if given is not None and given[0] != predictor.temperature:
            raise ValueError(f"a calibration of {given!r}")


class AttentionRegressor(AttentionEstimator, BaseRegressor):
    """Predicts a number from a time series by attention, as `AttentionClassifier` does a class.

    Targets are standardised for training, so that their unit does not matter. Unless a mechanism or a number of members
    is given, there are banks alone: transformers predict numbers with a larger error, and take longer.

    Args:
        mechanism, recipe, n_members, time_limit, warm_start, n_jobs, random_state, device, verbose, callbacks: as in
            `AttentionClassifier`.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(32, 1, 10))
    >>> y = 100 + 5 * X.mean((1, 2))
    >>> model = AttentionRegressor(random_state=0, device="cpu", time_limit=1)
    >>> bool(model.fit(X, y).score(X, y) > 0.5)
    True
    """

    target_mean_: float
    target_std_: float

    def _fit(self, X: list[np.ndarray], y: np.ndarray) -> Self:
        series, y, weights = weighed(X, y, self._given__[0])
        self.target_mean_, self.target_std_ = mean_and_std(torch.from_numpy(y))
        self._train(series, torch.from_numpy((y - self.target_mean_) / self.target_std_).float(), weights)
        return self

    def _predict(self, X: list[np.ndarray]) -> np.ndarray:
        return self._together(X)

    def _outcomes(self) -> tuple[np.ndarray | None, tuple[float, float]]:
        return None, (self.target_std_, self.target_mean_)

    def _restore(self, predictor: Predictor, about: Mapping[str, Any]) -> None:
        super()._restore(predictor, about)
        if predictor.classes is not None:
            raise ValueError("it has classes")
        self.target_std_, self.target_mean_ = predictor.target
