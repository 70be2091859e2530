"""How many tokens each row of a cache holds, and where the next ones stand.

A row is the sequence of its valid tokens: hidden ones take no place, so that a row of a padded batch is what it is
alone. New tokens are put in order, valid ones first, before anything looks at them, and what comes out is put back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .held import Held


class Spots(NamedTuple):
    """Where tokens stand among the points of heads of one scale: [B or 1, L] each."""

    slot: Tensor  # the point that a token is in
    inside: Tensor  # its place in the window; 0 before the windows
    complete: Tensor  # whether it is the last token of its point


class Piece:
    """New tokens of every row, in order: token i of row b stands at place `places[b, i]` of its own sequence.

    Args:
        places: [B or 1, L].
        counts: [B], how many of them are valid; None where all are. The valid ones come first.
        end: no token of any row stands here or later, where that is known without looking; else None.
    """

    def __init__(self, places: Tensor, counts: Tensor | None, end: int | None, first: bool) -> None:
        self.places, self.counts, self.end, self.first = places, counts, end, first
        self.length = places.shape[1]
        self.order: Tensor | None = None  # [B, L], which token comes where
        self._spots: dict[tuple[int, int], Spots] = {}
        self.shared: dict[object, tuple[Tensor, ...]] = {}  # what follows from the places alone, for all layers

    def arange(self, length: int) -> Tensor:
        """0 … length − 1."""
        return torch.arange(length, device=self.places.device)

    @property
    def valid(self) -> Tensor | None:
        """Boolean [B, L]; None where all are."""
        return None if self.counts is None else self.arange(self.length) < self.counts.view(-1, 1)

    @property
    def ragged(self) -> bool:
        """Whether rows are of different lengths."""
        return self.places.shape[0] > 1

    def spots(self, scale: int, prefix: int) -> Spots:
        """Where the tokens stand among points: the first `prefix` tokens, then windows of `scale`."""
        if (found := self._spots.get((scale, prefix))) is None:
            after = (self.places - prefix).clamp(min=0)
            slot = self.places.clamp(max=prefix) + after // scale if prefix else after // scale
            inside = after % scale
            complete = (inside == scale - 1) | (self.places < prefix)
            found = self._spots[scale, prefix] = Spots(slot, inside, complete)
        return found

    def single(self, token: int) -> Piece:
        """One of them."""
        counts = None if self.counts is None else (self.counts - token).clamp(0, 1)
        end = None if self.end is None else self.end - self.length + token + 1
        return Piece(self.places[:, token : token + 1], counts, end, False)

    def ordered(self, x: Tensor, dim: int = 1) -> Tensor:
        """Tokens along `dim`, the batch being dimension 0, valid ones first."""
        return x if self.order is None else _taken(x, self.order, dim)

    def last(self, x: Tensor) -> Tensor:
        """Of tokens in order, [B, L, C], the last valid one of every row: [B, C]."""
        if self.counts is None:
            return x[:, -1]
        index = (self.counts - 1).clamp(min=0)[:, None, None]
        return x.gather(1, index.expand(-1, 1, x.shape[2])).squeeze(1)

    def put_back(self, x: Tensor, dim: int = 1) -> Tensor:
        """The other way, with zeros for tokens that are hidden."""
        if self.order is None:
            return x
        valid = self.valid
        assert valid is not None
        x = x.masked_fill(~valid.view(*valid.shape, *(1,) * (x.dim() - 2)), 0.0) if dim == 1 else x
        return _taken(x, self.order.argsort(1), dim)


class Rows(Held):
    """The lengths of all rows; the layers of a model share one.

    Args:
        batch: rows.
        length: the most tokens of a row, allocated once; None to grow.
        rewind: tokens that can be taken back, beside what is exact anyway.
    """

    def __init__(self, batch: int, device: torch.device, length: int | None, rewind: int) -> None:
        super().__init__(static=length is not None)
        self.most, self.rewind, self.device = length, rewind, device
        self.add("lengths", (batch,), torch.int64, device)
        self.add("spare", (batch,), torch.int64, device)
        self.ragged, self.empty = False, True
        self.end = 0  # no row is longer; known where rows grow
        self.room = length or 0

    @property
    def lengths(self) -> Tensor:
        """Tokens of every row, [B]."""
        return self.tensors["lengths"]

    @property
    def batch(self) -> int:
        """How many."""
        return self.lengths.shape[0]

    def piece(self, tokens: int, hidden: Tensor | None) -> Piece:
        """So many new tokens, of which `hidden` [B, tokens] are padding."""
        if tokens < 1:
            raise ValueError("a step of decoding takes at least one new token of every row, got none")
        if hidden is not None:
            self._check(hidden, tokens)
            if self.ragged is False:
                self.ragged = True
        looks = self.device.type == "cpu" and not torch.compiler.is_compiling()
        if self.most is not None and looks and int(self.lengths.max()) + tokens > self.most:
            raise ValueError(
                f"a row of this cache holds {int(self.lengths.max())} tokens and has room for length={self.most}; "
                f"{tokens} more do not fit. Give a larger length, or none, to let it grow"
            )
        if self.most is None:
            self._grow(self.end + tokens)
        counts = None if hidden is None else (~hidden).sum(1)
        lengths = self.lengths if self.ragged else self.lengths[:1]
        places = lengths[:, None] + torch.arange(tokens, device=self.device)
        piece = Piece(places, counts, None if self.most is not None else self.end + tokens, self.empty)
        if hidden is not None:
            piece.order = hidden.int().argsort(stable=True, dim=1)
        return piece

    def advance(self, piece: Piece) -> None:
        """The tokens are in the cache."""
        more = piece.length if piece.counts is None else piece.counts
        self.tensors["lengths"].add_(more)
        self.tensors["spare"].add_(more).clamp_(max=self.rewind)
        if self.empty:
            self.empty = False
        if self.most is None:
            self.end += piece.length

    def reset(self) -> None:
        super().reset()
        self.ragged, self.empty, self.end = False, True, 0

    def crop(self, length: int | Tensor) -> Tensor:
        """Tokens [B] that go where rows keep their first `length`, which are taken off here."""
        keep = torch.as_tensor(length, device=self.device).expand(self.batch)
        if bool((keep < 0).any()):
            raise ValueError(f"crop takes lengths of at least 0, got {length!r}")
        removed = (self.lengths - keep).clamp(min=0)
        self.tensors["lengths"].sub_(removed)
        self.tensors["spare"].sub_(removed).clamp_(min=0)
        ends = self.lengths.tolist()
        self.end, self.ragged = max(ends), len(set(ends)) > 1
        return removed

    def _grow(self, tokens: int) -> None:
        if tokens > self.room:
            self.room = -(-max(tokens, self.room + self.room // 4) // GRAIN) * GRAIN

    def _check(self, hidden: Tensor, tokens: int) -> None:
        if hidden.dtype != torch.bool or hidden.shape != (self.batch, tokens):
            raise ValueError(
                f"padding must be boolean, True at padding, of shape [batch, new tokens] = {[self.batch, tokens]}; got "
                f"{hidden.dtype}, {list(hidden.shape)}"
            )
        if hidden.device.type != "cpu" or torch.compiler.is_compiling():
            return
        valid = ~hidden
        if bool((valid[:, 1:] & ~valid[:, :-1]).sum(1).add(valid[:, 0].int()).gt(1).any()):
            raise ValueError(
                "padding hides tokens between others of a row; in a cache a row has padding at its left or its right, "
                "which takes no place. Give the tokens without those that are hidden"
            )


GRAIN = 64
"""A cache that grows has room for a multiple of so many tokens."""


def _taken(x: Tensor, order: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[0], shape[dim] = order.shape
    return x.gather(dim, order.view(shape).expand(x.shape))
