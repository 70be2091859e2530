"""The ε-insensitive regression in its dual form, many problems and outputs at once.

    minimise  ½ βᵀKβ − yᵀβ + ε|β|₁   subject to  |β_j| ≤ C  (and Σ_j β_j = 0 where there is a bias),   β = α − α̃

One factorisation of K per head serves all outputs: ADMM splits the quadratic from the box and the ε-term, whose
proximal map is a soft threshold and a clip. A primal-dual active set then solves the optimality conditions exactly on
the points that are neither zero nor at the bound. Where K is singular to rounding it may not come to an end; those
outputs are left to an interior-point method.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .interior import interior
from .regressions import Regressions, off_centre, prox, relative_gap, shortfall
from .spd import Factored

CHECK_EVERY = 10
"""ADMM steps between two looks at the duality gap."""

LEAST_STEP = 1.0
"""The least first step length ρ, for kernels with K_jj = 1; it follows the residuals from there."""

TIGHT_BOX_STEP = 2.0
"""The first step length where the box is tight, over |y|/C."""

ACTIVE_SET_STEPS = 12
"""Active-set steps at most."""

FLOAT32_GAP = 1e-6
FLOAT32_STEPS = 200
"""A gap no smaller than this is reached in float32, or given up after so many steps; it is measured in float64. For a
smaller one the active set has the last word: it meets the centring constraint and the bounds exactly."""

NEGLIGIBLE = 1e-16
"""What f moves by, over the size of the targets, where it is as good as nothing."""

CHUNK_BYTES = 1 << 28
"""Memory for the systems of the active set, and of the interior; more outputs take turns."""


class Solution(NamedTuple):
    """β [P, N, Dv], the bias [P, 1, Dv], and the steps that were taken."""

    beta: Tensor
    bias: Tensor
    iterations: int


def solve(p: Regressions, tol: float, max_iter: int) -> Solution:
    """All stages, each for what is still short of `tol`; the best of them, output by output.

    Points are first scaled to K_jj = 1: β_j ↦ β_j √K_jj. The normalisers of one head can differ by many orders of
    magnitude, and the conditioning that they cause goes away with that. Where C·K_jj is nothing beside the targets, β_j
    moves no f, and is scaled as if it were that little more: the bias sees all points, and their scales must not
    differ by more than it takes.
    """
    diagonal = p.kernel.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    size = torch.maximum(p.targets.abs().amax((1, 2), keepdim=True), p.epsilon)
    least = (NEGLIGIBLE * size / p.c).expand_as(diagonal)
    d = torch.maximum(diagonal, least).sqrt().where(p.seen & (diagonal + least > 0), 1.0)
    scaled = Regressions(
        p.kernel / (d * d.transpose(-1, -2)), p.targets / d, p.c * d, p.epsilon / d, p.seen, p.ones / d, p.bias
    )
    single = bool(scaled.targets.abs().amax() < 1e6) and bool(scaled.c.amin() > 1e-6)
    dtype = torch.float32 if single else torch.float64
    beta, bias, steps = _admm(scaled, max(tol, FLOAT32_GAP), min(max_iter, FLOAT32_STEPS), dtype)
    if tol < FLOAT32_GAP or bool((shortfall(scaled, beta, bias) > tol).any()):
        beta, bias = _active_set(scaled, beta, bias, tol)
    if steps < max_iter and bool((shortfall(scaled, beta, bias) > tol).any()):
        beta, bias, more = _interior_point(scaled, beta, bias, tol, max_iter - steps)
        steps += more
    return Solution(beta / d, bias, steps)


def _interior_point(
    p: Regressions, beta: Tensor, bias: Tensor, tol: float, max_iter: int
) -> tuple[Tensor, Tensor, int]:
    """The interior-point method for the outputs that are still short of `tol`, where it does better."""
    beta, bias = beta.clone(), bias.clone()
    short = (shortfall(p, beta, bias) > tol).nonzero()
    most = 0
    for part in short.split(max(1, CHUNK_BYTES // (8 * p.kernel[0].numel()))):
        of, output = part.unbind(1)
        one = Regressions(
            p.kernel[of], p.targets[of, :, output, None], p.c[of], p.epsilon[of], p.seen[of], p.ones[of], p.bias
        )
        old, old_bias = beta[of, :, output, None], bias[of, :, output, None]
        # the gap is of second order in f, and two more digits of it cost a step
        new, new_bias, steps = interior(one, tol / 100, max_iter)
        better = (shortfall(one, new, new_bias) < shortfall(one, old, old_bias))[:, None]
        beta[of, :, output] = torch.where(better, new, old).squeeze(-1)
        bias[of, :, output] = torch.where(better, new_bias, old_bias).squeeze(-1)
        most = max(most, steps)
    return beta, bias, most


def _admm(exact: Regressions, tol: float, max_iter: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    p = Regressions(
        exact.kernel.to(dtype), exact.targets.to(dtype), exact.c.to(dtype), exact.epsilon.to(dtype), exact.seen,
        exact.ones.to(dtype), exact.bias,
    )  # fmt: skip
    # where the box is tight, β is of the size of C and not of y: the step length is their ratio
    size = (p.targets.abs().mean(-1, keepdim=True) / p.c).where(p.seen, 0.0).sum(1, keepdim=True)
    rho = (TIGHT_BOX_STEP * size / p.seen.sum(1, keepdim=True).clamp(min=1)).clamp(LEAST_STEP, 1e6)
    inverse, inverse_ones = _invert(p, rho)
    z = torch.zeros_like(p.targets)
    u = torch.zeros_like(z)
    best, best_bias = torch.zeros_like(exact.targets), torch.zeros_like(exact.targets[:, :1])
    best_short = torch.full_like(best[:, 0], torch.inf)
    b = torch.zeros_like(z[:, :1])
    step = 0
    for step in range(1, max_iter + 1):
        x = inverse @ torch.addcmul(p.targets, rho, z - u)
        if p.bias:
            b = (p.ones * x).sum(1, keepdim=True) / (p.ones * inverse_ones).sum(1, keepdim=True)
            x = x - inverse_ones * b
        x = torch.lerp(z, x, 1.6)  # over-relaxation
        before, moved = z, x + u
        z = prox(moved, p.epsilon / rho, p.c).where(p.seen, 0.0)
        if (
            step % CHECK_EVERY == 0 and (step % (5 * CHECK_EVERY) == 0 or _settled(before, z, tol))
        ) or step == max_iter:
            now, bias = z.to(best.dtype).clamp(-exact.c, exact.c), b.to(best.dtype)
            gap = relative_gap(exact, now, bias).nan_to_num(torch.inf)
            if p.bias and (step == max_iter or bool((gap <= 4 * tol).all())):  # worth its price near the end
                now = _centre(p, moved, rho).to(best.dtype).clamp(-exact.c, exact.c)
                gap = relative_gap(exact, now, bias).nan_to_num(torch.inf)
            short = gap + off_centre(exact, now)
            better = short < best_short
            best = torch.where(better[:, None], now, best)
            best_bias = torch.where(better[:, None], bias, best_bias)
            best_short = torch.where(better, short, best_short)
            if bool((best_short <= tol).all()):
                break
        u = moved - z
        if step % (2 * CHECK_EVERY) == 0:
            # balance the residuals: the distance between the two copies, and how far one of them still moves
            primal = (x - z).square().sum((1, 2), keepdim=True).sqrt()
            dual = rho * (z - before).square().sum((1, 2), keepdim=True).sqrt()
            factor = (primal / dual.clamp(min=1e-300)).sqrt().clamp(0.1, 10.0)
            within = (rho * factor > 1e-6) & (rho * factor < 1e6)
            factor = torch.where((factor > 0.5) & (factor < 2.0) | ~within, 1.0, factor)
            if bool((factor != 1).any()):
                rho, u = rho * factor, u / factor
                inverse, inverse_ones = _invert(p, rho)
    return best, best_bias, step


def _settled(before: Tensor, now: Tensor, tol: float) -> bool:
    """Whether a look at the gap is worth its price: while a step moves by more than √tol, the gap is over tol."""
    return bool(((now - before).square().sum(1) <= tol * now.square().sum(1)).all())


def _invert(p: Regressions, rho: Tensor) -> tuple[Tensor, Tensor]:
    """(K + ρI)⁻¹, written out: one product per step serves all outputs. And its product with the ones."""
    n = p.kernel.shape[-1]
    shifted = p.kernel + rho * torch.eye(n, dtype=rho.dtype, device=rho.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(shifted))
    return inverse, inverse @ p.ones


def _centre(p: Regressions, x: Tensor, rho: Tensor) -> Tensor:
    """The proximal point with Σβ = 0: a shift of x along the ones, found by bisection."""
    low = (
        -(x / p.ones.where(p.seen, 1.0)).abs().amax(1, keepdim=True)
        - (p.epsilon / rho / p.ones.where(p.seen, 1.0)).amax()
    )
    high = -low
    for _ in range(25 if x.dtype == torch.float32 else 60):
        middle = (low + high) / 2
        total = (p.ones * prox(x - middle * p.ones, p.epsilon / rho, p.c)).sum(1, keepdim=True)
        low, high = torch.where(total > 0, middle, low), torch.where(total > 0, high, middle)
    return prox(x - (low + high) / 2 * p.ones, p.epsilon / rho, p.c).where(p.seen, 0.0)


def _active_set(p: Regressions, beta: Tensor, bias: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Guess which points are zero, free and at the bound; solve for the free ones; look again."""
    count, n, outputs = beta.shape
    per_turn = max(1, CHUNK_BYTES // (8 * (n + 1) ** 2 * count))
    betas, biases = [], []
    for start in range(0, outputs, per_turn):
        part = slice(start, start + per_turn)
        one = p._replace(targets=p.targets[..., part])
        best, best_bias = beta[..., part], bias[..., part]
        best_short = shortfall(one, best, best_bias)
        # from where ADMM came to; and from nothing, which is near where C is large and targets differ in scale
        for now, b in ((best, best_bias), (torch.zeros_like(best), torch.zeros_like(best_bias))):
            for _ in range(ACTIVE_SET_STEPS):
                now, b = _active_set_step(one, now, b)
                short = shortfall(one, now, b)
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


def _active_set_step(p: Regressions, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """One semi-smooth Newton step on the optimality conditions; every output has a system of its own."""
    residual = p.targets - p.kernel @ beta - p.ones * bias
    trial = beta + residual  # a unit step, since K_jj = 1
    sign = trial.sign()
    zero = (trial.abs() <= p.epsilon) | ~p.seen
    bound = (trial.abs() - p.epsilon >= p.c) & ~zero
    free = ~(zero | bound)
    fixed = torch.where(bound, sign * p.c, 0.0)
    right = (p.targets - p.epsilon * sign - p.kernel @ fixed).where(free, 0.0)
    # free rows and columns of K, the identity elsewhere
    mask = free.movedim(1, 2).to(beta.dtype)  # [P, Dv, N]
    system = p.kernel[:, None] * mask.unsqueeze(-1) * mask.unsqueeze(-2)
    system.diagonal(dim1=-2, dim2=-1).add_(1 - mask)
    right = right.movedim(1, 2).unsqueeze(-1)  # [P, Dv, N, 1]
    if not p.bias:
        return torch.where(free, Factored(system).solve(right)[..., 0].movedim(2, 1), fixed).clamp(-p.c, p.c), bias
    border = mask.unsqueeze(-1) * p.ones[:, None]
    solved = Factored(system).solve(torch.cat([right, border], -1))
    alone, along = solved[..., :1], solved[..., 1:]
    centre = -(p.ones * fixed).sum(1)[..., None, None]
    b = ((border * alone).sum(-2, keepdim=True) - centre) / (border * along).sum(-2, keepdim=True)
    found = (alone - along * b)[..., 0].movedim(2, 1)
    b = b[..., 0].movedim(2, 1)
    b = torch.where(free.any(1, keepdim=True) & b.isfinite(), b, bias)  # no free point leaves the bias as it is
    return torch.where(free, found, fixed).clamp(-p.c, p.c).nan_to_num(), b
