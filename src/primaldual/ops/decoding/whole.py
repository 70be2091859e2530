"""The cache of a layer, or of all layers of a model, as its user has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..problem import UnsupportedError
from .cache import AttentionCache
from .rows import Rows


class Cache:
    """What has been decoded so far, of every row.

    Args:
        rows: their lengths.
        layers: the cache of the attention of each layer.
    """

    def __init__(self, rows: Rows, layers: Sequence[AttentionCache]) -> None:
        self.rows, self.layers = rows, list(layers)

    @property
    def lengths(self) -> Tensor:
        """Tokens of every row, [batch]; padding is none."""
        return self.rows.lengths

    @property
    def batch(self) -> int:
        """Rows."""
        return self.rows.batch

    @property
    def bytes(self) -> int:
        """That are allocated for keys, values and what else is kept."""
        return self.rows.bytes + sum(layer.bytes for layer in self.layers)

    @property
    def full_bytes(self) -> int:
        """Of a cache with room for as many tokens that keeps a key and a value of each for every head."""
        return sum(layer.full_bytes for layer in self.layers)

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index_b was: of beams, those that go on. Any number of rows may come out."""
        if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"reorder takes the indices of rows, [rows], int64; got {index.dtype}, {list(index.shape)}"
            )
        if self.rows.static and len(index) != self.batch:
            raise ValueError(f"a cache of a stated length keeps its {self.batch} rows; got {len(index)} indices")
        self.rows.reorder(index)
        for layer in self.layers:
            layer.reorder(index)

    def expand(self, times: int) -> None:
        """Every row so many times, copies side by side: a prompt that several beams begin with."""
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ValueError(f"expand takes an integer of at least 1, got {times!r}")
        self.reorder(torch.arange(self.batch, device=self.rows.device).repeat_interleave(times))

    def crop(self, length: int | Tensor) -> None:
        """Each row keeps its first `length` tokens, an integer or one for each row [batch].

        It is exact for as many tokens as the cache's `rewind` says, and for more where nothing is needed that is gone:
        where `length` is the end of a window of every head, and the mechanism has no convolution and no decay. All
        else is refused, with the reason, and the cache is as it was.
        """
        removed, spare, before = self._removed(length), self.rows.tensors["spare"], self.lengths.clone()
        state = self.rows.ragged, self.rows.end
        beyond, kept = bool((removed > spare).any()), spare.clone()
        self.rows.crop(length)
        if not bool(self.lengths.any()):
            self.reset()
            return
        further = removed.masked_fill(removed <= kept, 0)
        if beyond and (reason := next((r for one in self.layers if (r := one.crop_refusal(further))), None)):
            self.lengths.copy_(before)
            spare.copy_(kept)
            self.rows.ragged, self.rows.end = state
            raise UnsupportedError(
                f"cropping {int(removed.max())} tokens to {self._said(length)} is not exact: {reason}. Make the cache "
                f"with rewind={int(removed.max())}, which keeps the last tokens; crop to the end of a window of every "
                f"head; or decode the tokens anew"
            )
        for layer in self.layers:
            layer.crop(removed)

    def reset(self) -> None:
        """Without tokens, in the same memory."""
        self.rows.reset()
        for layer in self.layers:
            layer.reset()

    def _removed(self, length: int | Tensor) -> Tensor:
        return (self.lengths - torch.as_tensor(length, device=self.rows.device)).clamp(min=0)

    @staticmethod
    def _said(length: int | Tensor) -> str:
        return f"{length.tolist() if isinstance(length, Tensor) else length}"
