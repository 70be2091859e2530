"""How a layer makes queries, keys and values of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..primal.convolutions import sum_of
from ..primal.grids import check_grid, grid_of


@dataclass(frozen=True)
class ConvProjection:
    """The convolutional projections of CvT (Remark conv_proj): a depth-wise convolution, then the linear projection.

    Queries, keys and values have kernels of their own, one per channel; each starts as the identity, so that the
    layer starts as one with plain projections.

    Args:
        size: taps along each side.
        dims: 1 along the tokens, 2 over the patch grid.
        grid: rows and columns of the patches; None for a square.
        prefix: so many tokens at the start pass through (2-D only).
    """

    size: int = 3
    dims: int = 2
    grid: tuple[int, int] | None = None
    prefix: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"ConvProjection: size must be an integer of at least 1, got {self.size!r}")
        if self.dims not in (1, 2):
            raise ValueError(f"ConvProjection: dims must be 1 or 2, got {self.dims!r}")
        check_grid("ConvProjection", self.grid, self.prefix)
        if self.dims == 1 and (self.grid is not None or self.prefix):
            raise ValueError("ConvProjection: grid and prefix belong to dims=2")


class DepthwiseConv(nn.Module):
    """A depth-wise convolution of tokens [batch, length, channels] one kernel per channel, starting as identity."""

    def __init__(
        self, channels: int, spec: ConvProjection, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        kernel = torch.zeros(*(spec.size,) * spec.dims, channels, device=device, dtype=dtype)
        kernel[((spec.size - 1) // 2,) * spec.dims] = 1.0
        self.kernel = nn.Parameter(kernel)

    def forward(self, x: Tensor) -> Tensor:
        size, before = self.spec.size, (self.spec.size - 1) // 2
        after = size - 1 - before
        if self.spec.dims == 1:
            padded = nn.functional.pad(x, (0, 0, before, after))
            return sum_of([self.kernel[t] * padded[:, t : t + x.shape[1]] for t in range(size)])
        rows, columns = grid_of("ConvProjection", x.shape[1], self.spec.grid, self.spec.prefix)
        head, patches = x[:, : self.spec.prefix], x[:, self.spec.prefix :].unflatten(1, (rows, columns))
        padded = nn.functional.pad(patches, (0, 0, before, after, before, after))
        mixed = sum_of(
            [self.kernel[a, b] * padded[:, a : a + rows, b : b + columns] for a in range(size) for b in range(size)]
        )
        return torch.cat([head, mixed.flatten(1, 2)], dim=1)
