"""The last tokens of every row, the newest at the end."""

from __future__ import annotations

from torch import Tensor, arange, cat
from torch.nn.functional import pad

from .rows import Piece


def joined(last: Tensor, x: Tensor) -> Tensor:
    """What was kept [B, H, K, ...], and the new tokens [B, H, L, ...] after it."""
    return cat([last, x.to(last.dtype)], dim=2)


def after(last: Tensor, whole: Tensor, piece: Piece) -> Tensor:
    """The last ones of `joined`, as many as before, up to the last token of a row that is valid."""
    kept = last.shape[2]
    if piece.counts is None:
        return whole[:, :, whole.shape[2] - kept :]
    index = piece.counts.view(-1, 1) + piece.arange(kept)  # [B, K]
    index = index.view(index.shape[0], 1, kept, *(1,) * (whole.dim() - 3))
    return whole.gather(2, index.expand(*last.shape))


def before(last: Tensor, removed: Tensor) -> Tensor:
    """As it was `removed` [B] tokens ago, but for the oldest, which are lost."""
    kept = last.shape[2]
    whole = pad(last, (0, 0) * (last.dim() - 3) + (kept, 0))
    index = arange(kept, device=last.device) + (kept - removed.clamp(max=kept)).view(-1, 1)
    index = index.view(index.shape[0], 1, kept, *(1,) * (last.dim() - 3))
    return whole.gather(2, index.expand(*last.shape))
