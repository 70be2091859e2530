"""Three tensors that are parts of one buffer, such as queries, keys and values of one projection."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def side_by_side(parts: Sequence[Tensor], strides: Sequence[int], step: int) -> bool:
    """Whether all have these strides and lie in one storage, each `step` elements after the one before."""
    first = parts[0]
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    return all(
        x.stride() == tuple(strides)
        and x.storage_offset() == start + i * step
        and x.untyped_storage().data_ptr() == storage
        for i, x in enumerate(parts)
    )
