"""Ridge regression, and the error of leaving each case out without fitting anew."""

import pytest
import torch

from primaldual.svr.ridge import ridge


def solved(features, targets, alpha):
    """The normal equations, with an intercept that is not penalised."""
    mean, std = features.mean(0), features.std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    x = (features - mean) / std
    gram = x.T @ x + alpha * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.T @ (targets - targets.mean(0)))
    return lambda new: (new - mean) / std @ weights + targets.mean(0)


def cases(count, features, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator, dtype=torch.float64)
    y = x[:, :2] + 0.5 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return x, y


@pytest.mark.parametrize(("count", "features"), [(9, 4), (5, 12), (7, 7)], ids=["tall", "wide", "square"])
@pytest.mark.parametrize("alpha", [1e-2, 3.0])
def test_it_solves_the_normal_equations(count, features, alpha):
    x, y = cases(count, features)
    x[:, -1] = 2.5  # a feature that is the same everywhere
    new, _ = cases(6, features, seed=1)
    new[:, -1] = 2.5
    torch.testing.assert_close(ridge(x, y, [alpha / features])(new), solved(x, y, alpha)(new), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("count", "features"), [(9, 4), (5, 12)], ids=["tall", "wide"])
def test_what_is_left_out_is_predicted_by_the_others(count, features):
    """With features that stay standardised as they were on all cases: the mean of the others is their intercept."""
    x, y = cases(count, features)
    alpha, found = 0.7, ridge(x, y, [0.7 / features])
    x = (x - found.mean) / found.std
    for i in range(count):
        rest = torch.arange(count) != i
        centre = x[rest].mean(0)
        inner = x[rest] - centre
        gram = inner.T @ inner + alpha * torch.eye(features, dtype=x.dtype)
        weights = torch.linalg.solve(gram, inner.T @ (y[rest] - y[rest].mean(0)))
        expected = (x[i] - centre) @ weights + y[rest].mean(0)
        torch.testing.assert_close(found.held_out[i], expected, rtol=1e-8, atol=1e-8)


def test_the_penalty_is_that_of_the_least_left_out_error():
    x, y = cases(12, 30)
    errors = {alpha: (ridge(x, y, [alpha]).held_out - y).square().mean() for alpha in (1e-3, 1.0, 30.0, 1e5)}
    assert ridge(x, y, list(errors)).alpha == min(errors, key=errors.get)


def test_another_loss_may_choose():
    x, y = cases(12, 30)
    wanted = ridge(x, y, [1.0]).held_out
    assert ridge(x, y, [1e-3, 1.0, 1e2], lambda found: float((found - wanted).abs().max())).alpha == 1.0


@pytest.mark.parametrize(("count", "features"), [(9, 4), (5, 12)], ids=["tall", "wide"])
def test_a_weight_is_so_many_copies_of_a_case(count, features):
    x, y = cases(count, features)
    weights = torch.arange(1, count + 1)
    rows = torch.arange(count).repeat_interleave(weights)
    # α is in units of the mean weight
    found = ridge(x, y, [1e-2], weights=weights)
    expected = ridge(x[rows], y[rows], [1e-2 * len(rows) / count])
    new, _ = cases(6, features, seed=1)
    torch.testing.assert_close(found(new), expected(new), rtol=1e-9, atol=1e-9)


def test_a_case_with_a_weight_is_left_out_whole():
    x, y = cases(9, 4)
    weights = torch.linspace(0.5, 2, 9, dtype=torch.float64)
    found = ridge(x, y, [0.1], weights=weights)
    x = (x - found.mean) / found.std
    share = weights / weights.mean()
    for i in range(9):
        rest = torch.arange(9) != i
        w = share[rest][:, None]
        centre, middle = (w * x[rest]).sum(0) / w.sum(), (w * y[rest]).sum(0) / w.sum()
        inner = x[rest] - centre
        gram = inner.T @ (w * inner) + 0.4 * torch.eye(4, dtype=x.dtype)
        values = torch.linalg.solve(gram, inner.T @ (w * (y[rest] - middle)))
        torch.testing.assert_close(found.held_out[i], (x[i] - centre) @ values + middle, rtol=1e-8, atol=1e-8)


def test_features_that_hardly_move_may_be_left_out():
    x, y = cases(9, 4)
    x[:, 0] = 1 + 1e-7 * x[:, 0]
    assert not ridge(x, y, [1e-2], least=1e-6).coefficients[0].any()
    assert ridge(x, y, [1e-2]).coefficients[0].any()
