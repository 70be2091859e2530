"""The polynomial kernel: its features where they are few, the power of a product where they are many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ._spec import check_count, is_number, operand
from .features import TAYLOR_LIMIT, FeatureMap, Parameters, monomials


@dataclass(frozen=True)
class Polynomial(FeatureMap):
    """κ(x, y) = (x·y/√D + c)^p: every monomial of degree t ≤ p of z = x/D^(1/4), times √(p!/(p−t)! · c^(p−t))

    An even degree has κ ≥ 0, and with it h. Under an odd one κ is negative where x·y/√D < −c, so that h = Σκ may be
    small, negative or zero while its terms are not: the output is then no mean of values and has no bound, and an h of
    exactly zero is an error in the reference. The kernel is positive semi-definite at every degree, so the regression
    is defined, where no h(k_j) is zero. h is a scalar function of x, and f is exactly the paper's.

    There are C(D + p, p) features (C(D + p − 1, p) with c = 0). Where they are few the sum re-associates; where they
    are more than are worth writing down, the kernel is computed as it stands.
    """

    degree: int = 2
    constant: float = 1.0
    scaled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("Polynomial", "degree", self.degree)
        if not (is_number(self.constant) and 0 <= self.constant < math.inf):
            raise ValueError(
                f"Polynomial: constant must be a finite number of at least 0, got {self.constant!r}; a negative one "
                f"makes the kernel indefinite"
            )

    def dim(self, head_dim: int) -> int:
        return math.comb(head_dim + self.degree - (self.constant == 0), self.degree)

    def refusal(self, head_dim: int) -> str | None:
        """Why the features are not written down; None where they are."""
        if (size := self.dim(head_dim)) <= TAYLOR_LIMIT:
            return None
        return f"{self!r} on {head_dim} dimensions has {size:,} features, over the limit of {TAYLOR_LIMIT:,}"

    def features(self, x: Tensor) -> Tensor:
        if reason := self.refusal(x.shape[-1]):
            raise ValueError(f"{reason}; its kernel needs none of them")
        degrees = monomials(x / x.shape[-1] ** 0.25, self.degree)
        weights = (
            math.sqrt(math.perm(self.degree, t) * self.constant ** (self.degree - t)) for t in range(self.degree + 1)
        )
        return torch.cat([part * weight for part, weight in zip(degrees, weights, strict=True) if weight], dim=-1)

    def kernel(self, x: Tensor, y: Tensor, parameters: Parameters | None = None) -> Tensor:
        return ((x / math.sqrt(x.shape[-1])) @ y.transpose(-1, -2) + self.constant) ** self.degree

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        if self.degree % 2 == 0:
            return ()
        return ("The degree is odd, so that κ may be negative, and its sum small or zero where its terms are not.",)

    def text(self, x: str = "x") -> str:
        degree, p, c = ("=" if self.constant == 0 else "≤"), self.degree, f"{self.constant:g}"
        weight = f"√({p}!/({p}−t)!·{c}^({p}−t))" if self.constant else f"√({p}!)"
        return f"every monomial of degree t {degree} {p} of z = {operand(x)}/D^(1/4), over √(n_1!⋯n_D!), times {weight}"

    def latex(self, x: str = "x") -> str:
        p, sign = self.degree, "=" if self.constant == 0 else r"\le "
        weight = rf"\sqrt{{{p}!}}"
        if self.constant:
            weight = rf"\sqrt{{\tfrac{{{p}!}}{{({p}-t)!}}\,{self.constant:g}^{{{p}-t}}}}"
        monomial = r"\frac{z_1^{n_1}\cdots z_D^{n_D}}{\sqrt{n_1!\cdots n_D!}}"
        of = rf"n_1+\cdots+n_D=t{sign}{p}"
        return rf"\Big({weight}\,{monomial}\Big)_{{{of}}},\quad z={operand(x)}/\sqrt[4]{{D}}"
