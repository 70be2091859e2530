"""Small estimators, and series that they can tell apart."""

import numpy as np
import pytest

pytest.importorskip("aeon")

from primaldual.integrations.aeon import AttentionClassifier, AttentionRegressor
from primaldual.models import BankSizes, PatternSizes, SeriesSizes
from primaldual.training import ModernRecipe, Recipe

MEMBER = PatternSizes(widths=(3, 5), tokens=8, d_model=8, heads=2, layers=1, feedforward=8)
RECIPE = ModernRecipe(banks=(BankSizes(prototypes=64),), members=(MEMBER,), steps=20, batch_size=8, learning_rate=5e-3)
TINY = {"recipe": RECIPE, "random_state": 0, "device": "cpu"}
SIZES = SeriesSizes(d_model=16, heads=2, layers=1, feedforward=16)
PAPER = TINY | {"recipe": Recipe(SIZES, epochs=4, batch_size=8)}
BOTH = pytest.mark.parametrize("tiny", [TINY, PAPER], ids=["modern", "paper"])
ESTIMATORS = [AttentionClassifier, AttentionRegressor]


def sines(cases: int = 24, channels: int = 2, length: int = 12, *, regression: bool = False, seed: int = 0):
    """Noisy sines whose frequency is the class, or the target."""
    rng = np.random.default_rng(seed)
    drawn = rng.uniform(0, 2, cases)
    drawn[:2] = 0.2, 1.2
    y = drawn if regression else drawn.astype(int)
    steps = np.arange(length) * (0.3 + y[:, None, None]) + np.arange(channels)[:, None]
    X = np.sin(steps) + 0.1 * rng.normal(size=(cases, channels, length))
    return X, (50 + 10 * y if regression else np.array(["slow", "fast"])[y])


def fitted(kind=AttentionClassifier, **changes):
    X, y = sines(regression=kind is AttentionRegressor)
    return kind(**TINY | changes).fit(X, y)


def outputs(model, X):
    return model.predict_proba(X) if hasattr(model, "predict_proba") else model.predict(X)
