"""Language models with one mechanism after the other: what is trained for the table. A mechanism is a line.

No table of the paper, whose language model is of data that not everybody has: this one is of IMDb, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..models import LANGUAGE_SIZES
from ..primal import Primal, mechanism
from ..primal import mechanisms as named
from ..training import text_recipe
from .job import Job, some

NAME = "table-language"
DATA = "text-imdb"
SIZES = ("small", "large")
SEEDS = 3

MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "sh": ("sh", {}),
    "qk-norm": ("qk-norm", {}),
    "bn": ("bn", {}),
}
"""By the name of its column: the name of a mechanism, and its settings but for the scales of scaled heads."""

BASELINE = "softmax"


def scales(heads: int) -> tuple[int, ...]:
    """Of scaled heads in a language model: a third each of 1, 2 and 4, or a quarter each of 1, 2, 4 and 8.

    >>> scales(6), scales(16)[::4]
    ((1, 1, 2, 2, 4, 4), (1, 2, 4, 8))
    """
    steps = next((n for n in (3, 4, 2) if heads % n == 0), 1)
    return tuple(2 ** (h * steps // heads) for h in range(heads))


def stated(column: str, heads: int) -> Primal:
    """The mechanism of a column for so many heads.

    >>> stated("sh", 6).training_set.scales
    (1, 1, 2, 2, 4, 4)
    """
    name, settings = MECHANISMS.get(column, (column, {}))
    own = {"scales": scales(heads)} if "sh" in name.split("+") else {}
    return mechanism(name, **settings, **own)


def jobs(
    only: Sequence[str] | None = None,
    mechanisms: Sequence[str] | None = None,
    seeds: Sequence[int] = tuple(range(SEEDS)),
    **changes: Any,
) -> dict[tuple[str, str], Job]:
    """What is trained, by size and mechanism.

    Args:
        only: some of `LANGUAGE_SIZES`; small and large unless given.
        mechanisms: of `MECHANISMS`, all of which are taken unless given, or others by their names.
        seeds: of each.
        changes: to the recipes, such as `steps=2`.

    >>> [job.mechanism for job in jobs(["small"], ["sh"]).values()]
    ['sh, small']
    """
    sizes = some(f"{NAME} has no size", only or SIZES, tuple(LANGUAGE_SIZES))
    known = tuple(dict.fromkeys((*MECHANISMS, *named())))
    columns = some("there is no mechanism", mechanisms or tuple(MECHANISMS), known)
    return {
        (size, column): Job(
            DATA, f"{column}, {size}", stated(column, LANGUAGE_SIZES[size].heads), text_recipe(size, **changes),
            tuple(seeds),
        )
        for size in sizes
        for column in columns
    }  # fmt: skip
