"""Where a row's sequence begins: windows, prefixes and patterns count from the first token that its key mask leaves.

A key padding mask that hides the first tokens of a row, left padding, moves the beginning of that row, so that a
sequence alone and in a left-padded batch give the same. A token that is hidden further inside moves nothing. Queries
are tokens of the same sequence; one that stands before its beginning has no place in a pattern, and sees no key of it.

Executors count from the first token of a tensor. So rows are rolled to the left, before anything else and here alone,
and what comes out is rolled back: where a key mask is given and places matter, whatever it hides. On a GPU its values
are not looked at, which would wait for the device; a CPU looks, and leaves out what would move nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..dual.form import form_of, places_of
from ..primal import Primal


class Places(NamedTuple):
    """Where tokens stand: one after the other from `first` on, or as given, [batch, length]."""

    first: int
    length: int
    given: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """[length], or [batch, length]."""
        return torch.arange(self.length, device=device) + self.first if self.given is None else self.given


@dataclass(frozen=True)
class Start:
    """How rows are rolled: row b begins at token first_b of its keys.

    Where places of queries matter, too, these are given all those before them, so that rows can be rolled against one
    another: `offset` more, and `queries` in all.
    """

    first: Tensor  # [B, 1]
    queries: int | None = None
    offset: int = 0
    hides: bool = False  # whether a query before its row's first token sees no key

    def of_keys(self, x: Tensor, dim: int) -> Tensor:
        """What belongs to the keys along `dim`, in rolled rows; dimension 0 is the batch, or 1 where all rows agree."""
        return _rolled(x, self.first, dim)

    def of_queries(self, x: Tensor, dim: int) -> Tensor:
        """The same of queries, after those that stand before them."""
        if self.queries is None:
            return x
        if self.offset:
            x = pad(x, (0, 0) * (x.dim() - 1 - dim) + (self.offset, 0))
        return _rolled(x, self.first, dim)

    def of_pairs(self, x: Tensor) -> Tensor:
        """Of a mask [B or 1, H or 1, L, S]."""
        return self.of_keys(self.of_queries(x, 2), 3)

    def copied(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        """Bytes of rolling them, read and written; of outputs, too, where queries are rolled."""
        moved = [k, v] if self.queries is None else [k, v, q, q]
        return 2 * sum(x.numel() * x.element_size() for x in moved)

    def back(self, x: Tensor) -> Tensor:
        """Outputs or weights [B, H, L, ·] of rolled queries, in their places."""
        if self.queries is None:
            return x
        x = _rolled(x, -self.first, 2)
        if self.hides:
            before = torch.arange(self.queries, device=x.device) < self.first
            x = x.masked_fill(before[:, None, :, None], 0.0)
        return x[:, :, self.offset :] if self.offset else x

    def keys_back(self, x: Tensor, dim: int) -> Tensor:
        """What belongs to the keys of rolled rows along `dim`, in their places."""
        return _rolled(x, -self.first, dim)

    def weights_back(self, x: Tensor) -> Tensor:
        """Weights [B, H, L, S] over keys in their places."""
        return self.keys_back(self.back(x), 3)


def start_of(
    primal: Primal, scales: tuple[int, ...], hidden: Tensor | None, is_causal: bool = False,
    queries: int = 0, offset: int = 0,
) -> Start | None:  # fmt: skip
    """How rows are rolled where `hidden` [B, S] hides keys; None where places do not matter, or nothing moves."""
    if hidden is None or (matter := places_of(primal, scales, is_causal)) == "none" or not _may_move(hidden):
        return None
    first = first_of(hidden)
    if matter == "keys":
        return Start(first)
    hides = is_causal or form_of(primal).subset != "all"
    return Start(first, offset + queries, offset, hides)


def first_of(hidden: Tensor) -> Tensor:
    """The first token [B, 1] that is not hidden [B, S]; the first one where all are."""
    return (~hidden).int().argmax(-1, keepdim=True)


def _may_move(hidden: Tensor) -> bool:
    looks = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    if not looks or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return bool(hidden[:, :1].any())


def _rolled(x: Tensor, by: Tensor, dim: int) -> Tensor:
    """Along `dim` of each row, what stood at i + by_b comes to i, around the end."""
    size = x.shape[dim]
    index = (torch.arange(size, device=x.device) + by) % max(size, 1)  # [B, size]
    index = index.view(index.shape[0], *(size if n == dim else 1 for n in range(1, x.dim())))
    rows = torch.broadcast_shapes(index.shape[:1], x.shape[:1])
    return x.expand(*rows, *x.shape[1:]).gather(dim, index.expand(*rows, *x.shape[1:]))
