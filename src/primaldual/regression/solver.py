"""The ε-insensitive regression in its dual form, many problems and outputs at once.

    minimise  ½ βᵀKβ − yᵀβ + ε|β|₁   subject to  |β_j| ≤ C  (and Σ_j β_j = 0 where there is a bias),   β = α − α̃

One eigendecomposition of K per head serves all outputs and every step length: ADMM splits the quadratic from the box
and the ε-term, whose proximal map is a soft threshold and a clip. A primal-dual active set then solves the optimality
conditions exactly on the points that are neither zero nor at the bound.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

CHECK = 20
"""ADMM steps between two looks at the duality gap."""

POLISH = 12
"""Active-set steps at most."""

EXACT = 1e-6
"""Below this tolerance the active set has the last word: it meets the centring constraint and the bounds exactly."""

CHUNK_BYTES = 1 << 28
"""Memory for the systems of the active set; more outputs take turns."""


ROUNDING = 1e-12
"""A deviation from the tube below this share of the largest target is rounding, not slack."""


class Solution(NamedTuple):
    """β [P, N, Dv], the bias [P, 1, Dv], and the steps that were taken."""

    beta: Tensor
    bias: Tensor
    iterations: int


class Problem(NamedTuple):
    """P problems with Dv outputs each."""

    kernel: Tensor  # [P, N, N], positive semi-definite; zero where there is no point
    targets: Tensor  # [P, N, Dv]
    c: Tensor  # [P, N or 1, 1]
    epsilon: Tensor  # [P, N or 1, 1]
    seen: Tensor  # bool [P, N, 1]: which points there are
    ones: Tensor  # [P, N, 1]: what the bias adds to each point
    bias: bool  # whether there is one


def solve(p: Problem, tol: float, max_iter: int) -> Solution:
    """Both stages; the better of the two, output by output.

    Points are first scaled to K_jj = 1: β_j ↦ β_j √K_jj. The normalisers of one head can differ by many orders of
    magnitude, and the conditioning that they cause goes away with that.
    """
    diagonal = p.kernel.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    d = diagonal.sqrt().where(diagonal > 0, 1.0)
    scaled = Problem(
        p.kernel / (d * d.transpose(-1, -2)), p.targets / d, p.c * d, p.epsilon / d, p.seen, p.ones / d, p.bias
    )
    eigenvalues, eigenvectors = torch.linalg.eigh(scaled.kernel)
    beta, bias, steps = _admm(scaled, eigenvalues.clamp(min=0), eigenvectors, tol, max_iter)
    if tol < EXACT or bool((relative_gap(scaled, beta, bias) > tol).any()):
        beta, bias = _polish(scaled, beta, bias, tol)
    return Solution(beta / d, bias, steps)


def deviation(p: Problem, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(y − f, slack): what is left of the targets, and by how much that leaves the tube."""
    residual = (p.targets - p.kernel @ beta - p.ones * bias).where(p.seen, 0.0)
    largest = (p.targets / p.ones.where(p.seen, 1.0)).abs().amax(1, keepdim=True)
    return residual, (residual.abs() - p.epsilon - ROUNDING * largest * p.ones).clamp(min=0)


def objectives(p: Problem, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(primal, dual) objective [P, Dv] at β and the weights that it makes."""
    norm = (beta * (p.kernel @ beta)).sum(1) / 2
    _, slack = deviation(p, beta, bias)
    primal = norm + torch.where(slack > 0, p.c * slack, 0.0).sum(1)  # no slack costs nothing, even at infinite C
    dual = (p.targets * beta).sum(1) - (p.epsilon * beta.abs()).sum(1) - norm
    return primal, dual


def relative_gap(p: Problem, beta: Tensor, bias: Tensor) -> Tensor:
    """|primal − dual| / (1 + |primal| + |dual|), [P, Dv]; 1 where the primal is infinite."""
    primal, dual = objectives(p, beta, bias)
    gap = (primal - dual).abs() / (1 + primal.abs() + dual.abs())
    return torch.where(primal.isfinite(), gap, 1.0)


def off_centre(p: Problem, beta: Tensor) -> Tensor:
    """|Σβ| / Σ|β|, which the bias forces to zero: [P, Dv]."""
    if not p.bias:
        return torch.zeros_like(beta[:, 0])
    return (p.ones * beta).sum(1).abs() / (p.ones * beta).abs().sum(1).clamp(min=1e-300)


def _admm(p: Problem, values: Tensor, vectors: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Tensor, int]:
    count, n, outputs = p.targets.shape
    rho = values.amax(-1)[:, None, None].clamp(min=1e-12).expand(count, 1, outputs) / n
    z = torch.zeros_like(p.targets)
    u = torch.zeros_like(z)
    ones_rotated = vectors.transpose(-1, -2) @ p.ones
    best, best_bias = z, z[:, :1]
    best_short = torch.full_like(z[:, 0], torch.inf)
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
            short = relative_gap(p, z, b) + off_centre(p, z)
            better = short < best_short
            best = torch.where(better[:, None], z, best)
            best_bias = torch.where(better[:, None], b, best_bias)
            best_short = torch.where(better, short, best_short)
            if bool((best_short <= tol).all()):
                break
            if tol < EXACT and bool((best_short <= math.sqrt(tol) / 10).all()) and step % (5 * CHECK) == 0:
                break  # near enough for the active set
            # balance the residuals: the distance between the two copies, and how far one of them still moves
            primal, dual = (x - z).norm(dim=1, keepdim=True), rho * (z - before).norm(dim=1, keepdim=True)
            factor = (primal / dual.clamp(min=1e-300)).sqrt().clamp(0.2, 5.0)
            factor = torch.where((factor > 0.8) & (factor < 1.25), 1.0, factor)
            rho, u = rho * factor, u / factor
    return best, best_bias, step


def _prox(x: Tensor, threshold: Tensor, c: Tensor) -> Tensor:
    """argmin_z threshold·|z| + (z − x)²/2 over the box |z| ≤ c."""
    return (x.sign() * (x.abs() - threshold).clamp(min=0)).clamp(-c, c)


def _polish(p: Problem, beta: Tensor, bias: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Guess which points are zero, free and at the bound; solve for the free ones; look again."""
    count, n, outputs = beta.shape
    per_turn = max(1, CHUNK_BYTES // (8 * (n + 1) ** 2 * count))
    betas, biases = [], []
    for start in range(0, outputs, per_turn):
        part = slice(start, start + per_turn)
        one = p._replace(targets=p.targets[..., part])
        best, best_bias = beta[..., part], bias[..., part]
        best_short = relative_gap(one, best, best_bias) + off_centre(one, best)
        # from where ADMM came to; and from nothing, which is near where C is large and targets differ in scale
        for now, b in ((best, best_bias), (torch.zeros_like(best), torch.zeros_like(best_bias))):
            for _ in range(POLISH):
                now, b = _active_set_step(one, now, b)
                short = (relative_gap(one, now, b) + off_centre(one, now)).nan_to_num(torch.inf)
                better = short < best_short.clamp(min=tol)
                best = torch.where(better[:, None], now, best)
                best_bias = torch.where(better[:, None], b, best_bias)
                best_short = torch.where(better, short, best_short)
                if bool((best_short <= tol).all()):
                    break
            if bool((best_short <= tol).all()):
                break
        betas.append(best)
        biases.append(best_bias)
    return torch.cat(betas, -1), torch.cat(biases, -1)


def _active_set_step(p: Problem, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """One semi-smooth Newton step on the optimality conditions; every output has a system of its own."""
    n = beta.shape[1]
    residual = p.targets - p.kernel @ beta - p.ones * bias
    trial = beta + residual  # a unit step, since K_jj = 1
    sign = trial.sign()
    zero = (trial.abs() <= p.epsilon) | ~p.seen
    bound = (trial.abs() - p.epsilon >= p.c) & ~zero
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
        border = mask.unsqueeze(-1) * p.ones[:, None]
        any_free = (mask.sum(-1) > 0).to(beta.dtype)[..., None, None]
        corner = 1 - any_free  # no free point leaves the bias as it is
        system = torch.cat([torch.cat([system, border], -1), torch.cat([border.transpose(-1, -2), corner], -1)], -2)
        centre = -(p.ones * fixed).sum(1)[..., None, None]
        keep = bias.movedim(1, 2).unsqueeze(-1)
        right = torch.cat([right, torch.where(any_free > 0, centre, keep)], -2)
    solved, info = torch.linalg.solve_ex(system, right)
    solved = torch.where((info == 0)[..., None, None], solved, 0.0).nan_to_num()
    found = solved[..., :n, 0].movedim(2, 1)
    b = solved[..., n:, 0].movedim(2, 1) if p.bias else bias
    return torch.where(free, found, fixed).clamp(-p.c, p.c), b
