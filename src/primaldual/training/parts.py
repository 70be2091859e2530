"""Series on the device that trains on them, and what is held out of the training set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..data import Dataset, Split


@dataclass(frozen=True, eq=False)
class Part:
    """Series that stay on a device: x [cases, length, channels], padding [cases, length] or None, y [cases].

    x may have more channels than the series, all 0.
    """

    x: Tensor
    padding: Tensor | None
    y: Tensor

    def __len__(self) -> int:
        return self.x.shape[0]

    @classmethod
    def of(
        cls, split: Split, device: torch.device, dtype: torch.dtype, rows: Tensor | None = None, channels: int = 0
    ) -> Part:
        """A split, or some of its rows. Channels without any value are 0, their training mean.

        Args:
            channels: so many at least.
        """
        x, padding, y = split.x.nan_to_num(nan=0.0).to(dtype), split.padding, split.y
        if channels > x.shape[-1]:
            x = pad(x, (0, channels - x.shape[-1]))
        if y.is_floating_point():
            y = y.to(torch.promote_types(dtype, torch.float32))
        if rows is not None:
            x, padding, y = x[rows], None if padding is None else padding[rows], y[rows]
        return cls(x.to(device), None if padding is None else padding.to(device), y.to(device))


def hold_out(data: Dataset, share: float) -> tuple[Tensor | None, Tensor | None]:
    """Rows of the training set to train on and to validate on; of every class its share. The same for every seed."""
    if not share:
        return None, None
    y = data.train.y.cpu()
    groups = [(y == c).nonzero().flatten() for c in y.unique()] if data.classes else [torch.arange(len(y))]
    generator = torch.Generator().manual_seed(1337)
    held = []
    for rows in groups:
        count = min(round(share * len(rows)), len(rows) - 1)  # a class is never held out whole
        held.append(rows[torch.randperm(len(rows), generator=generator)[:count]])
    validation = torch.cat(held).sort().values
    if not len(validation):
        raise ValueError(
            f"{data.name}: a share of {share:g} of {len(y)} training series holds out none; give a larger one, or "
            f"more series of a class"
        )
    rest = torch.ones(len(y), dtype=torch.bool)
    rest[validation] = False
    return rest.nonzero().flatten(), validation


def order(seed: int, epoch: int, cases: int) -> Tensor:
    """The order in which a member sees its series: of its seed and the epoch alone."""
    return torch.randperm(cases, generator=torch.Generator().manual_seed(mix(0, seed, epoch)))


def mix(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
