"""The regression by an interior-point method, for kernels that are singular to rounding.

There residuals do not tell an active set: moving β along a direction that K takes to rounding changes none of them, but
may leave the box or change signs, and moves the function away from the keys. The central path

    α_j λ_j = (C − α_j) ν_j = μ,   f_j − y_j + ε = λ_j − ν_j,   and the same for α̃ with y_j − f_j

stays inside. Each Newton step (Mehrotra's predictor and corrector) takes μ, the duality gap over 4N, down by a factor.
A proximal term ½ PROXIMAL |β − centre|² keeps β short: where K says nothing, the path would run to the middle of the
box, and large β that cancel bring rounding into f. The centre is zero until the term shows, then β itself, so that it
leaves the solution alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .regressions import Regressions, deviation, prox, shortfall
from .spd import Factored

STEPS = 40
"""Newton steps at most; about 20 come to rounding."""

PROXIMAL = 1e-13
"""The weight of the proximal term, for kernels with K_jj = 1: over rounding, under every eigenvalue that matters."""

TO_BOUNDARY = 0.995
"""The share of the way to the boundary that a step goes."""

PROXIMAL_SHOWS = 1e-2
"""The term shows once μ is this small a part of it: by then what only the barrier wanted of β is gone."""

START_WIDTH = 1e8
"""The path starts in the middle of the box, or this many times the size of y away."""

NO_BOUND = 1e100
"""A price over this is as good as none."""


class Path(NamedTuple):
    """A point of the path, or a step along it; the last dimension is α and α̃."""

    alpha: Tensor  # [P, N, 2]
    room: Tensor  # [P, N, 2]: C − α
    low: Tensor  # [P, N, 2]: λ, the multipliers of α ≥ 0
    high: Tensor  # [P, N, 2]: ν, those of α ≤ C
    bias: Tensor  # [P, 1, 1]

    @property
    def beta(self) -> Tensor:
        """α − α̃: [P, N, 1]."""
        return self.alpha[..., :1] - self.alpha[..., 1:]

    @property
    def mu(self) -> Tensor:
        """The mean product: [P, 1, 1]."""
        return (self.alpha * self.low + self.room * self.high).mean((1, 2), keepdim=True) / 2

    def plus(self, step: Path, share: Tensor) -> Path:
        """Further by this share of the step."""
        return Path(*(x + share * dx for x, dx in zip(self, step, strict=True)))

    def to_boundary(self, step: Path) -> Tensor:
        """The share of the step at which the first of α, C − α, λ, ν is zero: [P, 1, 1]."""
        pairs = zip(self[:4], step[:4], strict=True)
        return torch.stack([torch.where(dx < 0, -x / dx, torch.inf).amin((1, 2), True) for x, dx in pairs]).amin(0)


def interior(p: Regressions, tol: float, max_iter: int) -> tuple[Tensor, Tensor, int]:
    """(β [P, N, 1], bias [P, 1, 1], steps) of problems with K_jj = 1 and one output each: the best by its gap."""
    at = _start(p)
    centre = best = torch.zeros_like(p.targets)
    best_bias = torch.zeros_like(at.bias)
    best_short = shortfall(p, best, best_bias)
    steps = 0
    for _ in range(min(max_iter, STEPS)):
        steps += 1
        at = _step(p, at, centre)
        shows = at.mu < PROXIMAL_SHOWS * PROXIMAL * at.beta.square().mean(1, keepdim=True)
        centre = torch.where(shows, at.beta, centre)
        beta = _snap(p, at)
        short = shortfall(p, beta, at.bias)
        better = short < best_short
        best = torch.where(better[:, None], beta, best)
        best_bias = torch.where(better[:, None], at.bias, best_bias)
        best_short = torch.where(better, short, best_short)
        if bool((best_short <= tol).all()):
            break
    return best, best_bias, steps


def _start(p: Regressions) -> Path:
    """α = α̃ in the middle of the box, with products that are all the same."""
    scale = torch.maximum(p.targets.abs(), p.epsilon).amax(1, keepdim=True).clamp(min=1e-300)
    c = p.c.clamp(max=NO_BOUND).expand_as(p.targets)
    alpha = torch.minimum(c / 2, START_WIDTH * scale).expand(-1, -1, 2)
    room = c - alpha
    mu = scale * alpha.amax((1, 2), keepdim=True)
    return Path(alpha, room, mu / alpha, mu / room, torch.zeros_like(scale))


def _step(p: Regressions, at: Path, centre: Tensor) -> Path:
    """Aim at μ = 0; from how far that goes, choose the μ to aim at, and correct for the curvature met on the way."""
    stiff = at.low / at.alpha + at.high / at.room
    factored = Factored(p.kernel + torch.diag_embed(stiff.prod(-1) / stiff.sum(-1) + PROXIMAL))
    low, high = -at.alpha * at.low, -at.room * at.high
    predicted = _newton(p, at, centre, factored, stiff, low, high)
    reached = at.plus(predicted, at.to_boundary(predicted).clamp(max=1.0)).mu
    aim = at.mu * (reached / at.mu).clamp(0, 1) ** 3
    low, high = low + aim - predicted.alpha * predicted.low, high + aim - predicted.room * predicted.high
    step = _newton(p, at, centre, factored, stiff, low, high)
    return at.plus(step, (TO_BOUNDARY * at.to_boundary(step)).clamp(max=1.0))


def _newton(
    p: Regressions, at: Path, centre: Tensor, factored: Factored, stiff: Tensor, low: Tensor, high: Tensor
) -> Path:  # fmt: skip
    """The step that adds `low` to αλ and `high` to (C − α)ν and meets the other conditions, to first order."""
    sign = stiff.new_tensor([1.0, -1.0])
    slope = p.kernel @ at.beta - p.targets + p.ones * at.bias + PROXIMAL * (at.beta - centre)
    push = sign * slope + p.epsilon - at.low + at.high - low / at.alpha + high / at.room
    other, total = stiff.flip(-1), stiff.sum(-1, keepdim=True)
    right = -(sign * other * push).sum(-1, keepdim=True) / total
    bias = torch.zeros_like(at.bias)
    if p.bias:
        beta, along = factored.solve(torch.cat([right, p.ones], -1)).split(1, -1)
        bias = (p.ones * (beta + at.beta)).sum(1, keepdim=True) / (p.ones * along).sum(1, keepdim=True)
        beta = beta - along * bias
    else:
        beta = factored.solve(right)
    alpha = (sign * other * beta - push.sum(-1, keepdim=True)) / total
    return Path(alpha, -alpha, (low - at.low * alpha) / at.alpha, (high + at.high * alpha) / at.room, bias)


def _snap(p: Regressions, at: Path) -> Tensor:
    """β with exact zeros and bounds where the optimality conditions ask for them."""
    beta = at.beta.where(p.seen, 0.0).clamp(-p.c, p.c)
    residual, _ = deviation(p, p.kernel @ beta, at.bias)
    trial = prox(beta + residual, p.epsilon, p.c)
    return torch.where((trial == 0) | (trial.abs() >= p.c), trial, beta)
