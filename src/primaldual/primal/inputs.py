"""T, the input maps: what happens to queries and keys before the features. The two kinds, and the maps of points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from ._spec import Spec, check_flag, operand
from .features import Parameters


class Moments(NamedTuple):
    """Mean and variance of the keys that a head is fitted to, one vote per point; None where `needs` does not ask."""

    mean: Tensor | None
    variance: Tensor | None


@dataclass(frozen=True)
class InputMap(Spec):
    """Base class of both kinds of input map: `TokenMap` before pooling, `PointMap` after it."""

    @property
    def by_head(self) -> tuple[str, ...]:
        """Names of the learned tensors whose first dimension is the head."""
        return ()

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """Initial values of what is learned, by name."""
        return {}


@dataclass(frozen=True)
class TokenMap(InputMap):
    """Base class: a map of the whole token sequence, applied to queries and keys before pooling."""

    def causal_refusal(self) -> str | None:
        """Why this map has no causal form; None when token i depends on tokens up to i alone."""
        return f"{self!r} lets a token depend on later ones"

    def tokens(self, x: Tensor, parameters: Parameters) -> Tensor:
        """[batch, heads, length, dim] to the same shape; hidden tokens arrive as zeros."""
        raise NotImplementedError(f"{type(self).__name__} must implement tokens(x, parameters)")

    def at(self, x: Tensor, positions: Tensor, parameters: Parameters) -> Tensor:
        """The same of tokens at these places of the sequence, [length] or [batch, length]."""
        return self.tokens(x, parameters)

    def taps(self, head_dim: int) -> int:
        """Multiply-adds for each channel of a token, as cost counts them."""
        return sum(kernel.numel() for kernel in self.learned(1, head_dim).values())


@dataclass(frozen=True)
class PositionMap(TokenMap):
    """Base class: a map of each token by itself and its place in the sequence, before pooling like all token maps.

    It mixes no tokens. So it stands under any mask, it is causal, and it takes queries from any place on.
    """

    @final
    def causal_refusal(self) -> str | None:
        return None

    def at(self, x: Tensor, positions: Tensor, parameters: Parameters) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must implement at(x, positions, parameters)")

    @final
    def tokens(self, x: Tensor, parameters: Parameters) -> Tensor:
        return self.at(x, torch.arange(x.shape[-2], device=x.device), parameters)


@dataclass(frozen=True)
class PointMap(InputMap):
    """Base class: a map of single points that may use the moments of the head's keys, applied after pooling.

    Implement `affine` when the map is x ↦ (x − shift) ⊙ scale with terms that do not depend on x: then the key
    side cancels under softmax, and the map costs one pass over the queries. Otherwise implement `apply`.

    Either is given tensors of the same layout: points [batch, heads, ..., points, head_dim], and moments with as many
    dimensions, [batch, heads, ..., points or 1, head_dim]. What stands between heads and points, and how much of it,
    depends on who calls. So a map takes channels as the last dimension and heads as dimension 1, and counts no others;
    each point is mapped by itself.
    """

    needs: ClassVar[Literal["nothing", "mean", "variance"]] = "nothing"

    def affine(self, moments: Moments, parameters: Parameters) -> tuple[Tensor, Tensor | None] | None:
        """(shift, scale), which broadcast against the points; scale None for 1; None when the map has another form."""
        return None

    def apply(self, x: Tensor, moments: Moments, parameters: Parameters) -> Tensor:
        """The mapped points, of x's shape and dtype; x and the moments are laid out as said above."""
        form = self.affine(moments, parameters)
        if form is None:
            raise NotImplementedError(f"{type(self).__name__} must implement affine(...) or apply(...)")
        shift, scale = form
        mapped = x - shift
        return (mapped if scale is None else mapped * scale).to(x.dtype)


@dataclass(frozen=True)
class Recenter(PointMap):
    """x ↦ x − βμ, μ the mean of the head's keys (Eqn. recenter-attn): Attention-BN as the paper runs it."""

    beta: float = 1.0
    learnable: bool = False
    needs: ClassVar[Literal["nothing", "mean", "variance"]] = "mean"

    def __post_init__(self) -> None:
        _check_finite("Recenter", "beta", self.beta)
        check_flag("Recenter", "learnable", self.learnable)

    @property
    def by_head(self) -> tuple[str, ...]:
        return ("beta",)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"beta": torch.full((heads,), float(self.beta))} if self.learnable else {}

    def affine(self, moments: Moments, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
        assert moments.mean is not None
        return _beta_times(moments.mean, self.beta, parameters if self.learnable else {}), None

    def text(self, x: str = "x") -> str:
        return f"{operand(x)} − {_beta_text(self, 'β')}μ"

    def latex(self, x: str = "x") -> str:
        return f"{operand(x)}-" + _beta_text(self, r"\beta") + r"\mu"


@dataclass(frozen=True)
class BatchNorm(PointMap):
    """x ↦ (x − βμ) ⊙ (σ² + ε)^(−1/2), μ and σ² over the head's keys (Eqn. bn-attn): Attention-BN in full."""

    eps: float = 1e-5
    beta: float = 1.0
    learnable: bool = False
    needs: ClassVar[Literal["nothing", "mean", "variance"]] = "variance"

    def __post_init__(self) -> None:
        _check_finite("BatchNorm", "beta", self.beta)
        _check_finite("BatchNorm", "eps", self.eps, least=0.0)
        check_flag("BatchNorm", "learnable", self.learnable)

    @property
    def by_head(self) -> tuple[str, ...]:
        return ("beta",)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"beta": torch.full((heads,), float(self.beta))} if self.learnable else {}

    def affine(self, moments: Moments, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
        assert moments.mean is not None and moments.variance is not None
        shift = _beta_times(moments.mean, self.beta, parameters if self.learnable else {})
        return shift, (moments.variance + self.eps).rsqrt()

    def text(self, x: str = "x") -> str:
        return f"({operand(x)} − {_beta_text(self, 'β')}μ) ⊙ (σ² + {self.eps:g})^(−1/2)"

    def latex(self, x: str = "x") -> str:
        return f"({operand(x)}-" + _beta_text(self, r"\beta") + r"\mu)\odot(\sigma^2+\epsilon)^{-1/2}"


@dataclass(frozen=True)
class RmsNorm(PointMap):
    """x ↦ x / √(mean(x²) + ε) ⊙ γ for each token on its own, γ learned: QK-norm."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_finite("RmsNorm", "eps", self.eps, least=0.0)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"gain": torch.ones(head_dim)}

    def apply(self, x: Tensor, moments: Moments, parameters: Parameters) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * parameters["gain"] if "gain" in parameters else wide).to(x.dtype)

    def text(self, x: str = "x") -> str:
        return f"{operand(x)} / √(mean({operand(x)}²) + {self.eps:g}) ⊙ γ"

    def latex(self, x: str = "x") -> str:
        return operand(x) + rf"\,\big(\tfrac1D\|{x}\|^2+\epsilon\big)^{{-1/2}}\odot\gamma"


def _check_finite(owner: str, name: str, value: object, least: float = -math.inf) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -math.inf < value < math.inf or value < least:  # type: ignore[operator]
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{owner}: {name} must be a finite number{bound}, got {value!r}")


def _beta_times(mean: Tensor, beta: float, parameters: Parameters) -> Tensor:
    """βμ with β a number or one learned number per head; heads are dimension 1."""
    if "beta" in parameters:
        return mean * parameters["beta"].to(mean.dtype).reshape(-1, *(1,) * (mean.dim() - 2))
    return mean if beta == 1 else mean * beta


def _beta_text(spec: Recenter | BatchNorm, symbol: str) -> str:
    if spec.learnable:
        return symbol
    return "" if spec.beta == 1 else f"{spec.beta:g}"
