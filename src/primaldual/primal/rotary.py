"""Rotary positions: queries and keys turned by angles that grow with their places."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ._spec import is_number
from .features import Parameters
from .inputs import PositionMap


@dataclass(frozen=True)
class Rotary(PositionMap):
    """x at position i ↦ R_i x, R_i turning channels c and c + r/2 by i·base^(−2c/r), for c < r/2: rotary positions.

    The rotated channels are the first r = 2⌊fraction·D/2⌋ of the head's D, the others stay as they are. R_i is
    orthogonal and (R_i q)·(R_j k) = q·(R_{j−i} k), so that the score depends on how far query and key stand apart, and
    not on where. With a finite Φ this is not so: Φ(R_i q)·Φ(R_j k) depends on both places.

    It acts on queries and keys, never on values, and before pooling: a pooled key is the mean of rotated ones. Tokens
    that stay unpooled at the start (`prefix`) count like all others. Maps of points act on what is rotated, and
    statistics are those of rotated keys.

    In the paper T is one map; here it is one for each position, so f is the paper's at points (position, x) with
    T(i, x) = R_i x, and κ(T(i, x), T(j, y)) is a kernel of these. Nothing else of the derivation changes.

    Args:
        base: the slowest channels turn by about 1/base of a radian for each token.
        fraction: the share of the head's channels that is rotated.
    """

    base: float = 10000.0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not is_number(self.base) or not 0 < self.base < float("inf"):
            raise ValueError(f"Rotary: base must be a positive number, got {self.base!r}")
        if not is_number(self.fraction) or not 0 < self.fraction <= 1:
            raise ValueError(f"Rotary: fraction must be over 0 and at most 1, got {self.fraction!r}")

    def at(self, x: Tensor, positions: Tensor, parameters: Parameters) -> Tensor:
        working = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (t.to(working) for t in self.turns(positions, x.shape[-1]))
        cos, sin = (t.unsqueeze(1) if t.dim() == 3 else t for t in (cos, sin))
        half = cos.shape[-1]
        one, other, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        one, other = one.to(working), other.to(working)
        turned = (one * cos - other * sin).to(x.dtype), (other * cos + one * sin).to(x.dtype)
        return torch.cat([*turned, rest], dim=-1)

    def turns(self, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at these places, [..., length] to [..., length, r/2], in float64."""
        half = int(self.fraction * head_dim / 2)
        if not half:
            raise ValueError(
                f"{self!r} rotates pairs of channels, and there is none in a share of {self.fraction:g} of {head_dim}; "
                f"give a larger fraction or a larger head dimension"
            )
        # in float64: the angle of a late token has few digits left after the point in float32
        wide = torch.float64 if positions.device.type != "mps" else torch.float32
        channel = torch.arange(half, device=positions.device, dtype=wide)
        angle = positions.to(wide).unsqueeze(-1) * self.base ** (-channel / half)
        return angle.cos(), angle.sin()

    def taps(self, head_dim: int) -> int:
        return 2  # cos and sin

    def text(self, x: str = "x") -> str:
        return f"R_{place}({x})" if (place := _place(x)) else f"R({x})"

    def latex(self, x: str = "x") -> str:
        return f"R_{place}({x})" if (place := _place(x)) else f"R({x})"

    def remarks(self, latex: bool = False) -> tuple[str, ...]:
        if latex:
            rotated = "D" if self.fraction == 1 else rf"{self.fraction:g}\,D"
            return (
                rf"$R_i$ turns channels $c$ and $c+r/2$ of the token at position $i$ by "
                rf"$i\cdot {self.base:g}^{{-2c/r}}$, $r={rotated}$, so $(R_iq)^\top(R_jk)=q^\top R_{{j-i}}k$.",
                r"The paper's $T$ is one map for all tokens. This $f$ is the paper's at the points (position, $x$).",
            )
        rotated = "D" if self.fraction == 1 else f"{self.fraction:g}·D"
        return (
            f"R_i turns channels c and c + r/2 of the token at position i by i·{self.base:g}^(−2c/r), r = {rotated}, "
            f"so (R_i q)·(R_j k) = q·(R_(j−i) k).",
            "The paper's T is one map for all tokens. This f is the paper's at the points (position, x).",
        )


def _place(x: str) -> str:
    """The index of a query or key; nothing of any other point.

    >>> _place("q_i"), _place("Conv1D(k_j; 3)"), _place("x")
    ('i', 'j', '')
    """
    named = re.search(r"[qk]_([ij])", x)
    return named.group(1) if named else ""
