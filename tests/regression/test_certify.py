"""Every mechanism is the dual of its regression, and a wrong one is found out."""

import math

import pytest
import torch

from primaldual import Primal, mechanism, mechanisms
from primaldual.primal import Fixed, Laplace, Pooled, RandomFeatures, RmsNorm, Rotary, Scale, Taylor, Unit
from primaldual.regression import KernelError, claims
from primaldual.regression import drawn as problems
from primaldual.regression.certification import Certification, Check, worst
from primaldual.regression.claims import certify
from primaldual.regression.drawn import draw
from primaldual.svr.fit import Fit


def statuses(found: Certification) -> dict[str, str]:
    return {check.name: check.status for check in found.checks}


@pytest.mark.parametrize("name", mechanisms())
def test_every_mechanism_certifies_on_a_problem_with_all_kinds_of_dual_variables(name):
    found = certify(name)
    assert found.ok, found.failed
    assert all(found.alpha.values()), found.alpha
    said = statuses(found)
    finite = mechanism(name).features.finite
    assert said["by W vs by α"] == ("ok" if finite else "skipped")
    skipped = {check.note for check in found.checks if check.status == "skipped"}
    few = finite and name != "polynomial"  # 45 features of 8 dimensions, for 24 points
    assert skipped == ({"α is not unique"} if few else set() if finite else {"no finite Φ"})
    assert bool(found.queries) == ("sparse" in name)


VARIANTS = {
    "bn-full": mechanism("bn", full=True, learnable=True),
    "taylor": mechanism("linear-sh", features=Taylor(2), prefix=2),
    "random": mechanism("linear-bn", features=RandomFeatures(8)),
    "unit": Primal(normalizer=Unit()),
    "max": mechanism("bn+sh", how="max"),
    "scales": mechanism("sh", scales=(1, 3, 2, 8, 5)),
    "fixed": mechanism("sparse-bn+sh", pattern=Fixed(4, 2)),
    "grid": mechanism("conv2d", grid=(3, 5), prefix=1),
    "alibi, everything": Primal(Laplace(), inputs=(Rotary(), RmsNorm(), Scale(1.5)), training_set=Pooled(how="max")),
    "conv1d, each channel": mechanism("conv1d", channels="each"),
    "temperature": mechanism("qk-norm", temperature=True),
    "scaled, finite": Primal(mechanism("linear").features, inputs=(Scale(1.5, learnable=True),)),
    "rotary": mechanism("bn+sh", rotary=True),
    "rotary, finite": mechanism("linear", rotary=True),
    "rotary, sparse": mechanism("sparse", stride=3, rotary=True),
    "layer": Primal(bias=True, residual=True),
}


@pytest.mark.parametrize("primal", VARIANTS.values(), ids=VARIANTS)
def test_primals_without_a_name_certify_too(primal):
    assert certify(primal).ok


@pytest.mark.parametrize("name", ["softmax", "linear-bn+sh", "sparse-sh"])
@pytest.mark.parametrize("given", [{"bias": True}, {"epsilon": 0.0}, {"epsilon": 50.0}, {"length": 1}, {"values": 1}])
def test_certifies_in_the_corners(name, given):
    found = certify(name, **given)
    assert found.ok, found.failed


def test_conv_pooling_has_its_attention_certified_and_its_recovery_skipped():
    found = certify(mechanism("sh", how="conv"))
    said = statuses(found)
    assert found.ok and said["by attention vs by α"] == "ok" and said["recovery, at keys"] == "skipped"


def test_a_grid_sets_the_length():
    assert (certify("conv2d").length, certify("conv2d", length=36).length, certify("conv2d", length=2).length) == (
        25, 36, 1,
    )  # fmt: skip
    assert any("not 24" in note for note in certify("conv2d").notes)
    assert certify(mechanism("conv2d", grid=(3, 5), prefix=1)).length == 16


def test_a_pattern_is_certified_at_a_length_at_which_it_hides_a_key():
    wide = mechanism("sparse", stride=40)
    assert (certify("softmax").length, certify("sparse", heads=1).length) == (24, 48)
    assert certify(wide, heads=1).length == 48 and certify(wide, heads=1, length=10).length == 10


def test_the_seed_determines_the_result():
    assert certify("bn+sh", seed=3) == certify("bn+sh", seed=3)
    assert certify("bn+sh", seed=3).checks != certify("bn+sh", seed=4).checks


@pytest.mark.parametrize("given", [{"length": 0}, {"head_dim": 0}, {"heads": -1}, {"values": 0}, {"epsilon": -1.0}])
def test_impossible_problems_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        certify("softmax", **given)


def test_a_wrong_primal_route_fails_that_check_alone(monkeypatch):
    right = Fit._through_w
    monkeypatch.setattr(Fit, "_through_w", lambda self, *given: right(self, *given) * (1 + 1e-6))
    assert [check.name for check in certify("linear").failed] == ["by W vs by α"]


def test_a_wrong_expansion_fails_every_comparison(monkeypatch):
    right = Fit.predict
    monkeypatch.setattr(
        Fit, "predict", lambda self, x, by="dual", **at: right(self, x, by, **at) * (1 + 1e-4 * (by == "dual"))
    )
    assert [check.name for check in certify("linear").failed] == [
        "by W vs by α", "by attention vs by α", "recovery, at keys", "recovery, at queries",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["sh", "sparse"])
def test_a_wrong_attention_is_found(monkeypatch, name):
    right = problems.attention
    monkeypatch.setattr(problems, "attention", lambda q, k, v, *rest, **given: right(q, k, v + 1e-4, *rest, **given))
    failed = {check.name for check in certify(name).failed}
    assert failed == {"by attention vs by α", "recovery, at keys", "recovery, at queries"}


def test_wrong_targets_are_a_wrong_recovery(monkeypatch):
    right = claims.recover
    wrong = lambda *given, **named: (r := right(*given, **named))._replace(targets=r.targets + 1e-3)  # noqa: E731
    monkeypatch.setattr(claims, "recover", wrong)
    assert {check.name for check in certify("bn").failed} == {
        "recovery, at keys", "recovery, at queries", "recovery, α",
    }  # fmt: skip


def test_an_unsolved_problem_fails_its_optimality(monkeypatch):
    right = claims.fit
    monkeypatch.setattr(claims, "fit", lambda *given, **named: right(*given, **named, tol=1e-1, max_iter=1))
    failed = {check.name for check in certify("softmax").failed}
    assert "duality gap" in failed and "stationarity" in failed


def test_no_regression_at_all_is_a_failure_with_its_reason(monkeypatch):
    def refuse(*given, **named):
        raise KernelError("the kernel matrix is not finite")

    monkeypatch.setattr(claims, "fit", refuse)
    (check,) = certify("softmax").failed
    assert "not finite" in check.note
    assert certify("softmax").to_dict()["checks"][0]["value"] == "nan"


def test_not_a_number_fails_and_is_the_worst():
    nan = Check("x", math.nan, 1.0)
    assert nan.status == "FAILED"
    assert worst([Check("x", 5.0, 1.0), nan, Check("x", 0.5, 1.0)]) is nan
    assert worst([Check("x", None, 1.0, "why"), Check("x", 0.5, 1.0)]).value == 0.5


@pytest.mark.parametrize("how", ["mean", "max", "conv", "kmeans"])
def test_values_per_token_pool_to_the_values_of_the_points(how):
    primal = mechanism("sh", how=how)
    drawn = draw(primal, 13, 4, 4, 2, 0)
    points = torch.randn(1, 4, 13, 2, dtype=torch.float64)
    spread = claims._per_token(drawn, points)
    seen = torch.ones(1, 1, 1, 13, dtype=torch.bool)
    pooled = primal.training_set.reduce(drawn.keys[:, 2:], spread[:, 2:], seen, 2, drawn.parameters)
    torch.testing.assert_close(pooled.values.squeeze(2), points[:, 2:, :7])
