"""h, the scalar that divides."""

import pytest
import torch

from primaldual import Primal, attention
from primaldual.ops import ZeroNormalizerError
from primaldual.primal import EluPlusOne, Exponential, KernelSum, Taylor, Unit


def test_the_kernel_sum_makes_the_weights_of_a_row_sum_to_one():
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64)
    for features in (Exponential(), EluPlusOne(), Taylor(2)):
        _, weights = attention(q, k, v, Primal(features, KernelSum()), need_weights=True)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64), rtol=1e-12, atol=0)


def test_unit_with_the_exponential_is_softmax_times_the_exponentiated_log_sum_exp():
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64)
    log_sum = (q @ k.transpose(-1, -2) / 2).logsumexp(-1, keepdim=True)
    expected = attention(q, k, v, "softmax") * log_sum.exp()
    torch.testing.assert_close(attention(q, k, v, Primal(normalizer=Unit())), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "linear"])
def test_unit_with_finite_features_is_the_bare_kernel_sum(impl):
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64)
    expected = EluPlusOne().kernel(q, k) @ v
    out = attention(q, k, v, Primal(EluPlusOne(), Unit()), impl=impl)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12)


def test_unit_overflows_to_infinity_where_the_kernel_does():
    q = torch.full((1, 1, 1, 1), 40.0)
    assert attention(q, q, torch.ones(1, 1, 1, 1), Primal(normalizer=Unit())).isinf().all()
    assert attention(q, q, torch.ones(1, 1, 1, 1), Primal()).item() == 1.0


def test_h_is_what_its_name_says():
    x, kernel_sum = torch.randn(3, 2), torch.rand(3, 1)
    assert torch.equal(KernelSum().h(x, kernel_sum), kernel_sum)
    assert torch.equal(Unit().h(x, kernel_sum), torch.ones(3, 1))


def test_a_normaliser_that_is_exactly_zero_is_an_error_in_the_reference():
    # Taylor(1) in one dimension: κ = 1 + q k, which is zero at q = 1, k = −1
    q, k = torch.ones(1, 1, 1, 1), -torch.ones(1, 1, 1, 1)
    with pytest.raises(ZeroNormalizerError, match="exactly zero for 1 of 1 queries that see keys"):
        attention(q, k, k, Primal(features=Taylor(1)), impl="reference")


def test_a_query_that_sees_no_key_gets_zero_without_an_error():
    q = torch.randn(2, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    hidden = torch.tensor([[True, True, True], [False, False, True]])
    for normalizer in (KernelSum(), Unit()):
        for features in (Exponential(), EluPlusOne(), Taylor(2)):
            for impl in ("reference", "auto"):
                out = attention(q, q, q, Primal(features, normalizer), key_padding_mask=hidden, impl=impl)
                assert (out[0] == 0).all()
                assert (out[1] != 0).all()
                (gradient,) = torch.autograd.grad(out.square().sum(), q)
                assert (gradient[0] == 0).all()
                assert gradient.isfinite().all()
