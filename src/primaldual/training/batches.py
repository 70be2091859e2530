"""Which cases make which batch: of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Chosen(NamedTuple):
    """The rows [members, cases] of a batch, and the length that it is cut to, if it is."""

    rows: Tensor
    length: int | None


class Batches:
    """The batches of every epoch.

    Cases that have lengths are sorted by them and divided into a few groups, whole batches each but for the longest
    cases; a batch is drawn from one group, and is cut to the longest of it. So there is one size of step per group, and
    one for the last batch. Which group comes when follows from the epoch: it is the same for all members. The cases of
    a batch follow from the member's seed and the epoch.

    Args:
        cases: of the training part.
        size: cases of a batch.
        lengths: of the cases, or None.
        groups: how many there are at most.
    """

    def __init__(self, cases: int, size: int, lengths: Tensor | None = None, groups: int = 1) -> None:
        self.cases, self.size = cases, size
        self.groups: list[tuple[Tensor | None, int | None]] = [(None, None)]
        if lengths is not None:
            lengths = lengths.cpu()
            batches = -(-cases // size)
            many = min(groups, batches)
            ends = [min(cases, size * ((i + 1) * batches // many)) for i in range(many)]
            divided = lengths.argsort(stable=True).tensor_split(ends[:-1])
            self.groups = [(rows, int(lengths[rows].max())) for rows in divided]
        self._sizes = [len(x) for rows, _ in self.groups for x in torch.arange(self._count(rows)).split(size)]
        self._group_of = [i for i, (rows, _) in enumerate(self.groups) for _ in range(-(-self._count(rows) // size))]

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._sizes)

    def of_epoch(self, epoch: int, seeds: Sequence[int], device: torch.device) -> list[Chosen]:
        """In the order in which members train on them."""
        orders = torch.stack([self.order(seed, epoch) for seed in seeds])
        pieces = orders.to(device).split(self._sizes, 1)
        found = [Chosen(rows, self.groups[i][1]) for rows, i in zip(pieces, self._group_of, strict=True)]
        if len(self.groups) == 1:
            return found
        turns = torch.randperm(len(found), generator=torch.Generator().manual_seed(mix(3, epoch)))
        return [found[i] for i in turns.tolist()]

    def order(self, seed: int, epoch: int) -> Tensor:
        """The cases as a member sees them, group by group."""
        generator = torch.Generator().manual_seed(mix(0, seed, epoch))
        found = []
        for rows, _ in self.groups:
            drawn = torch.randperm(self._count(rows), generator=generator)
            found.append(drawn if rows is None else rows[drawn])
        return torch.cat(found)

    def _count(self, rows: Tensor | None) -> int:
        return self.cases if rows is None else len(rows)


def mix(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
