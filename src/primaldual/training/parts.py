"""Cases on the device that trains on them, and what is held out of the training part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .task import Batch, Task, cases


class Part:
    """Cases that stay on a device, and their lengths on the CPU."""

    def __init__(self, tensors: Batch, lengths: Tensor | None) -> None:
        self.tensors, self.lengths = tensors, None if lengths is None else lengths.cpu()

    def __len__(self) -> int:
        return cases(self.tensors)

    def rows(self, chosen: Tensor) -> Part:
        """Some of the cases."""
        tensors = tuple(None if x is None else x[chosen.to(x.device)] for x in self.tensors)
        return Part(tensors, None if self.lengths is None else self.lengths[chosen])

    def by_length(self) -> Part:
        """Sorted, where there are lengths."""
        return self if self.lengths is None else self.rows(self.lengths.argsort(stable=True))

    def pieces(self, size: int) -> Iterator[tuple[slice, int | None]]:
        """So many cases at a time, and the length of the longest of them, if it is known."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield rows, None if self.lengths is None else int(self.lengths[rows].max())

    @classmethod
    def of(cls, task: Task, part: str, dtype: torch.dtype, device: torch.device) -> Part:
        """A part of a task."""
        many, lengths = cases(task.parts[part]), task.lengths(part)
        if lengths is not None and lengths.shape != (many,):
            raise ValueError(
                f"{task.name}: lengths({part!r}) must be one number per case, [{many}], got {list(lengths.shape)}"
            )
        return cls(task.tensors(part, dtype, device), lengths)


def hold_out(name: str, count: int, classes: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
    """Rows of a training part to train on and to validate on; of every class its share. The same for every seed.

    Args:
        name: of the task.
        count: cases.
        classes: of the cases, or None where they are one.
    """
    y = torch.zeros(count) if classes is None else classes.cpu()
    groups = [(y == c).nonzero().flatten() for c in y.unique()]
    generator = torch.Generator().manual_seed(1337)
    held = []
    for rows in groups:
        many = min(round(share * len(rows)), len(rows) - 1)  # a class is never held out whole
        held.append(rows[torch.randperm(len(rows), generator=generator)[:many]])
    validation = torch.cat(held).sort().values
    if not len(validation):
        raise ValueError(
            f"{name}: a share of {share:g} of {count} training cases holds out none; give a larger one, or more cases "
            f"of a class"
        )
    rest = torch.ones(count, dtype=torch.bool)
    rest[validation] = False
    return rest.nonzero().flatten(), validation
