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
    loss: Callable[[Tensor], float] | None = None,
) -> Ridge:  # fmt: skip
    """min_W Σ_i |y_i − W x_i − b|² + α |W|² on standardised features, with the α of the least left-out error.

    In the dual W = Xᵀ A with A = (K + αI)⁻¹ (Y − ȳ), K = X Xᵀ; for each case the residual of the regression of the
    others is  α A_i / (α (K + αI)⁻¹_ii − 1/n),  so that one eigendecomposition, of the smaller of the two Gram
    matrices, serves every α.

    Args:
        features: [cases, features].
        targets: [cases, targets].
        alphas: to choose among, for each feature.
        loss: of what is predicted for cases that are left out, [cases, targets]; the mean square unless given.
    """
    x, y = features.double(), targets.double()
    cases = len(x)
    mean, std = x.mean(0), x.std(0, correction=0)
    still = std <= 1e-9 * (1 + mean.abs())
    std = torch.where(still, torch.ones_like(std), std)
    x = torch.where(still, 0.0, (x - mean) / std)
    intercept = y.mean(0)
    y = y - intercept
    small = x.shape[1] < cases
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
        free = (1 - (basis.square() * kept).sum(1) - 1 / cases).clamp(min=1e-9)
        left_out = residual / free[:, None]
        error = float(left_out.square().mean()) if loss is None else loss(y + intercept - left_out)
        if best is None or error < best[0]:
            best = error, each, residual / alpha, left_out
    assert best is not None
    _, chosen, dual, left_out = best
    return Ridge(mean, std, x.T @ dual, intercept, chosen, y + intercept - left_out)
