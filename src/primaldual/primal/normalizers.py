"""h, the scalar that divides the features of the primal layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ._spec import Spec, added, check_choice, is_number
from .features import Parameters
from .per_token import PerToken


@dataclass(frozen=True)
class Normalizer(Spec):
    """Base class: h(x), given x and the kernel sum Σ_{j∈S} κ(x, k_j).

    Every h that is a function of these two runs in every executor: neither the full kernel
    nor the keys are needed once the sum is known.
    """

    by_head: ClassVar[tuple[str, ...]] = ()
    """Names of the learned tensors whose first dimension is the head."""

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        """Initial values of what is learned, by name."""
        return {}

    def made(self, heads: int, value_dim: int) -> dict[str, PerToken]:
        """What a layer makes of its input, by name: the gate of a gated one."""
        return {}

    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        """h at the mapped points x: [..., L, D] and [..., L, 1] to [..., L, 1]."""
        raise NotImplementedError(f"{type(self).__name__} must implement h(x, kernel_sum)")

    def at(self, x: Tensor, kernel_sum: Tensor, parameters: Parameters) -> Tensor:
        """h with what it learns taken from `parameters`: [..., heads, L, D] and [..., heads, L, 1] to the latter."""
        return self.h(x, kernel_sum)


@dataclass(frozen=True)
class KernelSum(Normalizer):
    """h(x) = c + Σ_{j∈S} κ(x, k_j): the weights of a row sum to one, or with a sink c to less

    A sink takes weight and has no value, so that a head may leave its output at zero. It is a scalar function of x like
    every h, so the layer is exactly the paper's f, and its regression is what it is without a sink.

    Args:
        sink: c ≥ 0. 1 is the softmax that is off by one; "learned" is one number for each head, c = exp(s), whose s
            is in `parameters` by the name "sink" and starts at 0, where c = 1.
    """

    sink: float | Literal["learned"] = added(0)
    by_head: ClassVar[tuple[str, ...]] = ("sink",)

    def __post_init__(self) -> None:
        if self.sink != "learned" and not (is_number(self.sink) and 0 <= self.sink < math.inf):
            raise ValueError(f"KernelSum: sink must be a finite number of at least 0, or 'learned'; got {self.sink!r}")

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return {"sink": torch.zeros(heads)} if self.sink == "learned" else {}

    def log_sink(self, like: Tensor, parameters: Parameters) -> Tensor:
        """log c, which broadcasts against [..., heads, L, 1]; in the dtype of `like`, where it is not learned."""
        if isinstance(self.sink, str):
            given = parameters.get("sink")
            return like.new_zeros(1, 1, 1) if given is None else given[:, None, None]
        return like.new_full((1, 1, 1), math.log(self.sink) if self.sink else -math.inf)

    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        return kernel_sum

    def at(self, x: Tensor, kernel_sum: Tensor, parameters: Parameters) -> Tensor:
        total = self.h(x, kernel_sum)
        return total if self.sink == 0 else total + self.log_sink(total, parameters).exp()

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        if self.sink == 0:
            return ()
        return ("The constant in h is a sink: it takes weight and has no value. f is exactly the paper's.",)

    def text(self, x: str = "x") -> str:
        sink = "exp(s)" if self.sink == "learned" else f"{self.sink:g}"
        return (f"{sink} + " if self.sink != 0 else "") + f"Σ_{{j∈S}} κ({x}, T k_j)"

    def latex(self, x: str = "x") -> str:
        sink = "e^{s}" if self.sink == "learned" else f"{self.sink:g}"
        return (f"{sink}+" if self.sink != 0 else "") + rf"\sum_{{j\in S}}\kappa({x},T k_j)"


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


@dataclass(frozen=True)
class Gated(Normalizer):
    """h(x)/g(x), g = σ(A x + a) of the layer's query input: the output is multiplied by a gate

    A gate for each head is a scalar, and the paper's h is any scalar function of x, so that this is exactly its f, and
    one regression. A gate for each channel is an extension: an h for each of the D_v outputs, and so D_v regressions
    with normalizers of their own. Gates are not bounded from below: where g is small h is large, and the point
    has little say in the fit, as its K_jj = g²κ/h² is small.

    `attention` takes g in `parameters` by the name "gate", [batch, heads, queries] or [batch, heads, queries,
    value_dim]; a layer makes it. It starts at A = 0, a = 0: every gate is 1/2, the slope of σ is the steepest, and the
    layer is half the one without a gate, of the same random numbers, which the projection after it takes up.

    Args:
        over: h without the gate.
        per: "head" or "channel".
    """

    over: Normalizer = KernelSum()
    per: Literal["head", "channel"] = "head"

    def __post_init__(self) -> None:
        if not isinstance(self.over, Normalizer) or isinstance(self.over, Gated):
            raise ValueError(f"Gated: over must be a Normalizer without a gate, got {self.over!r}")
        check_choice("Gated", "per", self.per, ("head", "channel"))

    @property
    def by_head(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.over.by_head

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        return self.over.learned(heads, head_dim)

    def made(self, heads: int, value_dim: int) -> dict[str, PerToken]:
        start = torch.zeros(heads) if self.per == "head" else torch.zeros(heads, value_dim)
        return self.over.made(heads, value_dim) | {"gate": PerToken("query", start, torch.sigmoid)}

    def h(self, x: Tensor, kernel_sum: Tensor) -> Tensor:
        raise ValueError(f"{self!r}: g is no function of the mapped point alone; `over` is h without it")

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        of = "x_in is the layer's input, of which x is projected."
        if latex:
            of = r"$x_{\mathrm{in}}$ is the layer's input, of which $x$ is projected."
        if self.per == "head":
            is_f = "g is a scalar, and the paper's h any scalar function of x: this is exactly its f."
        else:
            each = "$h_d(x)=h(x)/g_d(x)$" if latex else "h_d(x) = h(x)/g_d(x)"
            is_f = (
                f"g has a number for each output d, which extends the paper's f: {each}, and each output is a "
                f"regression with a normalizer of its own."
            )
        return (*self.over.remarks(latex), of, is_f)

    def text(self, x: str = "x") -> str:
        over = self.over.text(x)
        return f"({over}) / g({x})" if " + " in over else f"{over} / g({x})"

    def latex(self, x: str = "x") -> str:
        return rf"\frac{{1}}{{g({x})}}\Big({self.over.latex(x)}\Big)"
