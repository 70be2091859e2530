"""Φ, the features of the primal layer, and the kernel κ(x, y) = Φ(x)·Φ(y) that they induce."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ._spec import LONGEST, Spec, check_count, operand

Parameters = Mapping[str, Tensor]

_MONOMIAL = r"\left(\frac{z_1^{n_1}\cdots z_D^{n_D}}{\sqrt{n_1!\cdots n_D!}}\right)"

TAYLOR_LIMIT = 1 << 16
"""The largest D_φ that `Taylor` materialises; a larger one is refused before it is allocated."""


@dataclass(frozen=True)
class FeatureMap(Spec):
    """Base class: a feature map Φ.

    Subclass it, implement `features` (and `dim`), and every part of the library that a finite Φ has works:

    >>> @dataclass(frozen=True)
    ... class Square(FeatureMap):
    ...     def features(self, x): return x.square()
    ...     def dim(self, head_dim): return head_dim
    >>> Square().kernel(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """

    finite: ClassVar[bool] = True
    """Whether Φ(x) can be written down; then the sum re-associates and costs O(N)."""

    scaled: ClassVar[bool] = False
    """Whether κ is a function of x·y/√D, so that another factor than 1/√D may be put on the scores."""

    def features(self, x: Tensor) -> Tensor:
        """Φ(x): [..., D] to [..., D_φ]."""
        raise NotImplementedError(f"{type(self).__name__} must implement features(x)")

    def dim(self, head_dim: int) -> int:
        """D_φ for inputs of `head_dim` dimensions."""
        raise NotImplementedError(f"{type(self).__name__} must implement dim(head_dim)")

    fixed: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors in `state`."""

    def state(self, head_dim: int) -> dict[str, Tensor]:
        """Fixed tensors that belong to Φ, by name; a layer keeps them as buffers."""
        return {}

    by_head: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors in `of_heads`."""

    def of_heads(self, heads: int) -> dict[str, Tensor]:
        """Fixed tensors with a row for each head, by name."""
        return {}

    def log_positions(self, queries: Tensor, points: Tensor, parameters: Parameters) -> Tensor | None:
        """log of what positions multiply κ by: [..., heads, L, W].

        Positions of queries [..., heads or 1, L, 1] and of points [..., heads or 1, L or 1, W] broadcast, leading
        dimensions too. None where κ knows no positions; otherwise the kernel is one of (position, point), the product
        of this and `kernel`.
        """
        return None

    def map(self, x: Tensor, parameters: Parameters) -> Tensor:
        """Φ(x) with the tensors of `state` taken from `parameters` where given."""
        return self.features(x)

    def kernel(self, x: Tensor, y: Tensor, parameters: Parameters | None = None) -> Tensor:
        """κ(x_i, y_j) = Φ(x_i)·Φ(y_j): [..., L, D], [..., S, D] to [..., L, S]."""
        return self.map(x, parameters or {}) @ self.map(y, parameters or {}).transpose(-1, -2)


@dataclass(frozen=True)
class LogKernel(FeatureMap):
    """Base class: infinitely many features, known by the logarithm of their kernel, which is positive.

    Implement `log_kernel`; it is shifted before it can overflow.
    """

    finite: ClassVar[bool] = False

    def features(self, x: Tensor) -> Tensor:
        raise ValueError(f"{self!r} has infinitely many features")

    def dim(self, head_dim: int) -> int:
        raise ValueError(f"{self!r} has infinitely many features")

    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """log κ(x_i, y_j): [..., L, D], [..., S, D] to [..., L, S]."""
        raise NotImplementedError(f"{type(self).__name__} must implement log_kernel(x, y)")

    def kernel(self, x: Tensor, y: Tensor, parameters: Parameters | None = None) -> Tensor:
        return self.log_kernel(x, y).exp()


@dataclass(frozen=True)
class Exponential(LogKernel):
    """Φ of Eqn. phix: every monomial of x/D^(1/4) over √(n₁!…n_D!); κ(x, y) = exp(x·y/√D)

    The map is infinite, known by its kernel alone. With `Unit` normalisation the kernel is not shifted
    and can overflow to inf.
    """

    scaled: ClassVar[bool] = True

    def features(self, x: Tensor) -> Tensor:
        raise ValueError("Exponential() has infinitely many features; Taylor(degree) materialises its first ones")

    def log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """log κ(x_i, y_j) = x_i·y_j/√D."""
        return (x / math.sqrt(x.shape[-1])) @ y.transpose(-1, -2)

    def text(self, x: str = "x") -> str:
        return f"every monomial ∏ z_d^n_d / √(n_1!⋯n_D!) of z = {operand(x)}/D^(1/4)"

    def latex(self, x: str = "x") -> str:
        return _MONOMIAL + rf"_{{n\in\mathbb{{N}}^D}},\quad z={x}/\sqrt[4]{{D}}"


@dataclass(frozen=True)
class Taylor(FeatureMap):
    """The exponential map cut at a degree: all monomials of Eqn. phix up to it, D_φ = Σ_t C(D+t−1, t).

    With z = x·y/√D the kernel is Σ_{t≤degree} z^t/t!, off by at most |z|^(degree+1) e^|z| / (degree+1)!.
    An odd degree can make κ, and with it the normaliser, negative.
    """

    degree: int = 2
    scaled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("Taylor", "degree", self.degree, least=0)

    def dim(self, head_dim: int) -> int:
        size = degree = 0
        while degree <= self.degree and size <= TAYLOR_LIMIT:
            size += math.comb(head_dim + degree - 1, degree)
            degree += 1
        if size > TAYLOR_LIMIT:
            least = "" if degree > self.degree else "at least "
            raise ValueError(
                f"Taylor({self.degree}) on {head_dim} dimensions has {least}{size:,} features, over the limit of "
                f"{TAYLOR_LIMIT:,}; lower the degree or the head dimension, or use RandomFeatures"
            )
        return size

    def features(self, x: Tensor) -> Tensor:
        head_dim = x.shape[-1]
        self.dim(head_dim)
        return torch.cat(monomials(x / head_dim**0.25, self.degree), dim=-1)

    def text(self, x: str = "x") -> str:
        return f"every monomial ∏ z_d^n_d / √(n_1!⋯n_D!) of degree ≤ {self.degree} of z = {operand(x)}/D^(1/4)"

    def latex(self, x: str = "x") -> str:
        return _MONOMIAL + rf"_{{n_1+\cdots+n_D\le {self.degree}}},\quad z={x}/\sqrt[4]{{D}}"


def monomials(z: Tensor, degree: int) -> list[Tensor]:
    """The monomials ∏ z_d^n_d / √(n_1!…n_D!) of each degree up to `degree`, [..., D] to [..., C(D+t−1, t)]."""
    parts = [torch.ones_like(z[..., :1])]
    for parents, last, scale in _monomials(z.shape[-1], degree):
        # a monomial of degree t is one of degree t−1 times one more coordinate
        parent = parts[-1][..., parents.to(z.device)]
        parts.append(parent * z[..., last.to(z.device)] * scale.to(z))
    return parts


def _monomials(head_dim: int, degree: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each degree: the parent of every monomial, its last coordinate, and the ratio of their coefficients."""
    tables = []
    place: dict[tuple[int, ...], int] = {(): 0}
    for t in range(1, degree + 1):
        monomials = list(itertools.combinations_with_replacement(range(head_dim), t))
        parents = torch.tensor([place[m[:-1]] for m in monomials])
        last = torch.tensor([m[-1] for m in monomials])
        # 1/√(n!) gains a factor 1/√(multiplicity of the coordinate that was added)
        scale = torch.tensor([Counter(m)[m[-1]] ** -0.5 for m in monomials], dtype=torch.float64)
        tables.append((parents, last, scale))
        place = {m: i for i, m in enumerate(monomials)}
    return tables


@dataclass(frozen=True)
class EluPlusOne(FeatureMap):
    """Φ(x) = elu(x) + 1, the positive map of linear attention"""

    def features(self, x: Tensor) -> Tensor:
        # exp(x) below zero, rather than (exp(x) − 1) + 1, which rounds to zero and loses positivity
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())

    def dim(self, head_dim: int) -> int:
        return head_dim

    def text(self, x: str = "x") -> str:
        return f"elu({x}) + 1"

    def latex(self, x: str = "x") -> str:
        return rf"\mathrm{{elu}}({x})+1"


@dataclass(frozen=True)
class RandomFeatures(FeatureMap):
    """Positive orthogonal random features: Φ(x) = exp(Ωx' − |x'|²/2)/√m, x' = x/D^(1/4)

    E[Φ(x)·Φ(y)] = exp(x·y/√D). Ω is drawn once per head dimension from `seed`; blocks of rows are orthogonal.
    """

    count: int
    seed: int = 0
    fixed: ClassVar[tuple[str, ...]] = ("projection",)
    scaled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("RandomFeatures", "count", self.count, most=LONGEST)
        check_count("RandomFeatures", "seed", self.seed, least=0)

    def dim(self, head_dim: int) -> int:
        return self.count

    def state(self, head_dim: int) -> dict[str, Tensor]:
        return {"projection": torch.tensor(_orthogonal_gaussian(self.count, head_dim, self.seed), dtype=torch.float64)}

    def map(self, x: Tensor, parameters: Parameters) -> Tensor:
        projection = parameters["projection"] if "projection" in parameters else self.state(x.shape[-1])["projection"]
        x = x / x.shape[-1] ** 0.25
        log_features = x @ projection.to(x).transpose(-1, -2) - x.square().sum(-1, keepdim=True) / 2
        return log_features.exp() / math.sqrt(self.count)

    def features(self, x: Tensor) -> Tensor:
        return self.map(x, {})

    def text(self, x: str = "x") -> str:
        return f"exp(Ωz − |z|²/2)/√m of z = {operand(x)}/D^(1/4), Ω random and orthogonal, m = {self.count}"

    def latex(self, x: str = "x") -> str:
        return rf"\exp(\Omega z-\tfrac12\|z\|^2)/\sqrt{{{self.count}}},\quad z={x}/\sqrt[4]{{D}}"


def _orthogonal_gaussian(count: int, head_dim: int, seed: int) -> list[list[float]]:
    """[count, head_dim]: Gaussian rows, orthogonal within each block of head_dim, with their own χ lengths.

    Drawn by numpy and returned as numbers: torch.compile takes a constant tensor from one place only once, and vmap
    refuses to draw.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.standard_normal((-(-count // head_dim), head_dim, head_dim))
    q, r = np.linalg.qr(drawn)
    # LAPACK fixes signs, so that Q alone is not uniform and the kernel would be biased; those of R's diagonal undo it
    rows = (q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None]).reshape(-1, head_dim)[:count]
    lengths = np.linalg.norm(generator.standard_normal((count, head_dim)), axis=-1, keepdims=True)
    return (rows * lengths).tolist()


# torch.compile evaluates these once instead of tracing them. torch.compiler.assume_constant_result sets the same mark,
# but loads the whole compiler to do so: seconds, at every import of this package.
for _constant in (_monomials, _orthogonal_gaussian):
    _constant._dynamo_marked_constant = True  # type: ignore[union-attr]
