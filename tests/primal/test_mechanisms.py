"""The paper's mechanisms by name."""

import re

import pytest
import torch

from primaldual import Primal, attention, mechanism, mechanisms
from primaldual.primal import (
    AllKeys,
    BatchNorm,
    DepthwiseConv1d,
    DepthwiseConv2d,
    EluPlusOne,
    Exponential,
    Fixed,
    Forget,
    Gated,
    Gaussian,
    KernelSum,
    Laplace,
    Polynomial,
    Pooled,
    Recenter,
    RmsNorm,
    Rotary,
    Scale,
    Sparse,
    Strided,
    Taylor,
    Window,
    about,
    as_primal,
)

STATED = {
    "softmax": Primal(),
    "bn": Primal(inputs=(Recenter(1.0),)),
    "sh": Primal(training_set=Pooled()),
    "bn+sh": Primal(inputs=(Recenter(1.0),), training_set=Pooled()),
    "conv1d": Primal(inputs=(DepthwiseConv1d(5),)),
    "conv2d": Primal(inputs=(DepthwiseConv2d((2, 2)),)),
    "linear": Primal(EluPlusOne()),
    "linear-bn": Primal(EluPlusOne(), inputs=(Recenter(1.0),)),
    "linear-sh": Primal(EluPlusOne(), training_set=Pooled()),
    "linear-bn+sh": Primal(EluPlusOne(), inputs=(Recenter(1.0),), training_set=Pooled()),
    "sparse": Primal(training_set=Sparse(Strided())),
    "sparse-bn": Primal(inputs=(Recenter(1.0),), training_set=Sparse(Strided())),
    "sparse-sh": Primal(training_set=Sparse(Strided(), Pooled())),
    "sparse-bn+sh": Primal(inputs=(Recenter(1.0),), training_set=Sparse(Strided(), Pooled())),
    "qk-norm": Primal(inputs=(RmsNorm(),)),
    "alibi": Primal(Laplace()),
    "alibi+sh": Primal(Laplace(), training_set=Pooled()),
    "sink": Primal(normalizer=KernelSum("learned")),
    "gate": Primal(normalizer=Gated(per="channel")),
    "gate+sh": Primal(normalizer=Gated(per="channel"), training_set=Pooled()),
    "forget": Primal(weights=Forget()),
    "forget+sh": Primal(training_set=Pooled(), weights=Forget()),
    "gaussian": Primal(Gaussian()),
    "polynomial": Primal(Polynomial()),
}


def test_every_name_is_there():
    assert set(mechanisms()) == set(STATED)
    assert len(mechanisms()) == len(STATED)


@pytest.mark.parametrize("name", mechanisms())
def test_a_name_without_options_is_this_primal(name):
    assert mechanism(name) == STATED[name]
    assert about(name)


@pytest.mark.parametrize("name", mechanisms())
def test_a_name_without_options_runs(name):
    q, k, v = torch.randn(3, 2, 4, 9, 4)
    assert attention(q, k, v, name).shape == (2, 4, 9, 4)
    assert torch.equal(attention(q, k, v, name), attention(q, k, v, mechanism(name)))


def test_the_primal_without_arguments_is_softmax_attention():
    assert Primal() == Primal(Exponential(), KernelSum(), (), AllKeys(), bias=False, residual=False)
    q, k, v = torch.randn(3, 2, 4, 9, 4, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v, Primal()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("bn", {"beta": 0.6}, Primal(inputs=(Recenter(0.6),))),
        ("bn", {"beta": 0.6, "learnable": True}, Primal(inputs=(Recenter(0.6, learnable=True),))),
        ("bn", {"full": True, "eps": 1e-3, "beta": 0.5}, Primal(inputs=(BatchNorm(1e-3, 0.5),))),
        ("sh", {"scales": (1, 4), "how": "max", "prefix": 1}, Primal(training_set=Pooled((1, 4), "max", 1))),
        ("sh", {"scales": [1, 4], "grid": (4, 4)}, Primal(training_set=Pooled((1, 4), grid=(4, 4)))),
        ("conv1d", {"size": 3, "causal": True}, Primal(inputs=(DepthwiseConv1d(3, causal=True),))),
        ("conv1d", {"channels": "each"}, Primal(inputs=(DepthwiseConv1d(5, channels="each"),))),
        ("conv2d", {"size": 3, "grid": (2, 5), "prefix": 1}, Primal(inputs=(DepthwiseConv2d((3, 3), (2, 5), 1),))),
        ("linear", {"features": Taylor(2)}, Primal(Taylor(2))),
        ("sparse", {"pattern": "fixed"}, Primal(training_set=Sparse(Fixed()))),
        ("sparse", {"stride": 16}, Primal(training_set=Sparse(Strided(16)))),
        ("sparse", {"stride": "sqrt"}, Primal(training_set=Sparse(Strided(None)))),
        ("sparse", {"pattern": Window(7)}, Primal(training_set=Sparse(Window(7)))),
        ("qk-norm", {"eps": 1e-3}, Primal(inputs=(RmsNorm(1e-3),))),
        ("sink", {"sink": 1}, Primal(normalizer=KernelSum(1))),
        ("gaussian", {"bandwidth": 0.5}, Primal(Gaussian(0.5))),
        ("polynomial", {"degree": 4, "constant": 0.0}, Primal(Polynomial(4, 0.0))),
        ("gate+sh", {"per": "head", "scales": (1, 2)}, Primal(normalizer=Gated(), training_set=Pooled((1, 2)))),
        ("qk-norm", {"temperature": True}, Primal(inputs=(RmsNorm(), Scale(learnable=True)))),
        (
            "alibi+sh",
            {"slopes": (0.5, 0.1), "scales": (1, 2)},
            Primal(Laplace((0.5, 0.1)), training_set=Pooled((1, 2))),
        ),
        ("softmax", {"rotary": True}, Primal(inputs=(Rotary(),))),
        ("softmax", {"rotary": False}, Primal()),
        ("bn+sh", {"rotary": Rotary(500.0)}, Primal(inputs=(Rotary(500.0), Recenter(1.0)), training_set=Pooled())),
        ("conv1d", {"rotary": True, "causal": True}, Primal(inputs=(DepthwiseConv1d(5, causal=True), Rotary()))),
        (
            "sparse-bn+sh",
            {"beta": 0.2, "scales": (2,), "pattern": "window"},
            Primal(inputs=(Recenter(0.2),), training_set=Sparse(Window(), Pooled((2,)))),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else (",".join(x) if isinstance(x, dict) else ""),
)
def test_options_go_where_they_belong(name, options, expected):
    assert mechanism(name, **options) == expected


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("sofmax", "softmax"),
        ("conv", "conv1d"),
        ("sparse-bm", "sparse-bn"),
        ("BN", "bn"),
        ("bn-sh", "bn+sh"),
        ("bn_sh", "bn+sh"),
        ("SH+BN", "bn+sh"),
        ("Linear_BN_SH", "linear-bn+sh"),
        ("QKNorm", "qk-norm"),
    ],
)
def test_an_unknown_name_is_an_error_that_offers_the_nearest(given, nearest):
    with pytest.raises(
        ValueError, match=rf"unknown mechanism {re.escape(repr(given))}; did you mean .*{re.escape(repr(nearest))}"
    ):
        mechanism(given)


@pytest.mark.parametrize("given", ["BN", "bn_sh", "SH-BN"])
def test_the_same_words_written_differently_are_the_one_suggestion(given):
    with pytest.raises(ValueError, match=r"did you mean '[bnsh+]+'\? There are: softmax, bn, sh, .*qk-norm, .*"):
        mechanism(given)


def test_an_unknown_name_near_nothing_is_an_error_that_lists_all():
    with pytest.raises(ValueError, match=r"unknown mechanism 'zzz'\. There are: softmax, bn, sh, .*qk-norm, .*"):
        mechanism("zzz")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("softmax", {"beta": 1.0}, "'softmax' has no option 'beta'. It takes: rotary$"),
        (
            "bn",
            {"betta": 0.5},
            "'bn' has no option 'betta'; did you mean 'beta'. It takes: beta, learnable, full, eps, rotary$",
        ),
        ("bn", {"scales": (1,)}, "'bn' has no option 'scales'. It takes: beta, learnable, full, eps, rotary$"),
        ("bn", {"eps": 1e-5}, "eps is added to the variance, which only full=True divides by"),
        (
            "sh",
            {"scale": (1,), "window": 2},
            "'sh' has no option 'scale'; did you mean 'scales'. It takes: scales, how, prefix, grid, rotary$",
        ),
        ("linear", {"features": Exponential()}, "features must be a finite feature map, got Exponential"),
        ("linear", {"features": "elu"}, "features must be a finite feature map, got 'elu'"),
        ("sparse", {"pattern": "dilated"}, "pattern must be one of strided, fixed, window.*got 'dilated'"),
        ("sparse", {"stride": "root"}, "stride must be an integer, or 'sqrt' for round.*got 'root'"),
        ("sparse", {"stride": 0}, "stride must be an integer of at least 1, got 0"),
        ("sparse", {"pattern": "window", "stride": 4}, "stride goes with pattern='strided'.*Window"),
        ("bn", {"beta": float("nan")}, "beta must be a finite number"),
        ("sh", {"rotary": 10000.0}, "rotary must be True, False or a Rotary, such as Rotary.*got 10000.0"),
    ],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_an_option_that_does_not_fit_is_an_error(name, options, message):
    with pytest.raises(ValueError, match=message):
        mechanism(name, **options)


def test_a_name_and_a_primal_are_both_taken():
    primal = Primal(bias=True)
    assert as_primal(primal) is primal
    assert as_primal("bn") == mechanism("bn")
    with pytest.raises(TypeError, match="expected a Primal or the name of a mechanism, got 3"):
        as_primal(3)
