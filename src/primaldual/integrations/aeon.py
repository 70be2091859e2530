"""Estimators for aeon, and so for scikit-learn: fit series, predict labels or numbers.

Series are prepared as the paper's code bases do it: missing values interpolated, channels standardised by the training
series, shorter series padded. Series that are longer than every training series are cut to that length, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ..base.devices import device_of
from ..base.packages import needed
from ..data import Dataset, Preparation, Split, fill_gaps
from ..data.dataset import mean_and_std
from ..models import SeriesConfig, SeriesSizes
from ..primal import Primal
from ..training import Ensemble, Recipe, SeriesTask, Training, Watch, in_minutes, progress_bar
from ..training.predictor import Predictor
from .saved import SavedEstimatorError, from_json, plain, read_estimator, to_json, write_estimator

needed("aeon.regression", "aeon", "primaldual.integrations.aeon")

from aeon.base import BaseCollectionEstimator  # noqa: E402
from aeon.classification import BaseClassifier  # noqa: E402
from aeon.regression import BaseRegressor  # noqa: E402
from sklearn.utils import check_random_state  # type: ignore[import-untyped]  # noqa: E402
from sklearn.utils.class_weight import compute_class_weight  # type: ignore[import-untyped]  # noqa: E402

__all__ = ["AttentionClassifier", "AttentionRegressor"]

NOT_KEPT = ("callbacks",)
"""Parameters that a file does not have."""


class _AttentionEstimator(BaseCollectionEstimator):
    """What classifier and regressor share: parameters, training, files. Its state is plain arrays and values."""

    _tags: ClassVar[dict[str, Any]] = {
        "X_inner_type": "np-list", "algorithm_type": "deeplearning", "capability:multivariate": True,
        "capability:unequal_length": True, "capability:missing_values": True,
    }  # fmt: skip

    config_: SeriesConfig
    preparation_: Preparation
    weights_: list[dict[str, np.ndarray]]
    history_: list[dict[str, list[float]]]

    def __init__(
        self,
        mechanism: str | Primal = "bn+sh",
        *,
        encoder: str = "mvts",
        d_model: int = 128,
        heads: int = 8,
        layers: int = 3,
        feedforward: int = 256,
        dropout: float = 0.1,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 1e-3,
        validation: float = 0.0,
        patience: int = 0,
        n_members: int = 1,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = None,
        verbose: bool = False,
        callbacks: Sequence[Watch] | None = None,
    ) -> None:
        self.mechanism = mechanism
        self.encoder = encoder
        self.d_model = d_model
        self.heads = heads
        self.layers = layers
        self.feedforward = feedforward
        self.dropout = dropout
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation = validation
        self.patience = patience
        self.n_members = n_members
        self.random_state = random_state
        self.device = device
        self.verbose = verbose
        self.callbacks = callbacks
        super().__init__()

    def save(self, path: str | Path) -> None:
        """Keep a fitted estimator in one safetensors file, which `primaldual predict` reads, too.

        A `random_state` that is a generator, and `callbacks`, are not kept.
        """
        self._check_is_fitted()
        about = {
            "parameters": {
                name: to_json(value) for name, value in self.get_params(deep=False).items() if name not in NOT_KEPT
            },
            "history": self.history_, "metadata": {name: plain(value) for name, value in self.metadata_.items()},
        }  # fmt: skip
        write_estimator(Path(path), type(self).__name__, self._predictor(), about)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A fitted estimator that predicts what the saved one did."""
        predictor, about = read_estimator(Path(path), cls.__name__)
        try:
            made = cls(**{name: from_json(value) for name, value in about["parameters"].items()})
            made._restore(predictor)
            made.history_, made.metadata_ = _history(about["history"]), _metadata(about["metadata"], made.config_)
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
        self, X: Sequence[np.ndarray], y: Tensor, labels: Sequence[Any] = (), class_weights: np.ndarray | None = None
    ) -> None:
        """Fit all members at once."""
        if not isinstance(plain(self.n_members), int) or self.n_members < 1:
            raise ValueError(f"n_members must be an integer of at least 1, got {self.n_members!r}")
        series = [fill_gaps(np.asarray(one, dtype=np.float64).T) for one in X]
        found = Preparation.fit(series)
        if found.length < 2:
            raise ValueError(f"{type(self).__name__}: series of one step have no order; give longer ones")
        # a channel that is constant in training says nothing: it is not to explode when it is not in predict
        std = np.where(found.std > 1e-12 * np.abs(found.mean), found.std, 1.0)
        preparation = Preparation(found.mean, std, found.length)
        train = Split(*preparation.apply(series), y)
        data = Dataset(
            type(self).__name__, "classification" if labels else "regression", tuple(map(str, labels)), train,
            Split(train.x[:0], train.lengths[:0], y[:0]), torch.from_numpy(found.mean), torch.from_numpy(std),
            found.length,
        )  # fmt: skip
        first = int(check_random_state(self.random_state).randint(2**31 - 1 - self.n_members))
        device = self._device()
        with ExitStack() as stack:
            recipe = self._recipe(data)
            weights = None if class_weights is None else torch.from_numpy(class_weights)
            task = SeriesTask.of(data, self.mechanism, recipe, weights)
            ensemble = Ensemble(task, recipe, range(first, first + self.n_members), device)
            training = Training(ensemble)
            watch = [stack.enter_context(progress_bar(Console(stderr=True), data.name))] if self.verbose else []
            training.run([*watch, *(self.callbacks or ())])
            kept = [i for i, failure in enumerate(training.failures) if failure is None]
            if not kept:
                raise RuntimeError(f"{data.name}: {training.failures[0]}; lower the learning rate")
            if lost := self.n_members - len(kept):
                warnings.warn(
                    f"{lost} of {self.n_members} members are left out: their loss is not finite", stacklevel=5
                )
            models = [ensemble.model(i) for i in kept]
        self.config_, self.preparation_ = task.config, preparation
        self.weights_ = [{name: x.numpy() for name, x in model.state_dict().items()} for model in models]
        self.history_ = [training.history[i] for i in kept]

    def _recipe(self, data: Dataset) -> Recipe:
        names = ("encoder", "d_model", "heads", "layers", "feedforward", "dropout")
        recipe = Recipe(
            SeriesSizes(**{name: plain(getattr(self, name)) for name in names}),
            learning_rate=plain(self.learning_rate),
            validation=plain(self.validation),
            epochs=400 if data.classes else 100,
            # batches of 64 would be one step per epoch for many a set: too few in 40 epochs
            batch_size=min(64, max(8, len(data.train) // 8)) if self.batch_size is None else plain(self.batch_size),
            patience=plain(self.patience),
        )
        recipe = in_minutes(recipe)
        return recipe if self.epochs is None else replace(recipe, epochs=plain(self.epochs))

    def _device(self) -> torch.device:
        return device_of(self.device)

    def _outputs(self, X: Sequence[np.ndarray]) -> Tensor:
        """Of every member: scores [members, cases, classes], or numbers [members, cases]."""
        return self._predictor().outputs([np.asarray(one).T for one in X], self._device())

    def _predictor(self) -> Predictor:
        """What predicts, without the parameters of the fit."""
        weights = [{name: torch.from_numpy(a) for name, a in held.items()} for held in self.weights_]
        return Predictor([self.config_] * len(weights), weights, self.preparation_, *self._outcomes())

    def _outcomes(self) -> tuple[np.ndarray | None, tuple[float, float]]:
        """The classes; and what predictions are multiplied by, and what is added then."""
        raise NotImplementedError

    def _restore(self, predictor: Predictor) -> None:
        """The inverse of `_predictor`."""
        config = predictor.configs[0]
        assert isinstance(config, SeriesConfig)
        self.config_, self.preparation_ = config, predictor.preparation
        self.weights_ = [{name: x.numpy() for name, x in held.items()} for held in predictor.weights]

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        tiny: dict[str, Any] = {"d_model": 8, "heads": 2, "layers": 1, "feedforward": 8, "epochs": 2, "device": "cpu"}
        return [tiny, tiny | {"mechanism": "softmax", "n_members": 2, "validation": 0.3, "patience": 1}]


class AttentionClassifier(_AttentionEstimator, BaseClassifier):
    """A transformer that classifies time series, with any mechanism of the paper.

    Takes series of one or many channels, of unequal lengths, with missing values.

    Args:
        mechanism: a `Primal`, or the name of one (`primaldual.primal.mechanisms()`).
        encoder, d_model, heads, layers, feedforward, dropout, learning_rate: as in `Recipe`.
        epochs: how many; None for 40, on every device.
        batch_size: None for an eighth of the training series, from 8 to the paper's 64.
        validation: share of the training series, stratified, that is held out; the weights of the epoch that is best
            on it are kept. With 0 those of the last epoch.
        patience: with `validation`: epochs without a better one after which training stops; 0 for never.
        class_weight: "balanced", or a weight per label; labels that are not named weigh 1.
        n_members: so many models train at once, and their probabilities are averaged.
        random_state: of initial weights, batch order and dropout; the same integer gives the same model.
        device: such as "cuda"; None or "auto" for a GPU where there is one.
        verbose: whether to show a progress bar; off a terminal it is lines, on standard error.
        callbacks: called with a `primaldual.training.Progress` after every evaluation, such as `csv_log("fit.csv")` of
            `primaldual.training`; what one raises ends the fit. They are not kept in a file.

    Attributes after `fit`: `config_` of the model, `weights_` and `history_` of every member, `classes_`.

    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat(["low", "high"], 8)
    >>> X = rng.normal(size=(16, 2, 10)) + 2 * (y == "high")[:, None, None]
    >>> model = AttentionClassifier(layers=1, epochs=20, random_state=0, device="cpu")
    >>> model.fit(X, y).predict(X[[0, -1]]).tolist()
    ['low', 'high']
    """

    def __init__(
        self,
        mechanism: str | Primal = "bn+sh",
        *,
        encoder: str = "mvts",
        d_model: int = 128,
        heads: int = 8,
        layers: int = 3,
        feedforward: int = 256,
        dropout: float = 0.1,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 1e-3,
        validation: float = 0.0,
        patience: int = 0,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        n_members: int = 1,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = None,
        verbose: bool = False,
        callbacks: Sequence[Watch] | None = None,
    ) -> None:
        self.class_weight = class_weight
        super().__init__(
            mechanism, encoder=encoder, d_model=d_model, heads=heads, layers=layers, feedforward=feedforward,
            dropout=dropout, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, validation=validation,
            patience=patience, n_members=n_members, random_state=random_state, device=device, verbose=verbose,
            callbacks=callbacks,
        )  # fmt: skip

    def _fit(self, X: list[np.ndarray], y: np.ndarray) -> Self:
        weights = None
        if self.class_weight is not None:
            weights = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            if not (np.isfinite(weights) & (weights > 0)).all():
                raise ValueError(f"class_weight must be positive numbers, got {self.class_weight!r}")
        index = np.searchsorted(self.classes_, y).astype(np.int64)
        self._train(X, torch.from_numpy(index), self.classes_.tolist(), weights)
        return self

    def _predict_proba(self, X: list[np.ndarray]) -> np.ndarray:
        return self._outputs(X).softmax(-1).mean(0).numpy()

    def _predict(self, X: list[np.ndarray]) -> np.ndarray:
        return self.classes_[self._predict_proba(X).argmax(1)]

    def _outcomes(self) -> tuple[np.ndarray | None, tuple[float, float]]:
        return self.classes_, (1.0, 0.0)

    def _restore(self, predictor: Predictor) -> None:
        super()._restore(predictor)
        if predictor.classes is None:
            raise ValueError("it has no classes")
        self.classes_ = predictor.classes
        self.n_classes_ = len(self.classes_)
        self._class_dictionary = {label: i for i, label in enumerate(self.classes_)}


class AttentionRegressor(_AttentionEstimator, BaseRegressor):
    """A transformer that predicts a number from a time series, with any mechanism of the paper.

    Targets are standardised for training, so that their unit does not matter.

    Args:
        mechanism, encoder, d_model, heads, layers, feedforward, dropout, epochs, batch_size, learning_rate,
        validation, patience, random_state, device, verbose, callbacks: as in `AttentionClassifier`.
        n_members: so many models train at once, and their predictions are averaged; the squared error is then at most
            the mean of theirs.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(32, 1, 10))
    >>> y = 100 + 5 * X.mean((1, 2))
    >>> model = AttentionRegressor(d_model=16, heads=2, layers=1, epochs=30, random_state=0, device="cpu")
    >>> bool(model.fit(X, y).score(X, y) > 0.5)
    True
    """

    target_mean_: float
    target_std_: float

    def _fit(self, X: list[np.ndarray], y: np.ndarray) -> Self:
        self.target_mean_, self.target_std_ = mean_and_std(torch.from_numpy(y))
        self._train(X, torch.from_numpy((y - self.target_mean_) / self.target_std_).float())
        return self

    def _predict(self, X: list[np.ndarray]) -> np.ndarray:
        return self.target_mean_ + self.target_std_ * self._outputs(X).mean(0).numpy()

    def _outcomes(self) -> tuple[np.ndarray | None, tuple[float, float]]:
        return None, (self.target_std_, self.target_mean_)

    def _restore(self, predictor: Predictor) -> None:
        super()._restore(predictor)
        if predictor.classes is not None:
            raise ValueError("it has classes")
        self.target_std_, self.target_mean_ = predictor.target


def _history(given: Any) -> list[dict[str, list[float]]]:
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError(f"a history {given!r}")
    return given


def _metadata(given: Any, config: SeriesConfig) -> dict[str, Any]:
    """What aeon knows of the training series."""
    flags, counts = ("multivariate", "missing_values", "unequal_length"), ("n_cases", "n_channels", "n_timepoints")
    if not isinstance(given, dict) or set(given) != {*flags, *counts}:
        raise ValueError(f"metadata {given!r}")
    if not all(type(given[name]) is bool for name in flags) or given["n_channels"] != config.channels:
        raise ValueError(f"metadata {given!r}")
    if not all(type(given[name]) is int or (name == "n_timepoints" and given[name] is None) for name in counts):
        raise ValueError(f"metadata {given!r}")
    return given
