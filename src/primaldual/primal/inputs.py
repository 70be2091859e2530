"""T, the input maps: what happens to queries and keys before the features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ._spec import Spec, wrap
from .features import Parameters


class Moments(NamedTuple):
    """Mean and variance of the keys that a head is fitted to, one vote per point; None where `needs` does not ask."""

    mean: Tensor | None
    variance: Tensor | None


@dataclass(frozen=True)
class InputMap(Spec):
    """Base class of both kinds of input map: `TokenMap` before pooling, `PointMap` after it."""

    per_head: ClassVar[tuple[str, ...]] = ()
    """Names of the learned tensors whose first dimension is the head."""

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
    per_head: ClassVar[tuple[str, ...]] = ("beta",)
    needs: ClassVar[Literal["nothing", "mean", "variance"]] = "mean"

    def __post_init__(self) -> None:
        _check_finite("Recenter", "beta", self.beta)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"beta": torch.full((heads,), float(self.beta))} if self.learnable else {}

    def affine(self, moments: Moments, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
        assert moments.mean is not None
        return _weighted(moments.mean, self.beta, parameters if self.learnable else {}), None

    def text(self, x: str = "x") -> str:
        return f"{wrap(x)} − {_times(self, 'β')}μ"

    def latex(self, x: str = "x") -> str:
        return f"{wrap(x)}-" + _times(self, r"\beta") + r"\mu"


@dataclass(frozen=True)
class BatchNorm(PointMap):
    """x ↦ (x − βμ) ⊙ (σ² + ε)^(−1/2), μ and σ² over the head's keys (Eqn. bn-attn): Attention-BN in full."""

    eps: float = 1e-5
    beta: float = 1.0
    learnable: bool = False
    per_head: ClassVar[tuple[str, ...]] = ("beta",)
    needs: ClassVar[Literal["nothing", "mean", "variance"]] = "variance"

    def __post_init__(self) -> None:
        _check_finite("BatchNorm", "beta", self.beta)
        _check_finite("BatchNorm", "eps", self.eps, least=0.0)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"beta": torch.full((heads,), float(self.beta))} if self.learnable else {}

    def affine(self, moments: Moments, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
        assert moments.mean is not None and moments.variance is not None
        shift = _weighted(moments.mean, self.beta, parameters if self.learnable else {})
        return shift, (moments.variance + self.eps).rsqrt()

    def text(self, x: str = "x") -> str:
        return f"({wrap(x)} − {_times(self, 'β')}μ) ⊙ (σ² + {self.eps:g})^(−1/2)"

    def latex(self, x: str = "x") -> str:
        return f"({wrap(x)}-" + _times(self, r"\beta") + r"\mu)\odot(\sigma^2+\epsilon)^{-1/2}"


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
        return f"{wrap(x)} / √(mean({wrap(x)}²) + {self.eps:g}) ⊙ γ"

    def latex(self, x: str = "x") -> str:
        return wrap(x) + rf"\,\big(\tfrac1D\|{x}\|^2+\epsilon\big)^{{-1/2}}\odot\gamma"


@dataclass(frozen=True)
class DepthwiseConv1d(TokenMap):
    """A convolution along the tokens, one learned kernel for all channels, starting as the identity: Conv1D."""

    size: int = 5
    causal: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"DepthwiseConv1d: size must be an integer of at least 1, got {self.size!r}")

    def causal_refusal(self) -> str | None:
        return None if self.causal else f"{self!r} looks ahead; DepthwiseConv1d(size, causal=True) does not"

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        kernel = torch.zeros(self.size)
        kernel[self.size - 1 if self.causal else (self.size - 1) // 2] = 1.0
        return {"conv_kernel": kernel}

    def tokens(self, x: Tensor, parameters: Parameters) -> Tensor:
        kernel = parameters.get("conv_kernel", self.learned(1, 1)["conv_kernel"]).to(x)
        left = self.size - 1 if self.causal else (self.size - 1) // 2
        length = x.shape[-2]
        padded = torch.nn.functional.pad(x, (0, 0, left, self.size - 1 - left))
        return sum_of([kernel[t] * padded[..., t : t + length, :] for t in range(self.size)])

    def text(self, x: str = "x") -> str:
        return f"{'CausalConv1D' if self.causal else 'Conv1D'}({x}; {self.size})"

    def latex(self, x: str = "x") -> str:
        return rf"\mathrm{{Conv1D}}({x};{self.size})"


@dataclass(frozen=True)
class DepthwiseConv2d(TokenMap):
    """A convolution over the patch grid, one learned kernel for all channels, starting as the identity: Conv2D."""

    size: tuple[int, int] = (2, 2)
    grid: tuple[int, int] | None = None
    prefix: int = 0

    def __post_init__(self) -> None:
        size = self.size
        if isinstance(size, int):  # a square kernel may be given by its side
            object.__setattr__(self, "size", (size, size))
        _check_pair("DepthwiseConv2d", "size", self.size)
        check_grid("DepthwiseConv2d", self.grid, self.prefix)

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        kernel = torch.zeros(self.size)
        kernel[(self.size[0] - 1) // 2, (self.size[1] - 1) // 2] = 1.0
        return {"conv_kernel": kernel}

    def tokens(self, x: Tensor, parameters: Parameters) -> Tensor:
        kernel = parameters.get("conv_kernel", self.learned(1, 1)["conv_kernel"]).to(x)
        rows, columns = grid_of("DepthwiseConv2d", x.shape[-2], self.grid, self.prefix)
        prefix, patches = x[..., : self.prefix, :], x[..., self.prefix :, :].unflatten(-2, (rows, columns))
        top, left = (self.size[0] - 1) // 2, (self.size[1] - 1) // 2
        padded = torch.nn.functional.pad(patches, (0, 0, left, self.size[1] - 1 - left, top, self.size[0] - 1 - top))
        mixed = sum_of(
            [
                kernel[a, b] * padded[..., a : a + rows, b : b + columns, :]
                for a in range(self.size[0])
                for b in range(self.size[1])
            ]
        )
        return torch.cat([prefix, mixed.flatten(-3, -2)], dim=-2)

    def text(self, x: str = "x") -> str:
        return f"Conv2D({x}; {self.size[0]}×{self.size[1]})"

    def latex(self, x: str = "x") -> str:
        return rf"\mathrm{{Conv2D}}({x};{self.size[0]}\times{self.size[1]})"


def grid_of(owner: str, length: int, grid: tuple[int, int] | None, prefix: int) -> tuple[int, int]:
    """The grid of a sequence: the one given, checked against the length, or the square that fits."""
    patches = length - prefix
    if grid is None:
        # a compiler knows a length by its name alone, and math.isqrt takes numbers
        compiling = torch.compiler.is_compiling()
        side = int(math.sqrt(patches) + 0.5) if compiling else math.isqrt(max(patches, 0))
        if patches < 1 or side * side != patches:
            raise ValueError(
                f"{owner}: {length} tokens less {prefix} prefix tokens are {patches}, not a square; "
                f"give grid=(rows, columns)"
            )
        return side, side
    if grid[0] * grid[1] != patches:
        raise ValueError(
            f"{owner}: grid {grid[0]}×{grid[1]} and {prefix} prefix tokens make {prefix + grid[0] * grid[1]} tokens, "
            f"but the sequence has {length}"
        )
    return grid


def check_grid(owner: str, grid: tuple[int, int] | None, prefix: int) -> None:
    """Raise unless `grid` is None or a pair of positive integers, and `prefix` a count."""
    if grid is not None:
        _check_pair(owner, "grid", grid)
    if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
        raise ValueError(f"{owner}: prefix must be an integer of at least 0, got {prefix!r}")


def sum_of(terms: list[Tensor]) -> Tensor:
    """The sum of equally shaped tensors."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _check_pair(owner: str, name: str, value: object) -> None:
    if not (isinstance(value, tuple) and len(value) == 2 and all(type(v) is int and v > 0 for v in value)):
        raise ValueError(f"{owner}: {name} must be a pair of positive integers, got {value!r}")


def _check_finite(owner: str, name: str, value: object, least: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{owner}: {name} must be a finite number{bound}, got {value!r}")


def _weighted(mean: Tensor, beta: float, parameters: Parameters) -> Tensor:
    """βμ with β a number or one learned number per head; heads are dimension 1."""
    if "beta" in parameters:
        return mean * parameters["beta"].to(mean.dtype).reshape(-1, *(1,) * (mean.dim() - 2))
    return mean if beta == 1 else mean * beta


def _times(spec: Recenter | BatchNorm, symbol: str) -> str:
    if spec.learnable:
        return symbol
    return "" if spec.beta == 1 else f"{spec.beta:g}"
