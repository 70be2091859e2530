"""The estimators: aeon's own checks, real sets, and every input that is wrong."""

import pickle
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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

from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from integrations.estimators import BOTH, ESTIMATORS, MEMBER, PAPER, RECIPE, SIZES, TINY, fitted, outputs, sines
from primaldual.integrations.aeon import AttentionClassifier, AttentionRegressor
from primaldual.integrations.recipes import modern_recipe
from primaldual.models import BankSizes
from primaldual.primal import mechanism
from primaldual.training import Ensemble, MissingPackageError, ModernRecipe, Recipe, Training, csv_log


# aeon's test series of unequal lengths may be longer in test than in training
@pytest.mark.filterwarnings("ignore:.*longer than every series of fit")
@parametrize_with_checks(ESTIMATORS)
def test_aeon_finds_nothing_to_complain_about(check):
    check()


def test_basic_motions_are_told_apart():
    (X, y), test = load_basic_motions(split="train"), load_basic_motions(split="test")
    model = AttentionClassifier(recipe=ModernRecipe(steps=20), random_state=0, device="cpu")
    assert model.fit(X, y).score(*test) >= 0.9


def test_japanese_vowels_of_unequal_length():
    (X, y), (X_test, y_test) = load_japanese_vowels(split="train"), load_japanese_vowels(split="test")
    assert len({one.shape[1] for one in X}) > 1
    model = AttentionClassifier(recipe=ModernRecipe(steps=20), random_state=0, device="cpu")
    model.fit(X, y)
    with pytest.warns(UserWarning, match="longer than every series of fit"):  # 29 steps, and 26 in training
        assert model.score(X_test, y_test) >= 0.9


@BOTH
def test_padding_is_not_data(tiny):
    X, y = sines()
    short = [one[:, : 6 + i % 7] for i, one in enumerate(X)]
    model = AttentionClassifier(**tiny).fit(short, y)
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
        AttentionClassifier(**TINY), {"mechanism": ["bn", mechanism("sh")], "n_members": np.array([2])}, cv=2
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
    changes = TINY | {"recipe": replace(RECIPE, steps=40)}
    model = AttentionRegressor(**changes).fit(X, offset + scale * y)
    X_test, y_test = sines(64, regression=True, seed=1)
    assert model.score(X_test, offset + scale * (y_test - 60) / 10) > 0.8
    plain = AttentionRegressor(**changes).fit(X, np.sign(scale) * y)
    found = (model.predict(X_test) - offset) / abs(scale)
    np.testing.assert_allclose(found, plain.predict(X_test), atol=0.02)


def test_a_regression_has_banks_alone_unless_a_mechanism_or_members_are_given():
    X, y = sines(16, length=24, regression=True)
    alone = AttentionRegressor(random_state=0, device="cpu").fit(X, y)
    assert alone.shares_ == [1 / 3] * 3 and not any(alone.history_)
    with pytest.raises(ValueError, match="give a mechanism, or n_members"):
        alone.diagnose(X[:2])
    for name, members in (("bn", None), (None, 2)):
        recipe = modern_recipe(None, name, members, classifies=False)
        assert len(recipe.members) == (members or 1) and recipe.share == 0.25


def test_defaults_learn_targets_far_from_zero_in_few_steps():
    X, y = sines(64, length=24, regression=True)
    model = AttentionRegressor(recipe=ModernRecipe(steps=20), random_state=0, device="cpu").fit(X, 1000 + 5 * y)
    X_test, y_test = sines(64, length=24, regression=True, seed=1)
    assert model.score(X_test, 1000 + 5 * y_test) > 0.8


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


@BOTH
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_in_threads_as_alone(kind, tiny):
    X, _ = sines()
    changes = tiny | {"n_members": 2}
    expected = outputs(fitted(kind, **changes), X)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: outputs(fitted(kind, **changes), X), range(8)))
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


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
def test_the_number_of_jobs_changes_nothing(kind, attention_dropout, monkeypatch):
    X, _ = sines()
    recipe = replace(
        RECIPE, banks=2 * RECIPE.banks, members=(replace(MEMBER, attention_dropout=attention_dropout), MEMBER)
    )
    alone, both = (fitted(kind, recipe=recipe, n_jobs=jobs) for jobs in (1, 2))
    monkeypatch.setattr("primaldual.training.predictor.PREDICTED", 60)  # five series at a time
    np.testing.assert_array_equal(outputs(both, X), outputs(alone, X))


@BOTH
def test_members_are_averaged_by_their_shares(tiny):
    X, _ = sines()
    model = fitted(**tiny | {"n_members": 3})
    model.calibration_ = None
    assert sum(model.shares_) == pytest.approx(1.0) and len(model.weights_) == len(model.history_) == len(model.shares_)
    assert len(model.weights_) == (3 if tiny is PAPER else 4)
    each = []
    for one in zip(model.configs_, model.weights_, [1.0] * len(model.weights_), strict=True):
        alone = pickle.loads(pickle.dumps(model))
        alone.configs_, alone.weights_, alone.shares_ = ([x] for x in one)
        each.append(alone.predict_proba(X))
    assert not np.allclose(each[-1], each[-2])
    np.testing.assert_allclose(model.predict_proba(X), np.average(each, 0, weights=model.shares_))


@BOTH
def test_a_member_that_fails_is_left_out(monkeypatch, tiny):
    whole = Training.run

    def run(self, *given):
        whole(self, *given)
        self.failures[0] = "the loss or its gradient is not finite in epoch 1" if self.seeds[0] == first else None

    first = int(np.random.RandomState(0).randint(2**31 - 1 - 2))
    monkeypatch.setattr(Training, "run", run)
    with pytest.warns(UserWarning, match="1 of 2 members are left out"):
        model = fitted(**tiny | {"n_members": 2})
    assert sum(bool(one) for one in model.history_) == 1


@BOTH
def test_progress_is_told_on_standard_error(capsys, tiny):
    fitted(**tiny | {"verbose": True})
    said = capsys.readouterr()
    assert said.out == "" and ("epoch 4 of 4" if tiny is PAPER else "part 3 of 3") in said.err


def test_the_recipe_is_the_same_on_every_device(monkeypatch):
    recipes = []

    def stop(self, task, recipe, seeds, device):
        recipes.append((recipe, device.type))
        raise KeyboardInterrupt

    monkeypatch.setattr(Ensemble, "__init__", stop)
    monkeypatch.setattr("primaldual.training.modern_fit._Fitting.bank", lambda *_: None)
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(
            "primaldual.integrations.estimator.device_of", lambda _, device=device: torch.device(device)
        )
        for recipe in ("modern", "paper"):
            with pytest.raises(KeyboardInterrupt):
                AttentionClassifier(recipe=recipe).fit(*sines())
    assert [device for _, device in recipes] == ["cpu", "cpu", "cuda", "cuda"]
    assert recipes[0][0] == recipes[2][0] and recipes[1][0] == recipes[3][0] and recipes[1][0].epochs == 40


def test_callbacks_see_every_epoch_of_a_member(tmp_path):
    seen = []
    fitted(n_members=2, n_jobs=2, callbacks=[seen.append, csv_log(tmp_path / "fit.csv")])
    assert sorted(one.done for one in seen if one.values) == sorted([1, *range(3, 20, 3), 20] * 2)  # 3 steps an epoch
    lines = (tmp_path / "fit.csv").read_text().splitlines()
    assert lines[0] == "step,seed,seconds,loss" and len(lines) == 1 + len(seen)


def test_callbacks_of_the_papers_recipe_may_keep_every_epoch(tmp_path):
    seen = []
    model = fitted(**PAPER | {"callbacks": [seen.append, csv_log(tmp_path / "fit.csv")]})
    assert [one.done for one in seen if one.values] == [1, 2, 3, 4]
    lines = (tmp_path / "fit.csv").read_text().splitlines()
    assert lines[0] == "epoch,seed,seconds,loss" and len(lines) == 5
    model.save(tmp_path / "model")
    assert AttentionClassifier.load(tmp_path / "model").callbacks is None


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_callback_raises_ends_the_fit(jobs):
    def stop(progress):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        fitted(n_members=2, n_jobs=jobs, callbacks=[stop])


def test_early_stopping_of_the_papers_recipe_keeps_the_best_epoch():
    model = fitted(recipe=Recipe(SIZES, epochs=60, batch_size=8, validation=0.3, patience=2))
    values = model.history_[0]["validation"]
    assert len(values) < 60
    assert values.index(max(values)) == len(values) - 3


@BOTH
def test_when_time_is_over_there_is_the_best_so_far(tiny):
    X, _ = sines()
    model = fitted(**tiny | {"time_limit": 1e-6})
    assert len(model.weights_) == 1 and np.isfinite(model.predict_proba(X)).all()
    assert bool(model.history_[0]) == (tiny is PAPER)  # the modern recipe's is a bank


def test_a_warm_start_adds_members_to_those_that_are_there():
    X, y = sines()
    model = fitted(n_members=1, warm_start=True)
    before = model.weights_
    model.set_params(n_members=2).fit(X, y)
    for old, new in zip(before, model.weights_, strict=False):
        assert all(np.shares_memory(old[name], new[name]) for name in old)
    np.testing.assert_array_equal(model.predict_proba(X), fitted(n_members=2).predict_proba(X))
    model.set_params(recipe=replace(RECIPE, steps=40)).fit(X, y)
    assert not np.array_equal(model.weights_[-1]["head.weight"], before[-1]["head.weight"])
    assert pickle.loads(pickle.dumps(model)).set_params(n_members=3).fit(X, y).predict(X).shape == y.shape


def test_a_series_with_the_weight_two_counts_as_two_and_one_with_none_is_left_out():
    X, y = sines()
    weight = np.ones(24)
    weight[::5] = 0
    rest = weight > 0
    model = AttentionClassifier(**TINY).fit(X, y, sample_weight=weight)
    np.testing.assert_array_equal(
        model.predict_proba(X), AttentionClassifier(**TINY).fit(X[rest], y[rest]).predict_proba(X)
    )
    heavy = np.where(y == "fast", 50.0, 1.0)
    noise = np.random.default_rng(0).normal(size=X.shape)
    plain, weighed = (
        AttentionClassifier(**TINY).fit(noise, y, sample_weight=w).predict_proba(-noise)[:, 0].mean()
        for w in (None, heavy)
    )
    assert weighed > plain + 0.1
    drawn = sines(regression=True)[1]
    found = AttentionRegressor(**TINY).fit(noise, drawn, np.where(drawn > 60, 50.0, 1.0)).predict(-noise).mean()
    assert found > AttentionRegressor(**TINY).fit(noise, drawn).predict(-noise).mean()


@pytest.mark.parametrize(
    ("weight", "match"),
    [(np.ones(3), r"\[24\]; got the shape \[3\]"), (-np.ones(24), "at least 0"), (np.zeros(24), "some of them larger"),
     (np.full(24, np.nan), "finite")],
    ids=["shape", "negative", "nothing", "nan"],
)  # fmt: skip
def test_bad_sample_weights(weight, match):
    with pytest.raises(ValueError, match=match):
        AttentionClassifier(**TINY).fit(*sines(), sample_weight=weight)


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 1, 300), (4, 100, 5), (3, 1, 2)], ids=str)
def test_few_and_short_series_and_many_channels(kind, shape):
    X = np.random.default_rng(0).normal(size=shape)
    y = np.arange(len(X)) % 2 if len(X) != 3 else np.arange(3)
    if kind is AttentionRegressor:
        y = y + 0.5 * np.arange(len(X))
    model = kind(**TINY).fit(X, y)
    assert np.isfinite(outputs(model, X)).all()


def test_wide_stems_see_short_series():
    X, y = sines(length=2)
    wide = replace(
        RECIPE, banks=(BankSizes(prototypes=16, widths=(9, 21)),), members=(replace(MEMBER, widths=(21, 41)),)
    )
    assert np.isfinite(fitted(recipe=wide).predict_proba(sines()[0][..., :2])).all()
    assert np.isfinite(AttentionClassifier(**TINY | {"recipe": wide}).fit(X, y).predict_proba(X)).all()


@pytest.mark.parametrize(
    "tiny", [TINY, PAPER | {"recipe": replace(PAPER["recipe"], epochs=12)}], ids=["modern", "paper"]
)
def test_class_weights_favour_their_class(tiny):
    rng = np.random.default_rng(0)
    y = np.array(["common"] * 36 + ["rare"] * 6)
    X = rng.normal(size=(42, 1, 8)) + 0.7 * (y == "rare")[:, None, None]
    chance = {}
    for name, weight in {"none": None, "balanced": "balanced", "mapping": {"rare": 50.0}}.items():
        recipe = replace(PAPER["recipe"], epochs=12, learning_rate=5e-3) if tiny is PAPER else RECIPE
        model = AttentionClassifier(**tiny | {"recipe": recipe, "class_weight": weight}).fit(X, y)
        model.calibration_ = None
        chance[name] = model.predict_proba(X)[:, 1].mean()
    assert chance["none"] + 0.05 < chance["balanced"] < chance["mapping"]


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
        ({"recipe": "papers"}, "recipe takes 'modern', 'paper', a ModernRecipe or a Recipe; got 'papers'"),
        ({"recipe": Recipe(MEMBER, epochs=1)}, "time series need a recipe with model=SeriesSizes"),
        ({"recipe": replace(PAPER["recipe"], patience=3)}, "AttentionClassifier: patience needs a validation share"),
        ({"recipe": replace(PAPER["recipe"], validation=0.01)}, "a share of 0.01 of 24 training cases holds out none"),
        ({"recipe": replace(RECIPE, members=()), "n_members": 2}, "has no members of which there could be 2"),
        ({"recipe": "paper", "warm_start": True}, "the paper's recipe has no warm_start"),
        ({"n_members": 0}, "n_members must be an integer of at least 1"),
        ({"time_limit": 0}, "time_limit must be a positive number of seconds, or None; got 0"),
        ({"time_limit": "1 h"}, "time_limit must be a positive number of seconds, or None; got '1 h'"),
        ({"device": "cuda:99"}, "device cuda:99: this machine has . CUDA devices; take cpu, or auto"),
        ({"device": "toaster"}, "device takes cpu, cuda or cuda:N; got 'toaster'"),
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
def test_a_loss_that_is_not_finite_is_an_error_where_there_is_nothing_else():
    with pytest.raises(RuntimeError, match="not finite in epoch 1; lower the learning rate"):
        fitted(recipe=replace(PAPER["recipe"], learning_rate=1e30))
    wild = replace(RECIPE, learning_rate=1e30, clip=1e30)
    with pytest.raises(RuntimeError, match=r"not finite in step .*; lower the learning rate"):
        fitted(recipe=replace(wild, banks=()))
    assert len(fitted(recipe=wild).weights_) == 1


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
    assert sorted(p.relative_to(source).as_posix() for p in importers) == [
        "integrations/aeon.py", "integrations/estimator.py",
    ]  # fmt: skip
