"""The temperature: a factor on queries and keys, which multiplies scores by its square."""

import math

import pytest
import torch

from primaldual import MultiheadAttention, Primal, attention, derive, mechanism
from primaldual.dual import RowConstantsCancel
from primaldual.primal import EluPlusOne, Pooled, Recenter, RmsNorm, Scale, Unit

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def tokens(length: int = 7, dim: int = 4) -> torch.Tensor:
    return torch.randn(2, 3, length, dim, dtype=torch.float64)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_factor_on_both_sides_is_its_square_on_the_scores(impl):
    q, k, v = tokens(), tokens(), tokens()
    expected = (1.7**2 * q @ k.mT / 2).softmax(-1) @ v
    torch.testing.assert_close(attention(q, k, v, Primal(inputs=(Scale(1.7),)), impl=impl), expected, **TIGHT)
    unit = (1.7**2 * q @ k.mT / 2).exp() @ v
    found = attention(q, k, v, Primal(normalizer=Unit(), inputs=(Scale(1.7),)), impl=impl)
    torch.testing.assert_close(found, unit, rtol=1e-11, atol=1e-11)


def test_of_a_finite_map_both_sides_are_scaled():
    q, k, v = tokens(), tokens(), tokens()
    expected = attention(3 * q, 3 * k, v, Primal(EluPlusOne()))
    torch.testing.assert_close(attention(q, k, v, Primal(EluPlusOne(), inputs=(Scale(3.0),))), expected, **TIGHT)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_every_head_learns_its_own_or_all_learn_one(impl):
    q, k, v, factors = tokens(), tokens(), tokens(), torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    # heads of one scale do not stand side by side
    primal = Primal(inputs=(Scale(learnable=True),), training_set=Pooled((2, 1, 2)))
    found = attention(q, k, v, primal, parameters={"factor": factors}, impl=impl)
    for head, factor in enumerate(factors.tolist()):
        one = Primal(inputs=(Scale(factor),), training_set=Pooled((2, 1, 2)))
        torch.testing.assert_close(found[:, head], attention(q, k, v, one)[:, head], **TIGHT)
    shared = Primal(inputs=(Scale(learnable=True, per_head=False),), training_set=Pooled((2, 1, 2)))
    found = attention(q, k, v, shared, parameters={"factor": factors[1:2]}, impl=impl)
    expected = attention(q, k, v, Primal(inputs=(Scale(2.0),), training_set=Pooled((2, 1, 2))))
    torch.testing.assert_close(found, expected, **TIGHT)


def test_it_starts_where_it_is_said_to():
    assert Scale(0.5).learned(3, 8) == {}
    assert torch.equal(Scale(0.5, learnable=True).learned(3, 8)["factor"], torch.full((3,), 0.5))
    assert torch.equal(Scale(0.5, True, per_head=False).learned(3, 8)["factor"], torch.full((1,), 0.5))
    layer = MultiheadAttention(12, 3, mechanism=mechanism("qk-norm", temperature=True))
    assert {n: tuple(p.shape) for n, p in layer.learned.items()} == {"gain": (4,), "factor": (3,)}


def test_before_a_recentring_or_after_it_the_function_is_the_same():
    q, k, v = tokens(), tokens(), tokens()
    first, last = (Primal(inputs=maps) for maps in ((Scale(1.5), Recenter(0.4)), (Recenter(0.4), Scale(1.5))))
    torch.testing.assert_close(attention(q, k, v, first), attention(q, k, v, last), **TIGHT)


def test_as_the_last_map_under_softmax_it_is_one_of_the_queries():
    assert derive(mechanism("qk-norm", temperature=True)).query_map == Scale(learnable=True)
    assert RowConstantsCancel not in derive(Primal(EluPlusOne(), inputs=(Scale(2.0),))).rewrites

    class Bent(Scale):
        def apply(self, x, moments, parameters):
            return super().apply(x, moments, parameters).tanh()

    assert RowConstantsCancel not in derive(Primal(inputs=(Bent(2.0),))).rewrites
    said = derive(Primal(inputs=(RmsNorm(), Scale(learnable=True)))).explain()
    assert "softmax_j([c (q_i / √(mean(q_i²) + 1e-06) ⊙ γ)]·[c (k_j" in said and "softmax_j([c² (q_i /" in said
    assert "softmax_j([4 q_i]·k_j/√D)" in derive(Primal(inputs=(Scale(2.0),))).explain()


@pytest.mark.parametrize("start", [0.0, -1.0, math.inf, math.nan, "1", True])
def test_it_starts_at_a_positive_number(start):
    with pytest.raises(ValueError, match="Scale: start must be a positive number"):
        Scale(start)
