"""S of scaled heads: keys and values pooled to fewer points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ._clusters import cluster
from ._spec import LONGEST, check_choice, check_count
from .features import Parameters
from .grids import check_grid, grid_of
from .training_sets import Points, TrainingSet


@dataclass(frozen=True)
class Pooled(TrainingSet):
    """Head s is fitted to keys and values pooled in windows of its own scale: Attention-SH.

    scales: one per head, or None for min(8, 2^⌊h/2⌋) (two heads: 1, 2).
    how: "mean"; "max"; "conv" (strided, depth-wise, learned, starting as the mean); "kmeans" (of the keys).
    prefix: so many tokens at the start stay unpooled. grid: windows are scale × scale patches of this grid.
    """

    scales: tuple[int, ...] | None = None
    how: str = "mean"
    prefix: int = 0
    grid: tuple[int, int] | None = None
    kmeans_steps: ClassVar[int] = 10

    def __post_init__(self) -> None:
        if self.scales is not None:
            if not isinstance(self.scales, tuple | list):
                raise ValueError(
                    f"Pooled: scales must name one scale per head, such as (1, 1, 2, 2); got {self.scales!r}"
                )
            object.__setattr__(self, "scales", tuple(self.scales))
            if not self.scales:
                raise ValueError("Pooled: scales must name one scale per head, got none")
            for scale in self.scales:
                check_count("Pooled", "every scale", scale)
        check_choice("Pooled", "how", self.how, ("mean", "max", "conv", "kmeans"))
        check_grid("Pooled", self.grid, self.prefix)
        if self.how == "conv" and self.scales:
            taps = max(self.scales) ** (2 if self.grid else 1)
            check_count("Pooled", "the taps of a window", taps, most=LONGEST)

    def head_scales(self, heads: int) -> tuple[int, ...]:
        if self.scales is None:
            return (1, 2) if heads == 2 else tuple(min(8, 2 ** (h // 2)) for h in range(heads))
        if len(self.scales) != heads:
            raise ValueError(
                f"Pooled: {len(self.scales)} scales {self.scales} for {heads} heads; give one scale per head"
            )
        return self.scales

    def learned(self, heads: int, head_dim: int) -> dict[str, Tensor]:
        if self.how != "conv":
            return {}
        scales = self.head_scales(heads)
        taps = {s: s * s if self.grid else s for s in sorted(set(scales)) if s > 1}
        return {f"pool_kernel_{s}": torch.full((scales.count(s), n), 1.0 / n) for s, n in taps.items()}

    def window(self, index: Tensor, scale: int, tokens: int) -> tuple[Tensor, Tensor]:
        """For each token: its window, and its place inside it."""
        after = index - self.prefix
        if self.grid is None:
            window, place = after // scale, after % scale
        else:
            _, columns = grid_of("Pooled", tokens, self.grid, self.prefix)
            row, column = after // columns, after % columns
            window = row // scale * -(-columns // scale) + column // scale
            place = row % scale * scale + column % scale
        unpooled = index < self.prefix
        return torch.where(unpooled, index, window + self.prefix), torch.where(unpooled, 0, place)

    def coordinate(self, index: Tensor, scale: int, tokens: int) -> Tensor:
        return self.window(index, scale, tokens)[0]

    def points(self, scale: int, tokens: int) -> int:
        prefix = min(self.prefix, tokens)
        if self.grid is None:
            return prefix + (tokens - prefix + scale - 1) // scale  # a compiler simplifies this form
        rows, columns = grid_of("Pooled", tokens, self.grid, self.prefix)
        return prefix + -(-rows // scale) * -(-columns // scale)

    def reduce(self, keys: Tensor, values: Tensor, seen: Tensor, scale: int, parameters: Parameters) -> Points:
        if scale == 1:
            return super().reduce(keys, values, seen, scale, parameters)
        tokens = keys.shape[-2]
        index = torch.arange(tokens, device=keys.device)
        window, place = self.window(index, scale, tokens)
        if self.how == "kmeans":
            member = cluster(keys, seen, self.prefix, scale, self.kmeans_steps)  # [B, H, 1, W, S]
        else:
            points = torch.arange(self.points(scale, tokens), device=keys.device)
            member = points[:, None] == window  # [W, S]
        taking = member & seen.unsqueeze(-2)  # [B, H or 1, R, W, S]: the tokens that make up each point
        count = taking.sum(-1, keepdim=True)
        share = taking.to(keys.dtype) / count.clamp(min=1)
        keys, values = keys.unsqueeze(2), values.unsqueeze(2)  # [B, H, 1, S, D]
        exists = count.squeeze(-1) > 0
        if self.how == "max":
            return Points(_masked_max(keys, taking), _masked_max(values, taking), exists, None)
        if self.how == "conv":
            # a window with missing tokens is scaled up, so that the start, 1/s everywhere, is the mean there too
            initial = keys.new_full((1, scale * scale if self.grid else scale), 1.0)
            taps = parameters.get(f"pool_kernel_{scale}", initial / initial.shape[-1]).to(keys.dtype)
            weight = torch.where(index < self.prefix, 1.0, taps[:, place] * taps.shape[-1])  # [H, S]
            mix = share * weight[:, None, None, :]
            return Points(mix @ keys, mix @ values, exists, None)
        return Points(share @ keys, share @ values, exists, share)

    def causal_refusal(self, scale: int) -> str | None:
        if scale == 1 or (self.how == "mean" and self.grid is None):
            return None
        what = f"{self.how} pooling" if self.how != "mean" else "pooling over a grid"
        return f"{what} (scale {scale}) has no causal form; mean pooling in 1-D windows has one"

    def text(self, x: str = "x") -> str:
        scales = "min(8, 2^⌊h/2⌋)" if self.scales is None else ", ".join(map(str, self.scales))
        where = f" of a {self.grid[0]}×{self.grid[1]} grid" if self.grid else ""
        return f"keys and values pooled ({self.how}) in windows{where} of scale {scales}"

    def latex(self, x: str = "x") -> str:
        scales = (
            r"s_h=\min(8,2^{\lfloor h/2\rfloor})" if self.scales is None else f"s=({','.join(map(str, self.scales))})"
        )
        return rf"\{{1,\dots,\lceil N/s_h\rceil\}},\; {scales}\;\text{{({self.how} pooling)}}"


def _masked_max(x: Tensor, taking: Tensor) -> Tensor:
    """[B, H, 1, S, D] to [B, H, R, W, D]: the largest entry over the tokens of each point; empty points are 0."""
    chosen = x.unsqueeze(3).masked_fill(~taking.unsqueeze(-1), -torch.inf).amax(-2)
    return chosen.masked_fill(~taking.any(-1, keepdim=True), 0.0)
