"""Φ and the kernel it induces."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primaldual import Primal, attention
from primaldual.primal import EluPlusOne, Exponential, RandomFeatures, Taylor
from primaldual.primal.features import TAYLOR_LIMIT


def points(seed: int, count: int = 3, dim: int = 3, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(count, dim, dtype=torch.float64, generator=generator)


def scores(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y.T / math.sqrt(x.shape[-1])


def test_the_exponential_kernel_is_exp_of_the_scaled_product():
    x, y = points(0, 3), points(1, 4)
    torch.testing.assert_close(Exponential().kernel(x, y), scores(x, y).exp(), rtol=1e-12, atol=0)
    torch.testing.assert_close(Exponential().log_kernel(x, y), scores(x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", [lambda: Exponential().features(torch.ones(2)), lambda: Exponential().dim(2)])
def test_the_exponential_features_cannot_be_written_down(call):
    with pytest.raises(ValueError, match="infinitely many features"):
        call()


@pytest.mark.parametrize("degree", range(5))
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_taylor_has_one_feature_per_monomial(dim, degree):
    expected = sum(math.comb(dim + t - 1, t) for t in range(degree + 1))
    assert Taylor(degree).dim(dim) == expected
    assert Taylor(degree).features(torch.ones(2, 3, dim)).shape == (2, 3, expected)


def test_taylor_features_are_the_monomials_over_the_roots_of_their_factorials():
    x = points(0, count=1, dim=2)[0]
    a, b = (x / 2**0.25).tolist()
    expected = sorted([1, a, b, a * a / math.sqrt(2), a * b, b * b / math.sqrt(2)])
    assert sorted(Taylor(2).features(x).tolist()) == pytest.approx(expected, rel=1e-12)


@given(seed=st.integers(0, 2**16), degree=st.integers(0, 5), dim=st.integers(1, 4), size=st.floats(0.1, 2))
def test_the_taylor_kernel_is_the_exponential_series_cut_at_its_degree(seed, degree, dim, size):
    x, y = points(seed, dim=dim, size=size), points(seed + 1, dim=dim, size=size)
    z = scores(x, y)
    expected = sum(z**t / math.factorial(t) for t in range(degree + 1))
    # terms of both signs cancel, so rounding is relative to the sum of their sizes, at most e^{|x||y|/√D}
    slack = 1e-13 * scores(x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)).exp()
    assert ((Taylor(degree).kernel(x, y) - expected).abs() <= 1e-13 + slack * math.exp(size * dim)).all()


@given(seed=st.integers(0, 2**16), degree=st.integers(0, 6), size=st.floats(0.1, 2))
def test_the_taylor_kernel_is_within_its_error_bound(seed, degree, size):
    x, y = points(seed, size=size), points(seed + 1, size=size)
    z = scores(x, y).abs()
    bound = z ** (degree + 1) * z.exp() / math.factorial(degree + 1)
    error = (Taylor(degree).kernel(x, y) - Exponential().kernel(x, y)).abs()
    assert (error <= bound + 1e-12 * (1 + Exponential().kernel(x.abs(), y.abs()))).all()


@given(seed=st.integers(0, 2**16))
def test_the_taylor_kernel_converges_to_the_exponential_one(seed):
    x, y = points(seed, dim=2), points(seed + 1, dim=2)
    x = x / scores(x, y).abs().amax()  # |z| ≤ 1, so the bound at degree 12 is e/13! < 5e-10
    exact = Exponential().kernel(x, y)
    errors = [(Taylor(degree).kernel(x, y) - exact).abs().max() for degree in (0, 4, 8, 12)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 5e-10


def test_taylor_attention_converges_to_softmax_attention():
    q, k, v = torch.randn(3, 1, 2, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = q / (q @ k.transpose(-1, -2)).abs().amax()
    softmax = attention(q, k, v, "softmax")
    errors = [(attention(q, k, v, Primal(features=Taylor(t))) - softmax).abs().max() for t in (2, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-7


def test_degree_zero_is_the_constant_feature_and_averages():
    assert torch.equal(Taylor(0).features(points(0)), torch.ones(3, 1, dtype=torch.float64))
    q, k, v = torch.randn(3, 1, 1, 4, 3, dtype=torch.float64)
    out = attention(q, k, v, Primal(features=Taylor(0)))
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-12, atol=1e-12)


def test_an_odd_degree_can_make_the_kernel_negative_an_even_one_cannot():
    x = torch.full((1, 1), -2.0)
    assert Taylor(1).kernel(x, -x) < 0
    assert all(Taylor(degree).kernel(x, -x) > 0 for degree in (0, 2, 4, 6))


def test_taylor_over_the_limit_is_refused_before_it_is_allocated():
    assert Taylor(1).dim(TAYLOR_LIMIT - 1) == TAYLOR_LIMIT
    with pytest.raises(ValueError, match="65,537 features, over the limit of 65,536"):
        Taylor(1).dim(TAYLOR_LIMIT)
    # about 10^17 features: to get as far as an allocation would not end in a ValueError
    with pytest.raises(ValueError, match="over the limit"):
        Taylor(8).features(torch.ones(1, 512))
    q = torch.ones(1, 1, 2, 512)
    for impl in ("auto", "reference"):
        with pytest.raises(ValueError, match="lower the degree or the head dimension"):
            attention(q, q, q, Primal(features=Taylor(8)), impl=impl)


@pytest.mark.parametrize("degree", [-1, 1.5, True, "2"], ids=repr)
def test_a_degree_is_a_count(degree):
    with pytest.raises(ValueError, match="degree must be an integer of at least 0, got"):
        Taylor(degree)


def test_elu_plus_one_is_torchs_elu_plus_one():
    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    torch.testing.assert_close(EluPlusOne().features(x), torch.nn.functional.elu(x) + 1, rtol=0, atol=1e-15)


def test_elu_plus_one_stays_positive_where_adding_one_to_elu_rounds_to_zero():
    x = torch.tensor([-20.0, -50.0, -80.0])
    assert (torch.nn.functional.elu(x) + 1 == 0).all()
    assert (EluPlusOne().features(x) > 0).all()


@pytest.mark.parametrize("value", [-60.0, -1.0, 0.0, 1.0, 60.0, 1000.0])
def test_elu_plus_one_has_the_gradient_of_elu(value):
    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(EluPlusOne().features(x), x)
    assert gradient.item() == pytest.approx(math.exp(min(value, 0.0)), rel=1e-12)


def test_random_features_are_the_same_for_the_same_seed_and_others_for_another():
    x = points(0)
    assert torch.equal(RandomFeatures(8, seed=3).features(x), RandomFeatures(8, seed=3).features(x))
    assert not torch.allclose(RandomFeatures(8, seed=3).features(x), RandomFeatures(8, seed=4).features(x))


def test_random_features_do_not_touch_the_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    RandomFeatures(8).features(points(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_random_features_are_positive(size):
    features = RandomFeatures(32).features(points(0, count=20, size=size))
    assert features.shape == (20, 32)
    assert (features > 0).all()


@pytest.mark.parametrize(("count", "dim"), [(4, 4), (10, 4), (3, 5), (5, 1)])
def test_random_directions_are_orthogonal_within_a_block_of_head_dim(count, dim):
    projection = RandomFeatures(count).state(dim)["projection"]
    assert projection.shape == (count, dim)
    for block in projection.split(dim):
        gram = block @ block.T
        # float32 at the least; the entries are of size dim
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5 * dim


def test_the_lengths_of_random_directions_are_those_of_gaussian_vectors():
    squares = torch.stack(
        [RandomFeatures(4, seed).state(4)["projection"].double().square().sum(-1) for seed in range(200)]
    )
    # |ω|² is χ² with 4 degrees of freedom: mean 4, variance 8; five standard errors
    assert abs(squares.mean() - 4) < 5 * math.sqrt(8 / squares.numel())
    assert abs(squares.var() - 8) < 5 * math.sqrt(8 * 8 * 6 / squares.numel())


@pytest.mark.parametrize(
    "point",
    [[0.5], [-0.5], [0.7, 0, 0, 0], [-0.7, 0, 0, 0], [0, 0, 0, 0.7], [0.4, -0.4, 0.4, 0.4]],
    ids=str,
)
def test_random_features_are_unbiased(point):
    x = torch.tensor([point], dtype=torch.float64)
    estimates = torch.stack([RandomFeatures(x.shape[-1], seed).kernel(x, x).squeeze() for seed in range(500)])
    standard_error = estimates.std() / math.sqrt(len(estimates))
    assert abs(estimates.mean() - Exponential().kernel(x, x)) < 5 * standard_error
    assert standard_error < 0.1  # so that the line above says something


def test_more_random_features_come_closer():
    x, y = points(0, count=20, size=0.7), points(1, count=20, size=0.7)
    exact = Exponential().kernel(x, y)

    def error(count: int) -> float:
        return (RandomFeatures(count).kernel(x, y) - exact).square().mean().sqrt().item()

    assert error(4096) < error(256) < error(16)


def test_random_features_take_their_directions_from_the_parameters_where_given():
    x, features = points(0), RandomFeatures(6)
    state = {name: tensor.double() for name, tensor in features.state(3).items()}
    torch.testing.assert_close(features.map(x, state), features.features(x), rtol=1e-6, atol=1e-6)
    other = features.map(x, {"projection": torch.zeros(6, 3, dtype=torch.float64)})
    expected = (-x.square().sum(-1, keepdim=True) / math.sqrt(3) / 2).exp() / math.sqrt(6)
    torch.testing.assert_close(other, expected.expand(-1, 6), rtol=1e-12, atol=0)


@pytest.mark.parametrize("count", [0, -1, 2.0, True], ids=repr)
def test_the_number_of_random_features_is_a_count(count):
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got"):
        RandomFeatures(count)


@pytest.mark.parametrize("features", [Taylor(2), EluPlusOne(), RandomFeatures(5)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_features_keep_the_dtype_of_their_input(features, dtype):
    x = torch.randn(2, 4, dtype=dtype)
    assert features.features(x).dtype == dtype
    assert features.features(x).shape == (2, features.dim(4))
