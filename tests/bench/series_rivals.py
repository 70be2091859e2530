"""Estimators that do what a test needs; found by their dotted path, in the processes of fits, too."""

import os
import signal
import time
from pathlib import Path

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin


class Nearest(ClassifierMixin, BaseEstimator):
    """1-NN, without a random state and without probabilities."""

    def fit(self, X, y):
        self.X_, self.y_ = X, y
        return self

    def predict(self, X):
        return self.y_[((X[:, None] - self.X_) ** 2).sum(-1).argmin(1)]


class Guess(ClassifierMixin, BaseEstimator):
    """The share of every class, and one class drawn by the seed."""

    def __init__(self, random_state=None, n_jobs=None, verbose=0):
        self.random_state, self.n_jobs, self.verbose = random_state, n_jobs, verbose

    def fit(self, X, y):
        self.classes_, counts = np.unique(y, return_counts=True)
        self.share_ = counts / counts.sum()
        return self

    def predict(self, X):
        return np.repeat(self.classes_[self.random_state % len(self.classes_)], len(X))

    def predict_proba(self, X):
        return np.tile(self.share_, (len(X), 1))


class Mean(RegressorMixin, BaseEstimator):
    """The mean of the targets."""

    def fit(self, X, y):
        self.mean_ = y.mean()
        return self

    def predict(self, X):
        return np.full(len(X), self.mean_)


class Broken(Nearest):
    """Cannot be fitted."""

    def fit(self, X, y):
        raise LookupError("it has no screws")


class NotFinite(Mean):
    """Predicts what no record can hold."""

    def predict(self, X):
        return np.full(len(X), np.nan)


class Killed(Nearest):
    """As where memory ends."""

    def fit(self, X, y):
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Greedy(Nearest):
    """Takes a gibibyte."""

    def fit(self, X, y):
        np.empty(1 << 27)
        return super().fit(X, y)


class Slow(Nearest):
    """Longer than any limit of a test."""

    def __init__(self, random_state=None):
        self.random_state = random_state

    def fit(self, X, y):
        time.sleep(20)


class Waits(Nearest):
    """Writes its process into a file, and goes on once it is taken away; where there is none it does not wait."""

    def fit(self, X, y):
        if (path := os.environ.get("PRIMALDUAL_TEST_WAIT")) and (file := Path(path)).exists():
            file.write_text(str(os.getpid()))
            while file.exists():
                time.sleep(0.02)
        return super().fit(X, y)


class Tagged(Nearest):
    """As aeon's: it says what series it takes."""

    takes = ()

    @classmethod
    def get_class_tag(cls, name, tag_value_default=None):
        return name.removeprefix("capability:") in cls.takes


class TakesAll(Tagged):
    """Unequal lengths and missing values."""

    takes = "unequal_length", "missing_values"


class TakesUnequal(Tagged):
    """Unequal lengths without gaps."""

    takes = ("unequal_length",)
