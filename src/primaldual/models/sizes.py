"""What the sizes of every model are checked for."""

from __future__ import annotations

from typing import Protocol

from ..primal._spec import check_count, is_number


class Sizes(Protocol):
    """Of a transformer."""

    @property
    def d_model(self) -> int: ...
    @property
    def heads(self) -> int: ...


def check_sizes(sizes: Sizes, *counts: str) -> None:
    """A ValueError unless these fields are counts, heads divide d_model, and what may be dropped is a share below 1."""
    owner = type(sizes).__name__
    for name in counts:
        check_count(owner, name, getattr(sizes, name))
    if sizes.d_model % sizes.heads:
        raise ValueError(
            f"{owner}: d_model must be a multiple of heads, got d_model={sizes.d_model}, heads={sizes.heads}"
        )
    for name in ("dropout", "attention_dropout"):
        value = getattr(sizes, name, None)
        if value is not None and not (is_number(value) and 0.0 <= value < 1.0):
            raise ValueError(f"{owner}: {name} must be in [0, 1), got {value!r}")
