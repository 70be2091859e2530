"""The exponential kernel times a Laplace kernel of positions: attention with linear biases (ALiBi)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ._spec import is_number
from .features import Exponential, Parameters


@dataclass(frozen=True)
class Laplace(Exponential):
    """κ((i, x), (j, y)) = exp(x·y/√D) · exp(−m|i − j|), with a slope m for each head: ALiBi.

    exp(−m|i − j|) = ∫ cos(ω(i − j)) m/(π(m² + ω²)) dω is positive definite, so that κ is Φ(i, x)·Φ(j, y) with Φ the
    product of its features and those of `Exponential`: a kernel of (position, point), whatever the positions are.

    Tokens stand at 0, 1, …, queries from the query offset on, and a point of a pooled head at the mean position of its
    tokens (of those that a causal query sees; of any kind of pooling). Values do not depend on positions. The paper's
    f is one of points; this f is the paper's at the points (position, x), and nothing else of the derivation changes.
    Under causality exp(−m(i − j)) = exp(−mi)·exp(mj), and the first factor cancels under softmax.

    Args:
        slopes: m for each head, 0 for none; None for those of ALiBi: 2^(−8h/H), h = 1 … H, where the number of heads
            H is a power of 2. Between two powers every other slope of the larger is added to those of the smaller.
    """

    slopes: tuple[float, ...] | None = None
    by_head: ClassVar[tuple[str, ...]] = ("slopes",)

    def __post_init__(self) -> None:
        if self.slopes is None:
            return
        if not isinstance(self.slopes, tuple | list) or not self.slopes:
            raise ValueError(f"Laplace: slopes must name one slope per head, such as (0.5, 0.25); got {self.slopes!r}")
        object.__setattr__(self, "slopes", tuple(self.slopes))
        for slope in self.slopes:
            if not is_number(slope) or not 0 <= slope < math.inf:
                raise ValueError(f"Laplace: every slope must be a finite number of at least 0, got {slope!r}")

    def of_heads(self, heads: int) -> dict[str, Tensor]:
        slopes = alibi(heads) if self.slopes is None else self.slopes
        if len(slopes) != heads:
            raise ValueError(f"Laplace: {len(slopes)} slopes {slopes} for {heads} heads; give one slope per head")
        return {"slopes": torch.tensor(slopes, dtype=torch.float64)}

    def log_positions(self, queries: Tensor, points: Tensor, parameters: Parameters) -> Tensor | None:
        slopes = parameters["slopes"].to(points.dtype)
        return (queries - points).abs() * -slopes[:, None, None]

    def text(self, x: str = "x") -> str:
        return f"{super().text(x)}, times ψ(i) at position i, ψ(i)·ψ(j) = exp(−m|i − j|)"

    def latex(self, x: str = "x") -> str:
        return super().latex(x) + r",\quad\text{times }\psi(i)\text{ at position }i,\ \psi(i)^\top\psi(j)=e^{-m|i-j|}"

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        if latex:
            slopes = "2^{-8h/H}" if self.slopes is None else ", ".join(f"{m:g}" for m in self.slopes)
            return (
                rf"The slopes $m$ of heads $h$ are ${slopes}$. A pooled point stands at its tokens' mean position.",
                r"The paper's $f$ is one of points. This $f$ is the paper's at the points (position, $x$), since "
                r"$e^{-m|i-j|}=\int\cos(\omega(i-j))\,\tfrac{m}{\pi(m^2+\omega^2)}\,d\omega$ is positive definite.",
            )
        slopes = "2^(−8h/H)" if self.slopes is None else ", ".join(f"{m:g}" for m in self.slopes)
        return (
            f"The slopes m of heads h are {slopes}. A pooled point stands at its tokens' mean position.",
            "The paper's f is one of points. This f is the paper's at the points (position, x), since exp(−m|i − j|) = "
            "∫ cos(ω(i − j)) m/(π(m² + ω²)) dω is positive definite.",
        )


def alibi(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi.

    >>> alibi(4), alibi(3)
    ((0.25, 0.0625, 0.015625, 0.00390625), (0.0625, 0.00390625, 0.25))
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = tuple(2.0 ** (-8.0 * h / power) for h in range(1, power + 1))
    between = tuple(2.0 ** (-4.0 * h / power) for h in range(1, 2 * power + 1, 2))
    return slopes + between[: heads - power]
