"""The solved dual variables as a differentiable function of kernel and targets."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from primaldual.regression import KernelError, NotConvergedWarning
from primaldual.svr import implicit
from primaldual.svr.implicit import ridge, support_vectors
from primaldual.svr.solver import Regressions, relative_gap, solve

P, N, OUTPUTS, C, EPSILON = 2, 8, 3, 0.8, 0.3


def problem(rank: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Kernels of order 1, targets, and points of which the second problem has two fewer."""
    features = torch.randn(P, N, rank, dtype=torch.float64)
    features = features / features.norm(dim=-1, keepdim=True)
    seen = (torch.arange(N) < torch.tensor([[N], [N - 2]])).unsqueeze(-1)
    features = features.where(seen, 0.0)
    targets = torch.randn(P, N, OUTPUTS, dtype=torch.float64).where(seen, 0.0)
    return features @ features.transpose(1, 2), targets, seen


def solved(kernel: Tensor, targets: Tensor, seen: Tensor, c: float = C, epsilon: float = EPSILON) -> Tensor:
    """β by the solver alone."""
    one = kernel.new_ones(P, 1, 1)
    return solve(Regressions(kernel, targets, c * one, epsilon * one, seen, seen.double(), False), 1e-13, 5000).beta


def test_the_solution_is_that_of_the_solver_and_every_state_occurs():
    kernel, targets, seen = problem()
    beta = support_vectors(kernel, targets, C, EPSILON, seen)
    torch.testing.assert_close(beta, solved(kernel, targets, seen), rtol=1e-8, atol=1e-8)
    size = beta.abs()[seen.expand_as(beta)]
    assert (size == 0).any() and (size == C).any() and ((size > 0) & (size < C)).any()
    assert (size <= C).all() and not beta[~seen.expand_as(beta)].any()


def test_the_implicit_gradient_is_the_difference_quotient_of_the_solver():
    kernel, targets, seen = problem()
    there = (seen & seen.transpose(1, 2)).double()
    dk, dy = torch.randn(P, N, N, dtype=torch.float64) * there, torch.randn_like(targets).where(seen, 0.0)
    dk = (dk + dk.transpose(1, 2)) / 2
    step = 1e-5
    ahead, behind = (solved(kernel + t * dk, targets + t * dy, seen) for t in (step, -step))
    cotangent = torch.randn_like(targets)
    k, y = kernel.requires_grad_(), targets.requires_grad_()
    gk, gy = torch.autograd.grad(support_vectors(k, y, C, EPSILON, seen), (k, y), cotangent)
    expected = (cotangent * (ahead - behind) / (2 * step)).sum()
    torch.testing.assert_close((gk * dk).sum() + (gy * dy).sum(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_gradients_of_both_losses(check):
    kernel, targets, seen = problem()
    root = torch.linalg.cholesky(kernel + 1e-6 * torch.eye(N, dtype=torch.float64)).requires_grad_()
    targets.requires_grad_()

    def insensitive(root: Tensor, y: Tensor) -> Tensor:
        return support_vectors(root @ root.transpose(1, 2), y, C, EPSILON, seen)

    def squared(root: Tensor, y: Tensor) -> Tensor:
        return ridge(root @ root.transpose(1, 2), y, C)

    assert check(insensitive, (root, targets), fast_mode=True, atol=1e-4)
    assert check(squared, (root, targets), fast_mode=True, atol=1e-4)


def test_where_no_point_is_free_nothing_reaches_the_targets():
    kernel, targets, seen = problem()
    targets.requires_grad_()
    for c, epsilon in ((1e-6, 0.01), (C, 100.0)):  # all at the bound; all zero
        beta = support_vectors(kernel, targets, c, epsilon, seen)
        size = beta.detach().abs()
        assert ((size == 0) | (size == c)).all()
        (gradient,) = torch.autograd.grad(beta.square().sum(), targets)
        assert not gradient.any()


def test_only_free_points_move_with_their_own_targets():
    kernel, targets, seen = problem()
    targets.requires_grad_()
    beta = support_vectors(kernel, targets, C, EPSILON, seen)
    (gradient,) = torch.autograd.grad(beta.sum(), targets)
    free = (beta != 0) & (beta.abs() < C)
    assert gradient[free].all() and not gradient[~free].any()


def test_squared_loss_is_a_linear_system():
    kernel, targets, seen = problem()
    beta = ridge(kernel, targets, 4.0)
    expected = torch.linalg.solve(kernel + torch.eye(N, dtype=torch.float64) / 4.0, targets)
    torch.testing.assert_close(beta, expected)
    assert not beta[~seen.expand_as(beta)].any()


def test_fewer_features_than_points_leave_the_function_unique():
    kernel, targets, seen = problem(rank=3)
    targets.requires_grad_()
    beta = support_vectors(kernel, targets, C, EPSILON, seen)
    torch.testing.assert_close(kernel @ beta, kernel @ solved(kernel, targets.detach(), seen), rtol=1e-6, atol=1e-6)
    assert torch.autograd.grad((kernel @ beta).square().sum(), targets)[0].isfinite().all()


def test_coinciding_points_have_a_finite_gradient():
    kernel, targets, seen = problem()
    twice = torch.arange(N) // 2 * 2
    kernel, targets = kernel[:, twice][:, :, twice], targets[:, twice]
    kernel.requires_grad_(), targets.requires_grad_()
    beta = support_vectors(kernel, targets, C, EPSILON, seen)
    gradients = torch.autograd.grad((kernel.detach() @ beta).sum(), (kernel, targets))
    assert all(g.isfinite().all() and g.abs().max() < 1e3 for g in gradients)


def test_systems_that_take_turns_give_the_same(monkeypatch):
    kernel, targets, seen = problem()
    together = support_vectors(kernel, targets, C, EPSILON, seen)
    monkeypatch.setattr(implicit, "CHUNK_BYTES", 1)
    torch.testing.assert_close(support_vectors(kernel, targets, C, EPSILON, seen), together)


def test_a_rough_solution_settles_to_rounding():
    kernel, targets, seen = problem()
    beta = support_vectors(kernel, targets, C, EPSILON, seen, tol=1e-3)
    one = kernel.new_ones(P, 1, 1)
    p = Regressions(kernel, targets, C * one, EPSILON * one, seen, seen.double(), False)
    assert relative_gap(p, beta, torch.zeros_like(beta[:, :1])).max() < 1e-12


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_the_solution_does_not_depend_on_the_unit_of_the_targets(size):
    kernel, targets, seen = problem()
    expected = support_vectors(kernel, targets, C, EPSILON, seen)
    found = support_vectors(kernel, size * targets, size * C, size * EPSILON, seen)
    torch.testing.assert_close(found / size, expected)
    far = torch.tensor([1.0, 1e-30], dtype=torch.float64).repeat(N // 2)[:, None]  # C·K_jj is nothing for every other
    bounded = support_vectors(kernel * far * far.T, targets, C, EPSILON, seen).abs()
    out = (targets.abs() > EPSILON) & seen
    assert (bounded[:, 1::2][out[:, 1::2]] == C).all()


def test_what_cannot_be_solved_says_so(monkeypatch):
    kernel, targets, seen = problem()
    with pytest.raises(KernelError, match="not finite"):
        support_vectors(kernel * torch.nan, targets, C, EPSILON, seen)
    with pytest.raises(KernelError, match="lower C"):
        ridge(-kernel, targets, 1e3)
    monkeypatch.setattr(implicit, "ACTIVE_SET_STEPS", 0)
    monkeypatch.setattr(implicit, "solve", lambda p, tol, steps: solve(p._replace(epsilon=3 * p.epsilon), tol, steps))
    with pytest.warns(NotConvergedWarning, match="not quite solved"):
        support_vectors(kernel, targets, C, EPSILON, seen)
