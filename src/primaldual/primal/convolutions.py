"""The maps of the token sequence: depth-wise convolutions that start as the identity (Attention-Conv1D, -Conv2D)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._spec import LONGEST, check_count, check_flag
from .features import Parameters
from .grids import check_grid, check_pair, grid_of
from .inputs import TokenMap


@dataclass(frozen=True)
class DepthwiseConv1d(TokenMap):
    """A convolution along the tokens, one learned kernel for all channels, starting as the identity: Conv1D."""

    size: int = 5
    causal: bool = False

    def __post_init__(self) -> None:
        check_count("DepthwiseConv1d", "size", self.size, most=LONGEST)
        check_flag("DepthwiseConv1d", "causal", self.causal)

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
