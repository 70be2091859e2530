"""The ε-insensitive regression in its dual form, many problems and outputs at once.

    minimise  ½ βᵀKβ − yᵀβ + ε|β|₁   subject to  |β_j| ≤ C  (and Σ_j β_j = 0 where there is a bias),   β = α − α̃

One eigendecomposition of K per head serves all outputs and every step length: ADMM splits the quadratic from the box
and the ε-term, whose proximal map is a soft threshold and a clip. A primal-dual active set then solves the optimality
conditions exactly on the points that are neither zero nor at the bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHECK = 20
"""ADMM steps between two looks at the duality gap."""

POLISH = 12
"""Active-set steps at most."""

CHUNK_BYTES = 1 << 28
"""Memory for the systems of the active set; more outputs take turns."""


class Solution(NamedTuple):
    """β [P, N, Dv], the bias [P, 1, Dv], and the steps that were taken."""

    beta: Tensor
    bias: Tensor
    iterations: int


class Problem(NamedTuple):
    """P scaled problems: K [P, N, N], y [P, N, Dv], C [P, 1, 1], which points exist [P, N, 1]."""

    kernel: Tensor
    targets: Tensor
    c: Tensor
    epsilon: float
    seen: Tensor
    bias: bool


def solve(p: Problem, eigenvalues: Tensor, eigenvectors: Tensor, tol: float, max_iter: int) -> Solution:
    """Both stages; the better of the two by duality gap, output by output."""
    beta, bias, steps = _admm(p, eigenvalues, eigenvectors, tol, max_iter)
    gap = relative_gap(p, beta, bias)
    if bool((gap > tol).any()):
        beta, bias = _polish(p, beta, bias, gap, tol)
    return Solution(beta, bias, steps)


def objectives(p: Problem, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(primal, dual) objective [P, Dv] at β and the weights that it makes."""
    f = p.kernel @ beta
    norm = (beta * f).sum(1) / 2
    slack = ((p.targets - f - bias).abs() - p.epsilon).clamp(min=0).where(p.seen, 0.0)
    primal = norm + (p.c * slack).sum(1)
    dual = (p.targets * beta).sum(1) - p.epsilon * beta.abs().sum(1) - norm
    return primal, dual


def relative_gap(p: Problem, beta: Tensor, bias: Tensor) -> Tensor:
    """(primal − dual) / (1 + |primal| + |dual|), [P, Dv]; with a bias, less what Σβ ≠ 0 adds to the dual."""
    primal, dual = objectives(p, beta, bias)
    if p.bias:
        dual = dual - (bias.squeeze(1) * beta.sum(1)).abs()
    return (primal - dual) / (1 + primal.abs() + dual.abs())


def _admm(p: Problem, values: Tensor, vectors: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Tensor, int]:
    count, n, outputs = p.targets.shape
    ones = p.seen.to(p.targets.dtype)
    rho = values.amax(-1)[:, None, None].clamp(min=1e-12).expand(count, 1, outputs) / n
    z = torch.zeros_like(p.targets)
    u = torch.zeros_like(z)
    ones_rotated = vectors.transpose(-1, -2) @ ones
    best, best_bias = z, z[:, :1]
    best_gap = torch.full_like(z[:, 0], torch.inf)
    step = 0
    for step in range(1, max_iter + 1):
        inverse = 1 / (values.unsqueeze(-1) + rho)  # [P, N, Dv]
        rotated = vectors.transpose(-1, -2) @ (p.targets + rho * (z - u))
        b = torch.zeros_like(z[:, :1])
        if p.bias:
            b = (ones_rotated * inverse * rotated).sum(1, keepdim=True)
            b = b / (ones_rotated.square() * inverse).sum(1, keepdim=True)
            rotated = rotated - ones_rotated * b
        x = vectors @ (inverse * rotated)
        x = 1.6 * x + (1 - 1.6) * z  # over-relaxation
        before = z
        z = _prox(x + u, p.epsilon / rho, p.c).where(p.seen, 0.0)
        u = u + x - z
        if step % CHECK == 0 or step == max_iter:
            gap = relative_gap(p, z, b)
            better = gap < best_gap
            best = torch.where(better[:, None], z, best)
            best_bias = torch.where(better[:, None], b, best_bias)
            best_gap = torch.where(better, gap, best_gap)
            if bool((best_gap <= tol).all()):
                break
            # balance the residuals: the distance between the two copies, and how far one of them still moves
            primal, dual = (x - z).norm(dim=1, keepdim=True), rho * (z - before).norm(dim=1, keepdim=True)
            factor = (primal / dual.clamp(min=1e-300)).sqrt().clamp(0.2, 5.0)
            factor = torch.where((factor > 0.8) & (factor < 1.25), 1.0, factor)
            rho, u = rho * factor, u / factor
    return best, best_bias, step


def _prox(x: Tensor, threshold: Tensor, c: Tensor) -> Tensor:
    """argmin_z threshold·|z| + (z − x)²/2 over the box |z| ≤ c."""
    return (x.sign() * (x.abs() - threshold).clamp(min=0)).clamp(-c, c)


def _polish(p: Problem, beta: Tensor, bias: Tensor, gap: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Guess which points are zero, free and at the bound; solve for the free ones; look again."""
    count, n, outputs = beta.shape
    per_output = max(1, CHUNK_BYTES // (8 * (n + 1) ** 2 * count))
    for start in range(0, outputs, per_output):
        part = slice(start, start + per_output)
        one = p._replace(targets=p.targets[..., part])
        best, best_bias, best_gap = beta[..., part], bias[..., part], gap[..., part]
        now, b = best, best_bias
        for _ in range(POLISH):
            now, b = _active_set_step(one, now, b)
            new_gap = relative_gap(one, now, b)
            better = new_gap < best_gap
            best = torch.where(better[:, None], now, best)
            best_bias = torch.where(better[:, None], b, best_bias)
            best_gap = torch.where(better, new_gap, best_gap)
            if bool((best_gap <= tol).all()):
                break
        beta, bias = beta.clone(), bias.clone()
        beta[..., part], bias[..., part] = best, best_bias
    return beta, bias


def _active_set_step(p: Problem, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """One semi-smooth Newton step on the optimality conditions; every output has a system of its own."""
    n = beta.shape[1]
    residual = p.targets - p.kernel @ beta - bias
    # the step length of the test: a scale of β over a scale of residuals
    tau = (beta.abs().amax(1, keepdim=True) / residual.abs().amax(1, keepdim=True).clamp(min=1e-300)).clamp(1e-3, 1e12)
    trial = beta + tau * residual
    sign = trial.sign()
    zero = (trial.abs() <= tau * p.epsilon) | ~p.seen
    bound = (trial.abs() - tau * p.epsilon >= p.c) & ~zero
    free = ~(zero | bound)
    fixed = torch.where(bound, sign * p.c, 0.0)
    right = (p.targets - p.epsilon * sign - p.kernel @ fixed).where(free, 0.0)
    # free rows and columns of K, the identity elsewhere, bordered by the centring constraint
    mask = free.movedim(1, 2).to(beta.dtype)  # [P, Dv, N]
    system = p.kernel[:, None] * mask.unsqueeze(-1) * mask.unsqueeze(-2)
    ridge = 1e-14 * p.kernel.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    system.diagonal(dim1=-2, dim2=-1).add_(1 - mask + ridge * mask)
    right = right.movedim(1, 2).unsqueeze(-1)  # [P, Dv, N, 1]
    if p.bias:
        border = mask.unsqueeze(-1)
        any_free = (mask.sum(-1) > 0).to(beta.dtype)[..., None, None]
        corner = 1 - any_free  # no free point leaves the bias as it is
        system = torch.cat([torch.cat([system, border], -1), torch.cat([border.transpose(-1, -2), corner], -1)], -2)
        centre = -fixed.sum(1)[..., None, None]
        keep = bias.movedim(1, 2).unsqueeze(-1)
        right = torch.cat([right, torch.where(any_free > 0, centre, keep)], -2)
    solved, info = torch.linalg.solve_ex(system, right)
    solved = torch.where((info == 0)[..., None, None], solved, 0.0).nan_to_num()
    found = solved[..., :n, 0].movedim(2, 1)
    b = solved[..., n:, 0].movedim(2, 1) if p.bias else bias
    return torch.where(free, found, fixed).clamp(-p.c, p.c), b
