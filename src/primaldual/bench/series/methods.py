"""What is compared: classes of estimators, by a short name or by their dotted path."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ...base.packages import needed
from ...base.suggestions import did_you_mean
from ...data.ts import Kind

OURS = "attention"
"""The name of the library's own estimators, with all defaults."""


@dataclass(frozen=True)
class Method:
    """A name, and the classes that it stands for.

    Args:
        classifier, regressor: dotted paths; None where there is none for sets of that kind.
        settings: of the constructor, beside its defaults.
    """

    name: str
    classifier: str | None
    regressor: str | None
    settings: tuple[tuple[str, Any], ...] = ()

    def path(self, kind: Kind) -> str | None:
        """The class for sets of a kind."""
        return self.classifier if kind == "classification" else self.regressor


def _both(name: str, path: str, **settings: Any) -> Method:
    """A class that has the same name in the package of classifiers and in that of regressors."""
    classifier = path.format(kind="classification", Class="Classifier")
    return Method(name, classifier, path.format(kind="regression", Class="Regressor"), tuple(settings.items()))


_CONVOLUTION = "aeon.{kind}.convolution_based."

METHODS = {
    one.name: one
    for one in (
        _both(OURS, "primaldual.integrations.aeon.Attention{Class}"),
        _both("minirocket", _CONVOLUTION + "MiniRocket{Class}"),
        _both("rocket", _CONVOLUTION + "Rocket{Class}"),
        _both("multirocket", _CONVOLUTION + "MultiRocket{Class}"),
        _both("hydra", _CONVOLUTION + "Hydra{Class}"),
        _both("multirocket-hydra", _CONVOLUTION + "MultiRocketHydra{Class}"),
        _both("quant", "aeon.{kind}.interval_based.QUANT{Class}"),
        _both("rf", "sklearn.ensemble.RandomForest{Class}"),
        _both("dtw", "aeon.{kind}.distance_based.KNeighborsTimeSeries{Class}", distance="dtw", n_neighbors=1),
    )
}
"""By name, our own first."""


def method(name: str) -> Method:
    """A method of `METHODS`, or a class by its dotted path.

    >>> method("sklearn.dummy.DummyRegressor")
    Method(name='DummyRegressor', classifier=None, regressor='sklearn.dummy.DummyRegressor', settings=())
    """
    if name in METHODS:
        return METHODS[name]
    if not re.fullmatch(r"\w+(\.\w+)+", name):
        raise ValueError(
            f"a method is one of {', '.join(METHODS)}, or a class by its dotted path; got {name!r}"
            f"{did_you_mean(name, METHODS)}"
        )
    is_classifier, is_regressor = kinds(class_of(name))
    if not is_classifier and not is_regressor:
        raise ValueError(f"{name} is neither a classifier nor a regressor of scikit-learn or aeon")
    return Method(name.rpartition(".")[2], name if is_classifier else None, name if is_regressor else None)


@cache
def class_of(path: str) -> type:
    """The class at a dotted path."""
    module, _, name = path.rpartition(".")
    top = module.partition(".")[0]
    try:
        found = getattr(needed(module, "scikit-learn" if top == "sklearn" else top, f"the class {path}"), name)
    except (AttributeError, ImportError) as error:
        raise ValueError(f"there is no class {path}: {error}") from None
    if not inspect.isclass(found):
        raise ValueError(f"{path} is not a class")
    return found


def kinds(cls: type) -> tuple[bool, bool]:
    """Whether a class is a classifier, and whether it is a regressor."""
    base = import_module("sklearn.base")
    return issubclass(cls, base.ClassifierMixin), issubclass(cls, base.RegressorMixin)


def is_seeded(path: str) -> bool:
    """Whether another seed may give another result."""
    return "random_state" in inspect.signature(class_of(path)).parameters


def build(path: str, settings: dict[str, Any], seed: int, n_jobs: int) -> Any:
    """An estimator with this seed and so many threads, as far as it takes them."""
    cls = class_of(path)
    known = inspect.signature(cls).parameters
    common = {"random_state": seed, "n_jobs": n_jobs}
    return cls(**{name: value for name, value in common.items() if name in known} | settings)


NOT_RESULTS = ("random_state", "n_jobs", "verbose")
"""Parameters that the name of a record does not have: seeds are named otherwise, and the others change no result."""


@cache
def stated(path: str, settings: tuple[tuple[str, Any], ...]) -> dict[str, str]:
    """All parameters of an estimator as text: what is recorded with other defaults is another method."""
    parameters = build(path, dict(settings), 0, 1).get_params(deep=False)
    return {
        name: re.sub(" at 0x[0-9a-f]+", "", repr(value))
        for name, value in sorted(parameters.items())
        if name not in NOT_RESULTS
    }
