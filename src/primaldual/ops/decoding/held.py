"""Tensors of a cache, by name; the batch is dimension 0 of all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


class Held:
    """What is kept of every row. Static tensors stay where they are, so that a captured step finds them again."""

    def __init__(self, static: bool) -> None:
        self.static = static
        self.tensors: dict[str, Tensor] = {}
        self.fresh: dict[str, float] = {}  # what fills a tensor of no tokens

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: float = 0) -> None:
        """One more."""
        self.tensors[name] = torch.full(shape, fill, dtype=dtype, device=device)
        self.fresh[name] = fill

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row rows_b was; where their number changes there are as many rows as `rows` has."""
        for name, x in self.tensors.items():
            self._put(name, x.index_select(0, rows))

    def widen(self, name: str, length: int) -> None:
        """So many places along dimension 2."""
        x = self.tensors[name]
        self.tensors[name] = pad(x, (0, 0) * (x.dim() - 3) + (0, length - x.shape[2]), value=self.fresh[name])

    def reset(self) -> None:
        """As it was before the first token."""
        for name, x in self.tensors.items():
            x.fill_(self.fresh[name])

    @property
    def bytes(self) -> int:
        """That are allocated."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    def _put(self, name: str, x: Tensor) -> None:
        if self.static and x.shape == self.tensors[name].shape:
            self.tensors[name].copy_(x)
        else:
            self.tensors[name] = x
