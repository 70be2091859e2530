"""h, the scalar that divides the features of the primal layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._spec import Spec


@dataclass(frozen=True)
class Normalizer(Spec):
    """Base class: h(x), given x and the kernel sum Σ_{j∈S} κ(x, k_j).

    Every h that is a function of these two runs in every executor: neither the full kernel
    nor the keys are needed once the sum is known.
    """

    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        """h at the mapped points x: [..., L, D] and [..., L, 1] to [..., L, 1]."""
        raise NotImplementedError(f"{type(self).__name__} must implement h(x, kernel_sum)")


@dataclass(frozen=True)
class KernelSum(Normalizer):
    """h(x) = Σ_{j∈S} κ(x, k_j): the weights of a row sum to one"""

    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        return kernel_sum

    def text(self, x: str = "x") -> str:
        return f"Σ_{{j∈S}} κ({x}, T k_j)"

    def latex(self, x: str = "x") -> str:
        return rf"\sum_{{j\in S}}\kappa({x},T k_j)"


@dataclass(frozen=True)
class Unit(Normalizer):
    """h(x) = 1: the bare kernel expansion

    With `Exponential` the output is softmax attention times exp(log-sum-exp), which overflows to inf
    for large scores.
    """

    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        return torch.ones_like(kernel_sum)

    def text(self, x: str = "x") -> str:
        return "1"

    def latex(self, x: str = "x") -> str:
        return "1"
