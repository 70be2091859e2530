"""Ridge regression with its penalty chosen by the exact error of leaving each case out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALPHAS = tuple(10.0 ** (i / 2) for i in range(-14, 3))
"""Of each feature: the penalty is so many times the number of features, which is the mean of K's diagonal."""


@dataclass(frozen=True, eq=False)
class Ridge:
    """A fitted regression,  y = (x − mean) / std · coefficients + intercept.

    Args:
        mean, std: [features], of the training cases; a feature that is the same in all of them has coefficients of 0.
        coefficients: [features, targets].
        intercept: [targets].
        alpha: the penalty for each feature.
        held_out: [cases, targets]: for every training case what the regression of all others predicts for it.
    """

    mean: Tensor
    std: Tensor
    coefficients: Tensor
    intercept: Tensor
    alpha: float
    held_out: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """[cases, targets] in float64."""
        return ((features.double() - self.mean) / self.std) @ self.coefficients + self.intercept


@torch.no_grad()
def ridge(
    features: Tensor, targets: Tensor, alphas: Sequence[float] = ALPHAS,
    loss: Callable[[Tensor], float] | None = None, weights: Tensor | None = None, least: float = 1e-9,
) -> Ridge:  # fmt: skip
    """min_W Σ_i w_i |y_i − W x_i − b|² + α |W|² on standardised features, with the α of the least left-out error.

    In the dual W = Xᵀ A with A = (K + αI)⁻¹ (Y − ȳ), K = X Xᵀ; for each case the residual of the regression of the
    others is  α A_i / (α (K + αI)⁻¹_ii − 1/n),  so that one eigendecomposition, of the smaller of the two Gram
    matrices, serves every α. With weights, rows of X and Y are multiplied by √w_i, and 1/n is w_i / Σw.

    Args:
        features: [cases, features].
        targets: [cases, targets].
        alphas: to choose among, for each feature.
        loss: of what is predicted for cases that are left out, [cases, targets]; the mean square unless given.
        weights: of the cases, positive; all alike unless given.
        least: features whose deviation is not larger, in units of 1 + |mean|, are taken to stand still.
    """
    x, y = features.double(), targets.double()
    share = torch.full((len(x),), 1 / len(x), dtype=x.dtype, device=x.device)
    if weights is not None:
        share = weights.to(x) / weights.to(x).sum()
    root = (share * len(x)).sqrt()[:, None]
    mean = share @ x
    std = (share @ (x - mean).square()).sqrt()
    still = std <= least * (1 + mean.abs())
    std = torch.where(still, torch.ones_like(std), std)
    x = torch.where(still, 0.0, (x - mean) / std) * root
    given, intercept = y, share @ y
    y = (y - intercept) * root
    small = x.shape[1] < len(x)
    values, vectors = torch.linalg.eigh(x.T @ x if small else x @ x.T)
    values = values.clamp(min=0.0)
    basis = (x @ vectors) / values.sqrt().clamp(min=1e-150) if small else vectors
    if small:
        basis = torch.where(values > 1e-12 * values[-1], basis, 0.0)
    inside = basis.T @ y
    best: tuple[float, float, Tensor, Tensor] | None = None
    for each in alphas:
        alpha = each * x.shape[1]
        # α (K + αI)⁻¹ = I − U λ/(λ + α) Uᵀ, in the basis U of the cases
        kept = values / (values + alpha)
        residual = y - basis @ (kept[:, None] * inside)
        free = (1 - (basis.square() * kept).sum(1) - share).clamp(min=1e-9)
        left_out = residual / root / free[:, None]
        error = float((share @ left_out.square()).mean()) if loss is None else loss(given - left_out)
        if best is None or error < best[0]:
            best = error, each, residual / alpha, left_out
    assert best is not None
    _, chosen, dual, left_out = best
    return Ridge(mean, std, x.T @ dual, intercept, chosen, given - left_out)
