"""The estimators: aeon's own checks, real sets, files, and every input that is wrong."""

import json
import os
import pickle
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of aeon's own imports
    pytest.importorskip("aeon")
    from aeon.datasets import load_basic_motions, load_japanese_vowels
    from aeon.testing.estimator_checking import parametrize_with_checks
    from aeon.transformations.collection import Normalizer

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from primaldual.base.tensors import read, write
from primaldual.integrations.aeon import AttentionClassifier, AttentionRegressor
from primaldual.integrations.saved import SavedEstimatorError
from primaldual.primal import mechanism
from primaldual.training import Ensemble, MissingPackageError, Training, csv_log

TINY = {
    "d_model": 16, "heads": 2, "layers": 1, "feedforward": 16, "epochs": 4, "batch_size": 8, "random_state": 0,
    "device": "cpu",
}  # fmt: skip
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


# aeon's test series of unequal lengths may be longer in test than in training
@pytest.mark.filterwarnings("ignore:.*longer than every series of fit")
@parametrize_with_checks(ESTIMATORS)
def test_aeon_finds_nothing_to_complain_about(check):
    check()


def test_basic_motions_are_told_apart():
    (X, y), test = load_basic_motions(split="train"), load_basic_motions(split="test")
    model = AttentionClassifier(d_model=64, layers=1, epochs=25, random_state=0, device="cpu")
    assert model.fit(X, y).score(*test) >= 0.9


def test_japanese_vowels_of_unequal_length():
    (X, y), (X_test, y_test) = load_japanese_vowels(split="train"), load_japanese_vowels(split="test")
    assert len({one.shape[1] for one in X}) > 1
    model = AttentionClassifier(d_model=32, layers=1, epochs=20, random_state=0, device="cpu")
    model.fit(X, y)
    with pytest.warns(UserWarning, match="longer than every series of fit"):  # 29 steps, and 26 in training
        assert model.score(X_test, y_test) >= 0.9


def test_padding_is_not_data():
    X, y = sines()
    short = [one[:, : 6 + i % 7] for i, one in enumerate(X)]
    model = AttentionClassifier(**TINY).fit(short, y)
    alone = np.concatenate([model.predict_proba([one]) for one in short])
    np.testing.assert_allclose(model.predict_proba(short), alone, atol=1e-5)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_longer_series_are_cut_with_a_warning(kind):
    model, (X, _) = fitted(kind), sines()
    longer = np.concatenate([X, np.ones_like(X)], 2)
    with pytest.warns(UserWarning, match="24 of 24 series are longer .* cut to 12 steps"):
        found = outputs(model, longer)
    np.testing.assert_array_equal(found, outputs(model, X))


@pytest.mark.filterwarnings("ignore:(All-NaN|Degrees of freedom)")  # in aeon's own check
def test_missing_values_are_interpolated():
    X, y = sines()
    X[0, 0, 3], X[1, 1, :] = np.nan, np.nan
    assert np.isfinite(AttentionClassifier(**TINY).fit(X, y).predict_proba(X)).all()


@pytest.mark.filterwarnings("ignore:.*very little variation")
def test_a_channel_that_is_constant_in_training_does_no_harm():
    X, y = sines()
    X[:, 1] = 0.1
    model = AttentionClassifier(**TINY).fit(X, y)
    X[:, 1] = 0.2
    assert (model.predict_proba(X) < 1).all()


def test_grid_search_over_mechanisms():
    X, y = sines()
    search = GridSearchCV(
        AttentionClassifier(**TINY), {"mechanism": ["softmax", "bn", mechanism("sh")], "heads": np.array([2, 4])}, cv=2
    )
    search.fit(X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_estimator_.predict(X).shape == y.shape


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_pipeline(kind):
    X, y = sines(regression=kind is AttentionRegressor)
    pipeline = make_pipeline(Normalizer(), kind(**TINY)).fit(X, y)
    assert np.isfinite(pipeline.score(X, y))


@pytest.mark.parametrize(("offset", "scale"), [(1000.0, 50.0), (0.0, 1e6), (-3.0, -1e-6)])
def test_regression_learns_and_the_unit_of_targets_does_not_matter(offset, scale):
    X, y = sines(64, regression=True)
    y = (y - 60) / 10
    changes = TINY | {"epochs": 40, "d_model": 32}
    model = AttentionRegressor(**changes).fit(X, offset + scale * y)
    X_test, y_test = sines(64, regression=True, seed=1)
    assert model.score(X_test, offset + scale * (y_test - 60) / 10) > 0.8
    plain = AttentionRegressor(**changes).fit(X, np.sign(scale) * y)
    found = (model.predict(X_test) - offset) / abs(scale)
    np.testing.assert_allclose(found, plain.predict(X_test), atol=0.02)


def test_defaults_learn_targets_far_from_zero_in_few_epochs():
    X, y = sines(64, length=24, regression=True)
    model = AttentionRegressor(epochs=10, random_state=0, device="cpu").fit(X, 1000 + 5 * y)
    X_test, y_test = sines(64, length=24, regression=True, seed=1)
    assert model.score(X_test, 1000 + 5 * y_test) > 0.8


def test_the_unit_of_targets_survives_a_file(tmp_path):
    X, y = sines(regression=True)
    model = AttentionRegressor(**TINY).fit(X, 1000 + 50 * y)
    model.save(tmp_path / "model")
    loaded = AttentionRegressor.load(tmp_path / "model")
    assert (loaded.target_mean_, loaded.target_std_) == (model.target_mean_, model.target_std_)
    assert loaded.target_mean_ == pytest.approx((1000 + 50 * y).mean())


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_random_state_decides_everything(kind):
    X, _ = sines()
    torch.manual_seed(1)
    first = outputs(fitted(kind), X)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = outputs(fitted(kind), X)
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(first, outputs(fitted(kind, random_state=1), X))
    generator = np.random.RandomState(0)
    np.testing.assert_array_equal(first, outputs(fitted(kind, random_state=generator), X))
    assert not np.allclose(first, outputs(fitted(kind, random_state=generator), X))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_in_threads_as_alone(kind):
    X, _ = sines()
    expected = outputs(fitted(kind, n_members=2), X)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: outputs(fitted(kind, n_members=2), X), range(8)))
    assert torch.equal(torch.get_rng_state(), before)
    for one in found:
        np.testing.assert_array_equal(one, expected)


def test_the_default_dtype_of_torch_does_not_matter():
    X, _ = sines()
    model = fitted()
    expected = model.predict_proba(X)
    torch.set_default_dtype(torch.float64)
    try:
        np.testing.assert_array_equal(model.predict_proba(X), expected)
        assert fitted().predict_proba(X).shape == expected.shape
    finally:
        torch.set_default_dtype(torch.float32)


def test_members_are_averaged():
    X, _ = sines()
    model = fitted(n_members=3)
    assert len(model.weights_) == len(model.history_) == 3
    each = []
    for held in model.weights_:
        alone = pickle.loads(pickle.dumps(model))
        alone.weights_ = [held]
        each.append(alone.predict_proba(X))
    assert not np.allclose(each[0], each[1])
    np.testing.assert_allclose(model.predict_proba(X), np.mean(each, 0))


def test_a_member_that_fails_is_left_out(monkeypatch):
    whole = Training.run

    def run(self, *given):
        whole(self, *given)
        self.failures[0] = "the loss or its gradient is not finite in epoch 1"

    monkeypatch.setattr(Training, "run", run)
    with pytest.warns(UserWarning, match="1 of 2 members are left out"):
        assert len(fitted(n_members=2).weights_) == 1


def test_the_progress_bar_leaves_standard_output_alone(capsys):
    fitted(verbose=True)
    assert capsys.readouterr().out == ""


def test_the_recipe_is_the_same_on_every_device(monkeypatch):
    recipes = []

    def stop(self, task, recipe, seeds, device):
        recipes.append((recipe, device.type))
        raise KeyboardInterrupt

    monkeypatch.setattr(Ensemble, "__init__", stop)
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("primaldual.integrations.aeon.device_of", lambda _, device=device: torch.device(device))
        for kind in ESTIMATORS:
            with pytest.raises(KeyboardInterrupt):
                kind().fit(*sines(regression=kind is AttentionRegressor))
    assert [device for _, device in recipes] == ["cpu", "cpu", "cuda", "cuda"]
    assert recipes[0][0] == recipes[2][0] and recipes[1][0] == recipes[3][0] and recipes[0][0].epochs == 40


def test_callbacks_see_every_epoch_and_may_keep_them(tmp_path):
    seen = []
    model = fitted(callbacks=[seen.append, csv_log(tmp_path / "fit.csv")])
    assert [one.done for one in seen if one.values] == [1, 2, 3, 4]
    lines = (tmp_path / "fit.csv").read_text().splitlines()
    assert lines[0] == "epoch,seed,seconds,loss" and len(lines) == 5
    model.save(tmp_path / "model")
    assert AttentionClassifier.load(tmp_path / "model").callbacks is None


def test_early_stopping_keeps_the_best_epoch():
    model = fitted(validation=0.3, patience=2, epochs=60)
    values = model.history_[0]["validation"]
    assert len(values) < 60
    assert values.index(max(values)) == len(values) - 3


def test_class_weights_favour_their_class():
    rng = np.random.default_rng(0)
    y = np.array(["common"] * 36 + ["rare"] * 6)
    X = rng.normal(size=(42, 1, 8)) + 0.7 * (y == "rare")[:, None, None]
    chance = {}
    for name, weight in {"none": None, "balanced": "balanced", "mapping": {"rare": 50.0}}.items():
        model = AttentionClassifier(**TINY | {"epochs": 12, "learning_rate": 5e-3, "class_weight": weight}).fit(X, y)
        chance[name] = model.predict_proba(X)[:, 1].mean()
    assert chance["none"] + 0.05 < chance["balanced"] < chance["mapping"]


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_saved_estimator_predicts_the_same(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "dumps", None)
    monkeypatch.setattr(pickle, "dump", None)
    monkeypatch.setattr(torch, "save", None)
    model, (X, _) = fitted(kind, n_members=2, mechanism=mechanism("bn", beta=0.5)), sines()
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
    model = AttentionClassifier(**TINY | {"epochs": 1, "class_weight": weight}).fit(X, y)
    model.save(tmp_path / "model")
    loaded = AttentionClassifier.load(tmp_path / "model")
    assert loaded.class_weight == weight
    assert loaded.classes_.dtype == model.classes_.dtype
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


@pytest.mark.parametrize("dtype", ["datetime64[D]", "datetime64[ns]", "timedelta64[h]"])
def test_times_as_labels_survive_a_file(dtype, tmp_path):
    X, _ = sines()
    y = np.array([1, 2]).astype(dtype)[np.arange(len(X)) % 2]
    model = AttentionClassifier(**TINY | {"epochs": 1}).fit(X, y)
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
    for i, changes in enumerate(({}, {"mechanism": mechanism("bn+sh", beta=0.5), "n_members": 2, "validation": 0.3})):
        model = kind(**TINY | changes).fit(X, y)
        model.save(tmp_path / str(i))
        copies = kind.load(tmp_path / str(i)), pickle.loads(pickle.dumps(model)), clone(model).fit(X, y)
        for copy in copies:
            np.testing.assert_array_equal(outputs(copy, X), outputs(model, X))
            np.testing.assert_array_equal(copy.predict(X), model.predict(X))


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
    assert about["about"]["parameters"]["mechanism"] == "bn+sh"


def test_only_a_fitted_estimator_can_be_saved(tmp_path):
    with pytest.raises(ValueError, match="not been fitted"):
        AttentionClassifier().save(tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "y", "error", "match"),
    [
        (AttentionClassifier, np.array([0.0, 1.0, np.nan] * 8), ValueError, "NaN"),
        (AttentionRegressor, np.array([0.0, 1.5, np.nan] * 8), ValueError, "NaN"),
        (AttentionRegressor, np.array([0.0, 1.5, np.inf] * 8), ValueError, "infinity"),
        (AttentionClassifier, np.zeros(24), ValueError, "at least 2 unique labels"),
        (AttentionClassifier, np.arange(23) % 2, ValueError, "Mismatch in number of cases"),
        (AttentionClassifier, np.array([]), ValueError, "empty"),
        (AttentionClassifier, [0, 1] * 12, TypeError, "np.array"),
        (AttentionClassifier, np.zeros((24, 2)), TypeError, "1-dimensional"),
        (AttentionRegressor, np.array(["a", "b", "c"] * 8), ValueError, "strings"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # in scikit-learn's check, before its error
def test_bad_targets(kind, y, error, match):
    with pytest.raises(error, match=match):
        kind(**TINY).fit(sines()[0], y)


@pytest.mark.parametrize(
    ("X", "match"),
    [
        ([], "X is empty"),
        (np.empty((0, 2, 12)), "X is empty"),
        (np.empty((24, 2, 0)), "X is empty"),
        (np.full((24, 2, 12), np.inf), "infinity"),
        (np.zeros((24, 2, 3, 4)), "2D or 3D"),
        ([np.zeros((1 + i % 2, 12)) for i in range(24)], "channels"),
        (np.full((24, 2, 12), "a"), "numeric"),
    ],
    ids=["no list", "no series", "no steps", "inf", "4-D", "channels", "strings"],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_bad_series(kind, X, match):
    y = sines(regression=kind is AttentionRegressor)[1]
    with pytest.raises((ValueError, TypeError), match=match):
        kind(**TINY).fit(X, y)
    with pytest.raises((ValueError, TypeError), match=match):
        fitted(kind).predict(X)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_other_channels_in_predict(kind):
    with pytest.raises(ValueError, match="different number of channels"):
        fitted(kind).predict(sines(channels=3)[0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mechanism": "sofmax"}, "unknown mechanism 'sofmax'"),
        ({"epochs": 0}, "epochs must be an integer of at least 1"),
        ({"heads": 3}, "d_model must be a multiple of heads"),
        ({"encoder": "lstm"}, "encoder must be one of"),
        ({"learning_rate": "fast"}, "learning_rate must be a positive number, got 'fast'"),
        ({"dropout": "0.1"}, r"dropout must be in \[0, 1\), got '0.1'"),
        ({"validation": "a fifth"}, r"validation must be a share in \[0, 1\), got 'a fifth'"),
        ({"n_members": 0}, "n_members must be an integer of at least 1"),
        ({"patience": 3}, "AttentionClassifier: patience needs a validation share"),
        ({"device": "cuda:99"}, "device cuda:99: this machine has . CUDA devices; take cpu, or auto"),
        ({"device": "toaster"}, "device takes cpu, cuda or cuda:N; got 'toaster'"),
        ({"validation": 0.01}, "AttentionClassifier: a share of 0.01 of 24 training cases holds out none"),
        ({"class_weight": "balance"}, "balance"),
        ({"class_weight": {"slow": 0.0}}, "must be positive"),
        ({"class_weight": {"quick": 2.0}}, "quick|not in class_weight"),
    ],
    ids=str,
)
def test_bad_parameters(changes, match):
    with pytest.raises(ValueError, match=match):
        fitted(**changes)


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(RuntimeError, match="not finite in epoch 1; lower the learning rate"):
        fitted(learning_rate=1e30)


def test_series_of_one_step_are_refused():
    with pytest.raises(ValueError, match="series of one step have no order"):
        AttentionClassifier(**TINY).fit(sines(length=1)[0], sines()[1])


def test_data_frames():
    X, y = sines(channels=1)
    frame = pd.DataFrame(X[:, 0])
    found = AttentionClassifier(**TINY).fit(frame, pd.Series(y)).predict_proba(frame)
    np.testing.assert_array_equal(found, AttentionClassifier(**TINY).fit(X, y).predict_proba(X[:, 0]))


def test_without_aeon_the_error_says_what_to_install(monkeypatch):
    for name in [n for n in sys.modules if n == "aeon" or n.startswith("aeon.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "primaldual.integrations.aeon")
    monkeypatch.setitem(sys.modules, "aeon", None)
    with pytest.raises(MissingPackageError, match="needs aeon: pip install aeon"):
        __import__("primaldual.integrations.aeon")


def test_the_library_itself_does_not_need_aeon():
    source = Path(sys.modules["primaldual"].__file__).parent
    importers = [p for p in source.rglob("*.py") if re.search(r"^\s*(from|import) aeon", p.read_text("utf-8"), re.M)]
    assert [p.relative_to(source).as_posix() for p in importers] == ["integrations/aeon.py"]
