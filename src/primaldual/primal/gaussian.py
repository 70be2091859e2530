"""The Gaussian kernel, known by its logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ._spec import is_number, operand
from .features import LogKernel


@dataclass(frozen=True)
class Gaussian(LogKernel):
    """κ(x, y) = exp(−|x − y|²/(2b²√D)): exp(−|z|²/2) times every monomial ∏ z_d^n_d / √(n_1!…n_D!) of z = x/(b D^(1/4))

    With b = 1 it is the exponential kernel between points whose length is taken out, exp(x·y/√D) exp(−|x|²/(2√D))
    exp(−|y|²/(2√D)). Under `KernelSum` the factor of the query cancels and that of a key is a bias on its score
    (the Nadaraya–Watson estimator as attention), so that no key gains by being long. It depends on differences alone: a
    re-centring does nothing. A factor on the scores (`scale`) takes the place of 1/√D. h is a scalar function of x, and
    f is exactly the paper's.
    """

    bandwidth: float = 1.0
    scaled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (is_number(self.bandwidth) and 0 < self.bandwidth < math.inf):
            raise ValueError(f"Gaussian: bandwidth must be a positive finite number, got {self.bandwidth!r}")

    def factor(self, head_dim: int) -> float:
        """1/(b²√D), the factor on x·y."""
        return 1 / (self.bandwidth**2 * math.sqrt(head_dim))

    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        factor = self.factor(x.shape[-1])
        norms = (part.square().sum(-1) for part in (x, y))
        of_x, of_y = next(norms).unsqueeze(-1), next(norms).unsqueeze(-2)
        return ((x @ y.transpose(-1, -2) - (of_x + of_y) / 2) * factor).clamp(max=0.0)

    def text(self, x: str = "x") -> str:
        z = f"{operand(x)}/({self.bandwidth:g}·D^(1/4))"
        return f"exp(−|z|²/2) times every monomial ∏ z_d^n_d / √(n_1!⋯n_D!) of z = {z}"

    def latex(self, x: str = "x") -> str:
        monomial = r"\left(\frac{z_1^{n_1}\cdots z_D^{n_D}}{\sqrt{n_1!\cdots n_D!}}\right)_{n\in\mathbb{N}^D}"
        return rf"e^{{-\|z\|^2/2}}{monomial},\quad z={operand(x)}/({self.bandwidth:g}\sqrt[4]{{D}})"
