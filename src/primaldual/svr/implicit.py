"""The solution of the regression as a differentiable function of kernel and targets.

Problems are scaled as in `Design`: the largest diagonal entry of K is 1. With the squared loss the solution is
β = (K + I/C)⁻¹ y. With the ε-insensitive one it is found by the solver, without gradient; at the solution every β_j is
zero, at the bound ±C, or free, and these sets do not change under a small enough nudge. There

    β_F = K_FF⁻¹ (y_F − ε s_F − K_FB C s_B),   s the sides of the tube, F free, B at the bound

holds identically, so that differentiating this system gives the exact gradient. Zero points have none, and points at
the bound have none but that of C.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .design import Design
from .fit import KernelError, NotConvergedWarning
from .regressions import Regressions, relative_gap, unit_of
from .solver import solve

ACTIVE_SET_STEPS = 10
"""Times that the sets are looked at again, at most; a solution of the solver's precision mostly needs one."""

REFINE = 2
"""Steps of iterative refinement, which undo the ridge that keeps singular systems solvable."""


CHUNK_BYTES = 1 << 25
"""Memory for the systems that are factored at once; more take turns."""

LIFTS = 4
"""Times that the ridge of a system without a Cholesky factor is raised, at most."""


class ActiveSet(NamedTuple):
    """Which points are free and which at the bound, and the side of the tube they are on (±1): [P, N, Dv]."""

    free: Tensor
    bound: Tensor
    side: Tensor


def values_of(made: Design, beta: Tensor) -> Tensor:
    """v_j = β_j / h(k_j), what attention calls the values, of β [B, H, W, Dv] in scaled units."""
    log = -made.log_scale[..., None, None] - made.log_h.unsqueeze(-1)
    return (beta * log.exp() * made.sign_h.unsqueeze(-1)).where(made.visible.unsqueeze(-1), 0.0)


def ridge(kernel: Tensor, targets: Tensor, c: float) -> Tensor:
    """β = (K + I/C)⁻¹ y: [..., N, N], [..., N, Dv] to [..., N, Dv]; a point with a zero row and target gets zero."""
    identity = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    try:
        factor = torch.linalg.cholesky(kernel + identity / c)
    except torch.linalg.LinAlgError as error:
        raise KernelError(
            f"K + I/C has no Cholesky factor at C={c:g}: K is not finite or not positive semi-definite, or C is so "
            f"large that I/C is lost to rounding; lower C"
        ) from error
    return torch.cholesky_solve(targets, factor)


def support_vectors(
    kernel: Tensor, targets: Tensor, c: float, epsilon: float, seen: Tensor, tol: float = 1e-6, max_iter: int = 2000
) -> Tensor:
    """β of the ε-insensitive regression, with gradients to kernel and targets.

    Args:
        kernel, targets: [P, N, N], [P, N, Dv], scaled.
        c: the bound on |β|, in scaled units.
        epsilon: the half-width of the tube.
        seen: bool [P, N, 1], the points that take part.
        tol: the relative duality gap at which the solver hands over; the sets then give the solution to rounding.
        max_iter: the solver's steps at most; a gap that is still wide after them warns.
    """
    if not bool(kernel.isfinite().all()):
        raise KernelError("the kernel matrix is not finite: h is zero or the features overflow")
    with torch.no_grad():
        one = kernel.new_ones(kernel.shape[0], 1, 1)
        largest = _size(kernel).amax(1, keepdim=True).square()
        unit = unit_of(targets, epsilon, largest.log(), (c * one).log())
        problem = Regressions(
            kernel * (-unit.log_kernel).exp(), targets / unit.target, c / unit.target * unit.log_kernel.exp(),
            epsilon / unit.target, seen, seen.to(one), bias=False,
        )  # fmt: skip
        beta, sets = _solve_active_set(problem, solve(problem, tol, max_iter).beta, tol)
        beta = beta * unit.target * (-unit.log_kernel).exp()
    fixed = torch.where(sets.bound, sets.side * c, 0.0)
    right = (targets - epsilon * sets.side - kernel @ fixed).where(sets.free, 0.0)
    return _Reduced.apply(kernel, right, sets.free, beta.where(sets.free, 0.0)) + fixed


def _solve_active_set(p: Regressions, beta: Tensor, tol: float) -> tuple[Tensor, ActiveSet]:
    """Solve on the sets and look at the sets again until they stay; of those that never do, the best by gap."""
    at_bound = beta.abs() >= p.c * (1 - 1e-9)
    best, best_sets = beta, ActiveSet((beta != 0) & ~at_bound, at_bound, beta.sign())
    no_bias = torch.zeros_like(beta[:, :1])
    best_gap = relative_gap(p, beta, no_bias)
    sets = _active_set(p, beta)
    for _ in range(ACTIVE_SET_STEPS):
        fixed = torch.where(sets.bound, sets.side * p.c, 0.0)
        right = p.targets - p.epsilon * sets.side - p.kernel @ fixed
        beta = (_reduced(p.kernel, right, sets.free) + fixed).clamp(-p.c, p.c)
        again = _active_set(p, beta)
        same = (again.free == sets.free) & (again.bound == sets.bound)
        stays = (same & ((again.side == sets.side) | ~(sets.free | sets.bound))).all(1)
        gap = relative_gap(p, beta, no_bias)
        better = (gap < best_gap) | (stays & (gap <= best_gap.clamp(min=tol)))
        best, best_gap = torch.where(better[:, None], beta, best), torch.where(better, gap, best_gap)
        best_sets = ActiveSet(
            *(torch.where(better[:, None], new, old) for new, old in zip(sets, best_sets, strict=True))
        )
        if bool(stays.all()):
            break
        sets = again
    if not bool((best_gap <= max(10 * tol, 1e-6)).all()):
        warnings.warn(
            f"relative duality gap {float(best_gap.max()):.1e}: this head's values, and their gradients, are those of "
            f"a regression that is not quite solved; raise max_iter or epsilon, or lower C",
            NotConvergedWarning,
            stacklevel=3,
        )
    return best, best_sets


def _active_set(p: Regressions, beta: Tensor) -> ActiveSet:
    """The sets that the optimality conditions give: at the solution, those that β came from."""
    step = 1 / _size(p.kernel).square()  # any step has the same solution; this one has the units of β
    trial = beta + step * (p.targets - p.kernel @ beta)
    zero = (trial.abs() <= step * p.epsilon) | ~p.seen
    bound = (trial.abs() - step * p.epsilon >= p.c) & ~zero
    return ActiveSet(~(zero | bound), bound, trial.sign())


class _Reduced(torch.autograd.Function):
    """x_F = K_FF⁻¹ r_F, zero elsewhere, given the solution; its gradient is another such system."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, right: Tensor, free: Tensor, solution: Tensor) -> Tensor:
        x = solution.clone()
        ctx.save_for_backward(kernel, free, x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        kernel, free, x = ctx.saved_tensors
        with torch.no_grad():
            solution = _reduced(kernel, grad, free)
        u = _Reduced.apply(kernel, grad, free, solution)
        return -u @ x.transpose(-1, -2), u, None, None


def _reduced(kernel: Tensor, right: Tensor, free: Tensor) -> Tensor:
    """x_F = K_FF⁻¹ r_F for every output, each with free points of its own: [P, N, N], [P, N, Dv] to [P, N, Dv]."""
    count, n, outputs = right.shape
    size = _size(kernel)  # scaled to a diagonal of 1, as in the solver: h may differ much from point to point
    kernel, right = kernel / (size * size.transpose(-1, -2)), right / size
    mask, r = free.transpose(1, 2).reshape(-1, n), right.transpose(1, 2).reshape(-1, n)  # [P·Dv, N]
    x = torch.zeros_like(r)
    most = int(mask.sum(-1).max()) if mask.numel() else 0
    if most == 0:
        return torch.zeros_like(right)
    index = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[:, :most]  # free points first
    there = mask.gather(1, index)
    owner = torch.arange(count, device=right.device).repeat_interleave(outputs)
    for part in torch.arange(len(r), device=right.device).split(max(1, CHUNK_BYTES // (8 * most * most))):
        at, taken = index[part], there[part]
        system = kernel[owner[part, None, None], at.unsqueeze(-1), at.unsqueeze(-2)]
        system *= taken.unsqueeze(-1) & taken.unsqueeze(-2)
        b = r[part].gather(1, at).where(taken, 0.0).unsqueeze(-1)
        factor, lift = _factor(system, taken)
        found = torch.zeros_like(b)
        for _ in range(1 + REFINE):
            half = torch.linalg.solve_triangular(factor, b - system @ found + lift * found, upper=False)
            found = found + torch.linalg.solve_triangular(factor.transpose(-1, -2), half, upper=True)
        x[part] = torch.zeros_like(x[part]).scatter(1, at, found.squeeze(-1).where(taken, 0.0))
    return x.reshape(count, outputs, n).transpose(1, 2) / size


def _factor(system: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors of systems whose diagonal is lifted in place, by rounding or as much as it takes; the lift."""
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(~taken)  # the identity where there is no free point
    lift = system.new_zeros(len(system), 1, 1)
    more = torch.full_like(lift, 8 * system.shape[-1] * torch.finfo(system.dtype).eps)
    for _ in range(LIFTS):
        diagonal.add_(more.squeeze(-1))
        lift = lift + more
        factor, failed = torch.linalg.cholesky_ex(system)
        if not bool(failed.any()):
            break
        more = torch.where(failed[:, None, None] != 0, 1e3 * lift, 0.0)
    return factor, lift


def _size(kernel: Tensor) -> Tensor:
    """√K_jj [P, N, 1], 1 where there is no point."""
    diagonal = kernel.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return diagonal.sqrt().where(diagonal > 0, 1.0)
