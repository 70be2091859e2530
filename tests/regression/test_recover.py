"""Every head is the solution of some regression: recover names it, fit gives the head back."""

import pytest
import torch
from torch import nn

from primaldual import MultiheadAttention, attention, mechanism
from primaldual.primal import Pooled, Primal, Taylor
from primaldual.regression import fit, recover
from support.own import OWN

DEFINED = [
    "softmax",
    "bn",
    "sh",
    "bn+sh",
    "conv1d",
    "conv2d",
    "linear",
    "linear-bn",
    "linear-sh",
    "linear-bn+sh",
    "qk-norm",
    "alibi",
    "alibi+sh",
]
SPARSE = {n: mechanism(n, stride=4) for n in ("sparse", "sparse-bn", "sparse-sh", "sparse-bn+sh")}


def head(seed: int, length: int, heads: int = 4, dim: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, length, dim, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("length", [1, 9, 36, 64])
@pytest.mark.parametrize("name", DEFINED)
def test_recover_then_fit_returns_the_head_s_outputs(name: str, length: int) -> None:
    keys, values, queries = head(length, length)
    found = recover(name, keys, values, epsilon=0.05)
    solved = fit(name, keys, found.targets, C=found.C, epsilon=found.epsilon)
    for x in (keys, queries):
        expected = attention(x, keys, values, name)
        torch.testing.assert_close(solved.predict(x), expected, rtol=0, atol=1e-6)


# length and seed; from seed 8 on some key is far out, so that C is 1e5 times what most points need, or some query is
FAR = [(2, 0), (9, 1), (9, 12), (17, 3), (17, 10), (33, 0), (33, 8), (64, 2), (64, 8)]


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "bn+sh", "conv1d", "linear", "linear-bn+sh", "qk-norm"])
def test_heads_whose_kernel_is_singular_to_rounding_are_recovered_too(name: str, dim: int) -> None:
    infinite = 0
    for length, seed in FAR:
        keys, values, queries = head(seed, length, dim=dim)
        found = recover(name, keys, values, epsilon=0.05)
        solved = fit(name, keys, found.targets, C=found.C, epsilon=0.05)
        infinite += int((found.condition == torch.inf).sum())
        for x in (keys, queries):
            error = (solved.predict(x) - attention(x, keys, values, name)).abs().max()
            assert error <= 1e-6, (length, seed, error)
    assert infinite > 0


@pytest.mark.parametrize("primal", SPARSE.values(), ids=SPARSE)
def test_queries_of_sparse_heads_with_a_singular_kernel_are_recovered_too(primal: Primal) -> None:
    for length, seed, query in ((33, 1, 0), (33, 1, 16), (33, 1, 32), (64, 2, 0), (64, 2, 32), (64, 2, 63)):
        keys, values, queries = head(seed, length, dim=1)
        found = recover(primal, keys, values, epsilon=0.05, query=query)
        solved = fit(primal, keys, found.targets, C=found.C, epsilon=0.05, query=query)
        for x in (keys, queries):
            expected = attention(x, keys, values, primal)[:, :, query : query + 1]
            error = (solved.predict(x[:, :, query : query + 1]) - expected).abs().max()
            assert error <= 1e-6, (length, query, error)


@pytest.mark.parametrize("how", ["max", "kmeans"])
def test_heads_pooled_another_way_are_recovered_too(how: str) -> None:
    keys, values, queries = head(2, 22)
    primal = mechanism("bn+sh", how=how)
    found = recover(primal, keys, values, epsilon=0.05)
    solved = fit(primal, keys, found.targets, C=found.C, epsilon=found.epsilon)
    torch.testing.assert_close(solved.predict(queries), attention(queries, keys, values, primal), rtol=0, atol=1e-6)


@pytest.mark.parametrize("primal", SPARSE.values(), ids=SPARSE)
def test_a_sparse_head_is_recovered_query_by_query(primal: Primal) -> None:
    keys, values, queries = head(2, 16)
    for i in (0, 7, 15):
        found = recover(primal, keys, values, epsilon=0.05, query=i)
        solved = fit(primal, keys, found.targets, C=found.C, epsilon=found.epsilon, query=i)
        expected = attention(queries, keys, values, primal)[:, :, i : i + 1]
        torch.testing.assert_close(solved.predict(queries[:, :, i : i + 1]), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "bn", "qk-norm", "sh"])
def test_well_conditioned_heads_give_their_dual_variables_back(name: str) -> None:
    keys, values, _ = head(3, 12, dim=16)
    found = recover(name, keys, values, epsilon=0.05)
    solved = fit(name, keys, found.targets, C=found.C, epsilon=found.epsilon)
    good = found.condition <= 1e8
    assert good.all() and found.unique.all()
    error = (solved.alpha - solved.alpha_tilde - found.alpha).abs().amax((-1, -2))
    assert (error <= 1e-6 * found.alpha.abs().amax((-1, -2))).all()


def test_finite_features_with_more_keys_than_features_are_not_unique_and_say_so() -> None:
    keys, values, queries = head(4, 30, dim=3)
    primal = Primal(features=Taylor(1))  # D_φ = 4
    found = recover(primal, keys / 4, values, epsilon=0.0)
    assert (found.rank == 4).all() and not found.unique.any() and (found.condition == torch.inf).all()
    solved = fit(primal, keys / 4, found.targets, C=found.C, epsilon=0.0)
    expected = attention(queries / 4, keys / 4, values, primal)
    torch.testing.assert_close(solved.predict(queries / 4), expected, rtol=0, atol=1e-6)


def test_coinciding_keys_are_reported_with_the_condition_number() -> None:
    keys, values, _ = head(5, 8)
    keys[:, :, 1] = keys[:, :, 0]
    found = recover("softmax", keys, values, epsilon=0.1)
    assert (found.rank == 7).all() and (found.condition == torch.inf).all() and not found.unique.any()


def test_the_price_is_the_smallest_that_allows_the_head() -> None:
    keys, values, _ = head(6, 10)
    found = recover("softmax", keys, values, epsilon=0.1)
    torch.testing.assert_close(found.C, found.alpha.abs().amax((-1, -2)))
    torch.testing.assert_close(found.log_C.exp(), found.C)
    cheaper = fit("softmax", keys, found.targets, C=0.9 * found.C, epsilon=0.1)
    assert not torch.allclose(cheaper.predict(keys), attention(keys, keys, values, "softmax"), atol=1e-3)


def test_masked_keys_take_no_part() -> None:
    keys, values, queries = head(7, 12)
    hidden = (torch.arange(12) >= 8).expand(1, -1)
    for name in ("softmax", "bn+sh", "linear-bn"):
        found = recover(name, keys, values, epsilon=0.05, key_padding_mask=hidden)
        solved = fit(name, keys, found.targets, C=found.C, epsilon=0.05, key_padding_mask=hidden)
        expected = attention(queries, keys, values, name, key_padding_mask=hidden)
        torch.testing.assert_close(solved.predict(queries), expected, rtol=0, atol=1e-6)


def test_conv_pooling_is_refused_with_the_reason() -> None:
    keys, values, _ = head(8, 8)
    with pytest.raises(ValueError, match="conv pooling mixes targets"):
        recover(Primal(training_set=Pooled((2, 2, 2, 2), how="conv")), keys, values, epsilon=0.1)


@pytest.mark.parametrize("name", ["softmax", "bn+sh", "linear-bn"])
def test_a_head_of_a_trained_transformer_is_recovered(name: str) -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 4, batch_first=True, mechanism=name, dtype=torch.float64)
    readout = nn.Linear(16, 1, dtype=torch.float64)
    x = torch.randn(32, 12, 16, dtype=torch.float64)
    wanted = x[..., 0].amax(1)  # the largest first coordinate of the sequence
    optimizer = torch.optim.Adam([*layer.parameters(), *readout.parameters()], lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (readout(layer(x, x, x, need_weights=False)[0]).mean(1).squeeze(-1) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    with torch.no_grad():
        q, k, v = (layer.split(nn.functional.linear(x[:4], *layer.weights_of(part))) for part in ("q", "k", "v"))
        found = recover(name, k, v, epsilon=0.01)
        solved = fit(name, k, found.targets, C=found.C, epsilon=found.epsilon)
        torch.testing.assert_close(solved.predict(q), attention(q, k, v, mechanism(name)), rtol=0, atol=1e-6)


def test_points_that_are_sums_and_no_means_are_recovered_by_numbers_that_give_them() -> None:
    """Of an odd number of tokens the last is a point alone, with a quarter of its weight."""
    keys, values, queries = head(3, 9, heads=2)
    found = recover(OWN["S that learns"], keys, values, epsilon=0.05)
    solved = fit(OWN["S that learns"], keys, found.targets, C=found.C, epsilon=0.05)
    expected = attention(queries, keys, values, OWN["S that learns"])
    torch.testing.assert_close(solved.predict(queries), expected, rtol=0, atol=1e-9)
