"""Each rewrite is an identity: it holds where it says so, and fails where it says it would."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primaldual import Primal, attention, derive, mechanism
from primaldual.dual import (
    REWRITES,
    GroupHeadsByScale,
    KeepPattern,
    PoolBeforeProjection,
    Reassociate,
    RowConstantsCancel,
)
from primaldual.primal import (
    BatchNorm,
    DepthwiseConv1d,
    EluPlusOne,
    Moments,
    PointMap,
    Pooled,
    Recenter,
    RmsNorm,
    Sparse,
    Unit,
)

seeds = st.integers(0, 10_000)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seeds, st.floats(-2, 2))
def test_row_constants_cancel(seed: int, beta: float) -> None:
    q, k = normal(seed, 1, 2, 5, 3), normal(seed + 1, 1, 2, 7, 3)
    moments = Moments(k.mean(2, keepdim=True), k.var(2, correction=0, keepdim=True))
    for map_ in (Recenter(beta), BatchNorm(1e-3, beta)):
        both = map_.apply(q, moments, {}) @ map_.apply(k, moments, {}).transpose(-1, -2)
        one = RowConstantsCancel.query(q, map_, moments, {}) @ k.transpose(-1, -2)
        torch.testing.assert_close(both.softmax(-1), one.softmax(-1), rtol=0, atol=1e-9)


def test_nothing_cancels_without_the_exponential_or_the_kernel_sum() -> None:
    q, k, v = normal(0, 1, 2, 5, 3), normal(1, 1, 2, 7, 3), normal(2, 1, 2, 7, 3)
    mu = k.mean(2, keepdim=True)
    for primal in (Primal(features=EluPlusOne()), Primal(normalizer=Unit())):
        both = attention(q - mu, k - mu, v, primal)
        assert not torch.allclose(both, attention(q - mu, k, v, primal))
        assert RowConstantsCancel.refusal(Primal(primal.features, primal.normalizer, (Recenter(),)))


@given(seeds, st.integers(1, 12), st.integers(1, 5))
def test_pooling_commutes_with_an_affine_projection(seed: int, length: int, scale: int) -> None:
    from primaldual.ops.pooling import pool_tokens

    x, weight, bias = normal(seed, 1, 1, length, 4), normal(seed + 1, 6, 4), normal(seed + 2, 6)
    pooling = Pooled((scale,))
    late, _ = pool_tokens(torch.nn.functional.linear(x, weight, bias), None, pooling, scale, {})
    early = torch.nn.functional.linear(pool_tokens(x, None, pooling, scale, {})[0], weight, bias)
    torch.testing.assert_close(early, late, rtol=0, atol=1e-10)


@given(seeds)
def test_the_sum_re_associates(seed: int) -> None:
    phi_q, phi_k, v = normal(seed, 5, 3), normal(seed + 1, 7, 3), normal(seed + 2, 7, 2)
    total, kernel_sum = Reassociate.expand(phi_q, phi_k, v)
    torch.testing.assert_close(total, (phi_q @ phi_k.T) @ v, rtol=0, atol=1e-10)
    torch.testing.assert_close(kernel_sum, (phi_q @ phi_k.T).sum(-1, keepdim=True), rtol=0, atol=1e-10)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=10))
def test_groups_hold_every_head_once_with_its_own_scale(scales: list[int]) -> None:
    groups = GroupHeadsByScale.groups(tuple(scales))
    assert sorted(h for _, heads in groups for h in heads) == list(range(len(scales)))
    assert all(scales[h] == scale for scale, heads in groups for h in heads)
    assert len(groups) == len(set(scales))


class _Squash(PointMap):
    """Not affine."""

    def apply(self, x, moments, parameters):
        return x.tanh()


@pytest.mark.parametrize(
    ("primal", "applied"),
    [
        (mechanism("softmax"), []),
        (mechanism("bn"), [RowConstantsCancel]),
        (mechanism("sh"), [PoolBeforeProjection, GroupHeadsByScale]),
        (mechanism("bn+sh"), [RowConstantsCancel, PoolBeforeProjection, GroupHeadsByScale]),
        (mechanism("sh", how="max"), [GroupHeadsByScale]),
        (Primal(inputs=(DepthwiseConv1d(),), training_set=Pooled()), [GroupHeadsByScale]),
        (mechanism("linear-bn"), [Reassociate]),
        (mechanism("linear-sh"), [PoolBeforeProjection, Reassociate, GroupHeadsByScale]),
        (mechanism("sparse-bn"), [RowConstantsCancel, KeepPattern]),
        (Primal(features=EluPlusOne(), training_set=Sparse()), [KeepPattern]),
        (Primal(inputs=(Recenter(), RmsNorm())), []),
        (Primal(inputs=(RmsNorm(), Recenter())), [RowConstantsCancel]),
        (Primal(inputs=(_Squash(),)), []),
    ],
    ids=lambda x: "" if isinstance(x, list) else None,
)
def test_a_rewrite_applies_where_its_condition_holds(primal: Primal, applied: list) -> None:
    assert list(derive(primal).rewrites) == applied


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.__name__)
def test_every_rewrite_states_its_identity(rewrite) -> None:
    assert rewrite.name and rewrite.identity and rewrite.identity_latex
    assert len(rewrite.__doc__.splitlines()) > 2
