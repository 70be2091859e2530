"""New queries and keys through the maps of the token sequence; convolutions keep their last inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primal import DepthwiseConv1d, Primal, Rotary
from ...primal.convolutions import sum_of
from ...primal.features import Parameters
from .held import Held
from .last import after, before, joined
from .rows import Piece, Rows


class Maps(Held):
    """The maps of tokens, one after the other: of a convolution of n taps the last n − 1 inputs of every row.

    x_i ↦ Σ_t w_t ⊙ x_{i+t−n+1}; tokens before the first one of a row are zero.
    """

    def __init__(
        self, primal: Primal, rows: Rows, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
    ) -> None:  # fmt: skip
        super().__init__(rows.static)
        self.maps, self.rewind = primal.token_maps, rows.rewind
        for number, map_ in enumerate(self.maps):
            if type(map_) is DepthwiseConv1d:
                for name, count in zip("qk", heads, strict=True):
                    kept = map_.size - 1 + rows.rewind
                    self.add(f"{name}{number}", (rows.batch, count, kept, head_dim), dtype, rows.device)

    @property
    def mixes(self) -> bool:
        """Whether some map mixes tokens."""
        return bool(self.tensors)

    def __call__(self, name: str, x: Tensor, piece: Piece, parameters: Parameters) -> Tensor:
        """Of queries, "q", or keys, "k": [B, H, L, D]."""
        for number, map_ in enumerate(self.maps):
            if type(map_) is Rotary:
                x = _turned(map_, x, piece)
            elif type(map_) is DepthwiseConv1d:
                x = self._convolved(map_, f"{name}{number}", x, piece, parameters)
            else:
                x = map_.at(x, piece.places if piece.ragged else piece.places[0], parameters)
        return x

    def _convolved(self, map_: DepthwiseConv1d, name: str, x: Tensor, piece: Piece, parameters: Parameters) -> Tensor:
        whole = joined(self.tensors[name], x)
        needed = whole[:, :, whole.shape[2] - x.shape[2] - map_.size + 1 :]
        kernel = parameters["conv_kernel"].to(x)
        taps = kernel.unsqueeze(-3).unbind(-1) if map_.channels == "each" else kernel.unbind(0)
        out = sum_of([taps[t] * needed[:, :, t : t + x.shape[2]] for t in range(map_.size)])
        self._put(name, after(self.tensors[name], whole, piece))
        return out

    def crop(self, removed: Tensor) -> None:
        """As they were `removed` [B] tokens ago."""
        for name, x in self.tensors.items():
            self._put(name, before(x, removed))


def _turned(map_: Rotary, x: Tensor, piece: Piece) -> Tensor:
    """What `map_.at` gives, with angles that all layers share: x ↦ cos ⊙ x + sin ⊙ (the other of each pair)."""
    working = torch.promote_types(x.dtype, torch.float32)
    key = (map_, x.shape[-1], working)
    if (found := piece.shared.get(key)) is None:
        cos, sin = (t.to(working).unsqueeze(1) for t in map_.turns(piece.places, x.shape[-1]))
        found = piece.shared[key] = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    cos, sin = found
    rotated = x[..., : cos.shape[-1]]
    one, other = rotated.chunk(2, dim=-1)
    turned = (rotated * cos + torch.cat([other, one], -1) * sin).to(x.dtype)
    return turned if rotated.shape[-1] == x.shape[-1] else torch.cat([turned, x[..., cos.shape[-1] :]], dim=-1)
