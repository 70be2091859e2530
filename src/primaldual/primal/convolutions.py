"""The maps of the token sequence: depth-wise convolutions that start as the identity (Attention-Conv1D, -Conv2D)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._spec import LONGEST, added, check_choice, check_count, check_flag
from .features import Parameters
from .grids import check_grid, check_pair, grid_of
from .inputs import TokenMap


@dataclass(frozen=True)
class DepthwiseConv1d(TokenMap):
    """x_i ↦ Σ_t w_t ⊙ x_{i+t−c}, a learned convolution along the tokens that starts as the identity: Conv1D.

    One kernel for queries and keys, and for all channels (Attention-Conv1D as the paper has it), or for each channel of
    each head its own, as short convolutions of language models have. Either is a map T of the sequence, and f is the
    paper's.

    Args:
        size: taps w_t. The token itself is tap c = ⌊(size − 1)/2⌋, or the last one of a causal convolution.
        causal: no token takes part in an earlier one.
        channels: "one" kernel for all, or "each" its own.
    """

    size: int = 5
    causal: bool = False
    channels: str = added("one")

    def __post_init__(self) -> None:
        check_count("DepthwiseConv1d", "size", self.size, most=LONGEST)
        check_flag("DepthwiseConv1d", "causal", self.causal)
        check_choice("DepthwiseConv1d", "channels", self.channels, ("one", "each"))

    @property
    def by_head(self) -> tuple[str, ...]:
        return ("conv_kernel",) if self.channels == "each" else ()

    def causal_refusal(self) -> str | None:
        return None if self.causal else f"{self!r} looks ahead; DepthwiseConv1d(size, causal=True) does not"

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        kernel = torch.zeros(self.size)
        kernel[self.size - 1 if self.causal else (self.size - 1) // 2] = 1.0
        return {"conv_kernel": kernel.repeat(heads, head_dim, 1) if self.channels == "each" else kernel}

    def taps(self, head_dim: int) -> int:
        return self.size

    def tokens(self, x: Tensor, parameters: Parameters) -> Tensor:
        kernel = parameters.get("conv_kernel", self.learned(1, 1)["conv_kernel"]).to(x)
        taps = kernel.unsqueeze(-3).unbind(-1) if self.channels == "each" else kernel  # [heads, 1, dim] each
        left = self.size - 1 if self.causal else (self.size - 1) // 2
        length = x.shape[-2]
        padded = torch.nn.functional.pad(x, (0, 0, left, self.size - 1 - left))
        return sum_of([taps[t] * padded[..., t : t + length, :] for t in range(self.size)])

    def text(self, x: str = "x") -> str:
        each = ", each channel" if self.channels == "each" else ""
        return f"{'CausalConv1D' if self.causal else 'Conv1D'}({x}; {self.size}{each})"

    def latex(self, x: str = "x") -> str:
        each = r"\text{, each channel}" if self.channels == "each" else ""
        return rf"\mathrm{{Conv1D}}({x};{self.size}{each})"

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        tied = "The convolution has one kernel for all channels, as the paper's."
        each = "The convolution has a kernel for each channel; the paper ties them. T stays a map of the sequence."
        return (each if self.channels == "each" else tied,)


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
        check_pair("DepthwiseConv2d", "size", self.size)
        check_count("DepthwiseConv2d", "the product of size", self.size[0] * self.size[1], most=LONGEST)
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


def sum_of(terms: list[Tensor]) -> Tensor:
    """The sum of equally shaped tensors."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
