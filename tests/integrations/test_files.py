"""Estimators in files: what comes back predicts the same, and what is damaged is refused."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone

from integrations.estimators import BOTH, ESTIMATORS, PAPER, TINY, fitted, outputs, sines
from primaldual.base.tensors import read, write
from primaldual.integrations.aeon import AttentionClassifier, AttentionRegressor
from primaldual.integrations.saved import SavedEstimatorError
from primaldual.primal import mechanism


def test_the_unit_of_targets_survives_a_file(tmp_path):
    X, y = sines(regression=True)
    model = AttentionRegressor(**TINY).fit(X, 1000 + 50 * y)
    model.save(tmp_path / "model")
    loaded = AttentionRegressor.load(tmp_path / "model")
    assert (loaded.target_mean_, loaded.target_std_) == (model.target_mean_, model.target_std_)
    assert loaded.target_mean_ == pytest.approx((1000 + 50 * y).mean())


@BOTH
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_saved_estimator_predicts_the_same(kind, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "dumps", None)
    monkeypatch.setattr(pickle, "dump", None)
    monkeypatch.setattr(torch, "save", None)
    model, (X, _) = fitted(kind, **tiny | {"n_members": 2, "mechanism": mechanism("bn", beta=0.5)}), sines()
    path = tmp_path / "model.safetensors"
    model.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    loaded = kind.load(path)
    np.testing.assert_array_equal(outputs(loaded, X), outputs(model, X))
    assert loaded.get_params() == model.get_params()
    assert loaded.predict(X).dtype == model.predict(X).dtype
    clone(loaded).fit(*sines(regression=kind is AttentionRegressor))


@pytest.mark.parametrize(
    "labels", [[0, 1], [-1.0, 2.0], [True, False], np.array(["a", "b"], dtype=object)], ids=str
)  # fmt: skip
def test_labels_survive_a_file(labels, tmp_path):
    X, _ = sines()
    values = np.asarray(labels)
    y = values[np.arange(len(X)) % 2]
    weight = {values[0]: 2.0, values[1]: np.float64(3.0)}
    model = AttentionClassifier(**TINY | {"class_weight": weight}).fit(X, y)
    model.save(tmp_path / "model")
    loaded = AttentionClassifier.load(tmp_path / "model")
    assert loaded.class_weight == weight
    assert loaded.classes_.dtype == model.classes_.dtype
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


@pytest.mark.parametrize("dtype", ["datetime64[D]", "datetime64[ns]", "timedelta64[h]"])
def test_times_as_labels_survive_a_file(dtype, tmp_path):
    X, _ = sines()
    y = np.array([1, 2]).astype(dtype)[np.arange(len(X)) % 2]
    model = AttentionClassifier(**TINY).fit(X, y)
    model.save(tmp_path / "model")
    loaded = AttentionClassifier.load(tmp_path / "model")
    assert loaded.classes_.dtype == y.dtype
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


def test_labels_that_a_file_cannot_hold_are_named(tmp_path):
    model = fitted()
    model.classes_ = np.array([1j, 2j])
    with pytest.raises(TypeError, match="a label of type complex cannot be kept in a file"):
        model.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_file_may_have_any_name(tmp_path):
    path = tmp_path / os.fsdecode(b"model-\xff\xfe")
    model, (X, _) = fitted(), sines()
    model.save(path)
    np.testing.assert_array_equal(AttentionClassifier.load(path).predict_proba(X), model.predict_proba(X))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_fitted_estimator_comes_back_from_file_pickle_and_clone_with_equal_predictions(kind, tmp_path):
    X, y = sines(regression=kind is AttentionRegressor)
    X[0, 0, 3] = np.nan
    for i, changes in enumerate((PAPER, {"mechanism": mechanism("bn+sh", beta=0.5), "n_members": 2})):
        model = kind(**TINY | changes).fit(X, y)
        model.save(tmp_path / str(i))
        copies = kind.load(tmp_path / str(i)), pickle.loads(pickle.dumps(model)), clone(model).fit(X, y)
        for copy in copies:
            np.testing.assert_array_equal(outputs(copy, X), outputs(model, X))
            np.testing.assert_array_equal(copy.predict(X), model.predict(X))


def test_a_calibration_survives_a_file(tmp_path):
    X, _ = sines()
    model = fitted()
    assert model.calibration_.temperature != 1.0
    before = model.predict_proba(X)
    model.save(tmp_path / "model")
    loaded = AttentionClassifier.load(tmp_path / "model")
    assert loaded.calibration_ == model.calibration_
    model.calibration_ = None
    assert not np.allclose(model.predict_proba(X), before)


@pytest.mark.parametrize(
    "changes",
    [{"shares": [1.0]}, {"shares": [0.5, -0.5]}, {"shares": "all"}, {"temperature": 0}, {"temperature": "1"}],
    ids=str,
)
def test_shares_and_temperatures_that_cannot_be_are_refused(changes, tmp_path):
    path = tmp_path / "model"
    fitted().save(path)
    tensors, about = read(path)
    about["about"]["series"] |= changes
    write(path, tensors, about)
    with pytest.raises(
        SavedEstimatorError, match=f"its {'members have the shares' if 'shares' in changes else 'temp'}"
    ):
        AttentionClassifier.load(path)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "model"
    fitted().save(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-40] ^= 64
    for content in (whole[:-100], whole[:20], b"", b"not a model", bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(SavedEstimatorError, match="model is damaged"):
            AttentionClassifier.load(path)
    path.write_bytes(whole)
    with pytest.raises(
        SavedEstimatorError, match=r"holds a AttentionClassifier: load it with AttentionClassifier.load"
    ):
        AttentionRegressor.load(path)
    path.write_bytes(whole.replace(rb"\"format\": 2", rb"\"format\": 9"))
    with pytest.raises(SavedEstimatorError, match="damaged"):
        AttentionClassifier.load(path)
    path.write_bytes(whole)
    tensors, about = read(path)
    write(path, tensors, about | {"format": 9})
    with pytest.raises(SavedEstimatorError, match="format 9"):
        AttentionClassifier.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        AttentionClassifier.load(tmp_path / "other")


def test_what_is_saved_can_be_read_as_json(tmp_path):
    path = tmp_path / "model"
    fitted().save(path)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    about = json.loads(header["__metadata__"]["primaldual"])
    assert about["about"]["estimator"] == "AttentionClassifier"
    assert about["about"]["parameters"]["recipe"]["kind"] == "ModernRecipe"


def test_only_a_fitted_estimator_can_be_saved(tmp_path):
    with pytest.raises(ValueError, match="not been fitted"):
        AttentionClassifier().save(tmp_path / "model")
