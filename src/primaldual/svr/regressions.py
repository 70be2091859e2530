"""The regressions to solve, many at once, and how far a β is from solving them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-12
"""A deviation from the tube below this share of the largest target is rounding, not slack."""


class Regressions(NamedTuple):
    """P problems with Dv outputs each."""

    kernel: Tensor  # [P, N, N], positive semi-definite; zero where there is no point
    targets: Tensor  # [P, N, Dv]
    c: Tensor  # [P, N or 1, 1]
    epsilon: Tensor  # [P, N or 1, 1]
    seen: Tensor  # bool [P, N, 1]: which points there are
    ones: Tensor  # [P, N, 1]: what the bias adds to each point
    bias: bool  # whether there is one


class Units(NamedTuple):
    """What to divide by so that no K_jj, target or 1/C is over 1, and the objectives are of order 1: [P, 1, 1] each.

    β is then of order 1 or less: in a multiple of target/kernel.
    """

    log_kernel: Tensor
    target: Tensor


def unit_of(targets: Tensor, epsilon: float, log_scale: Tensor, log_c: Tensor) -> Units:
    """The units of problems whose largest K_jj is exp(log_scale). A price that lets no f reach its target is 1."""
    largest = targets.abs().amax((1, 2), keepdim=True).clamp(min=epsilon)
    target = torch.where(largest > 0, largest, 1.0).log2().ceil().exp2()  # a power of 2: no target is rounded
    return Units(torch.maximum(log_scale, target.log() - log_c), target)


def deviation(p: Regressions, f: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(y − f − b, slack), f = Kβ: what is left of the targets, and by how much that leaves the tube."""
    residual = (p.targets - f - p.ones * bias).where(p.seen, 0.0)
    largest = (p.targets / p.ones.where(p.seen, 1.0)).abs().amax(1, keepdim=True)
    return residual, (residual.abs() - p.epsilon - ROUNDING * largest * p.ones).clamp(min=0)


def objectives(p: Regressions, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(primal, dual) objective [P, Dv] at β and the weights that it makes."""
    f = p.kernel @ beta
    norm = (beta * f).sum(1) / 2
    _, slack = deviation(p, f, bias)
    primal = norm + torch.where(slack > 0, p.c * slack, 0.0).sum(1)  # no slack costs nothing, even at infinite C
    dual = (p.targets * beta).sum(1) - (p.epsilon * beta.abs()).sum(1) - norm
    return primal, dual


def relative_gap(p: Regressions, beta: Tensor, bias: Tensor) -> Tensor:
    """(primal − dual) / (1 + |primal| + |dual|), [P, Dv]; 1 where the primal is infinite.

    primal − dual = Σ_j (C − |β_j|)·slack_j + |β_j|·max(|r_j|, ε) − β_j r_j, less b Σβ: no term is negative, so that
    nothing cancels and a gap far under the rounding of the objectives is still measured.
    """
    f = p.kernel @ beta
    residual, slack = deviation(p, f, bias)
    size = beta.abs()
    unpaid = torch.where(slack > 0, (p.c - size) * slack, 0.0)
    unused = size * torch.maximum(residual.abs(), p.epsilon) - beta * residual
    gap = ((unpaid + unused).sum(1) - (bias * p.ones * beta).sum(1)).abs()
    primal = (beta * f).sum(1) / 2 + torch.where(slack > 0, p.c * slack, 0.0).sum(1)
    return torch.where(primal.isfinite(), gap / (1 + primal.abs() + (primal - gap).abs()), 1.0)


def off_centre(p: Regressions, beta: Tensor) -> Tensor:
    """|Σβ| / Σ|β|, which the bias forces to zero: [P, Dv]."""
    if not p.bias:
        return torch.zeros_like(beta[:, 0])
    return (p.ones * beta).sum(1).abs() / (p.ones * beta).abs().sum(1).clamp(min=1e-300)


def shortfall(p: Regressions, beta: Tensor, bias: Tensor) -> Tensor:
    """How far from solved: the gap, and with a bias how far from centred; [P, Dv]."""
    return (relative_gap(p, beta, bias) + off_centre(p, beta)).nan_to_num(torch.inf)


def prox(x: Tensor, threshold: Tensor, c: Tensor) -> Tensor:
    """argmin_z threshold·|z| + (z − x)²/2 over the box |z| ≤ c."""
    return (x - x.clamp(-threshold, threshold)).clamp(-c, c)
