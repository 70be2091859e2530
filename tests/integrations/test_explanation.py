"""What a fitted estimator says of one prediction, and of its heads."""

from dataclasses import replace

import numpy as np
import pytest

from integrations.estimators import BOTH, ESTIMATORS, RECIPE, TINY, fitted, sines
from primaldual.integrations.aeon import AttentionClassifier, AttentionRegressor


@BOTH
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_attention_is_over_the_steps_of_the_series(kind, tiny):
    X, _ = sines()
    model = fitted(kind, **tiny | {"n_members": 2, "mechanism": "sh"})
    short = X[0][:, :9].copy()
    short[0, 3] = np.nan
    found = model.explain_prediction(short)
    assert [one.shape for one in found.attention] == [(1, 2, 9)] * 2
    for one in found.attention:
        np.testing.assert_allclose(one.sum(-1), 1.0)
    np.testing.assert_allclose(found.series[1], short[1], rtol=1e-5, atol=1e-6)
    assert found.predicted == pytest.approx(model.predict([short])[0]) if kind is AttentionRegressor else True


@pytest.mark.parametrize("regression", [False, True], ids=["classes", "numbers"])
def test_the_channel_and_the_window_that_decide_contribute(regression):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3, 24))
    y = np.arange(40) % 2
    X[:, 1, 8:16] += 3 * y[:, None]
    kind = AttentionRegressor if regression else AttentionClassifier
    model = kind(**TINY).fit(X, 10.0 * y + 0.01 * np.arange(40) if regression else y)
    one = X[np.flatnonzero(y)[0]]
    found = model.explain_prediction(one, windows=3)
    channel, step = np.unravel_index(found.contribution.argmax(), found.contribution.shape)
    assert channel == 1 and 8 <= step < 16 and found.channels.argmax() == 1
    hidden = one.copy()
    hidden[1] = X[:, 1].mean()
    before, after = (model.predict([x])[0] if regression else model.predict_proba([x])[0, 1] for x in (one, hidden))
    assert found.channels[1] == pytest.approx(before - after, abs=1e-4)
    if not regression:
        np.testing.assert_allclose(found.probabilities, model.predict_proba([one])[0])


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_explanation_is_drawn(kind, tmp_path):
    X, _ = sines()
    drawing = fitted(kind, n_members=2).explain_prediction(X[0]).plot(tmp_path / "why.png")
    assert (tmp_path / "why.png").read_bytes().startswith(b"\x89PNG")
    assert drawing.get_suptitle().startswith("Predicted: ")


def test_without_attention_there_is_what_contributes(tmp_path):
    found = fitted(recipe=replace(RECIPE, members=())).explain_prediction(sines()[0][0])
    assert found.attention == () and found.contribution.shape == (2, 12)
    found.plot(tmp_path / "why.png")


def test_one_series_of_the_right_channels_is_explained():
    model = fitted()
    with pytest.raises(ValueError, match=r"series must be \[2, steps\], as the channels of fit; got \[3, 12\]"):
        model.explain_prediction(np.zeros((3, 12)))
    with pytest.raises(ValueError, match="windows must be an integer of at least 1"):
        model.explain_prediction(np.zeros((2, 12)), windows=0)
    with pytest.raises(ValueError, match="not been fitted"):
        AttentionClassifier().explain_prediction(np.zeros((2, 12)))


@BOTH
def test_the_regression_behind_every_head_is_named(tiny):
    X, _ = sines()
    found = fitted(**tiny).diagnose(X[:2])
    assert [(row.layer, row.head) for row in found.rows] == [("layers.0.self_attn", 0), ("layers.0.self_attn", 1)]
    assert all(np.isfinite(row.log_C) for row in found.rows)
    with pytest.raises(ValueError, match="there are 1 members with attention layers, the first of which is 0; got 1"):
        fitted(**tiny).diagnose(X[:2], member=1)
