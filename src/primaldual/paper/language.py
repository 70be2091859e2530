"""Language models with one mechanism after the other: what is trained for the table. A mechanism is a line.

No table of the paper, whose language model is of data that not everybody has: this one is of IMDb, byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..models import LANGUAGE_SIZES
from ..primal import DepthwiseConv1d, Primal, mechanism
from ..primal import mechanisms as mechanism_names
from ..training import text_recipe
from .job import Job, some

NAME = "table-language"
DATA = "text-imdb"
SIZES = ("small", "large")
SEEDS = 3

BASELINE = "softmax"


def scales(heads: int) -> tuple[int, ...]:
    """Of scaled heads in a language model: a third each of 1, 2 and 4, or a quarter each of 1, 2, 4 and 8.

    >>> scales(6), scales(16)[::4]
    ((1, 1, 2, 2, 4, 4), (1, 2, 4, 8))
    """
    steps = next((n for n in (3, 4, 2) if heads % n == 0), 1)
    return tuple(2 ** (h * steps // heads) for h in range(heads))


def named(name: str, **settings: Any) -> Callable[[int], Primal]:
    """A mechanism by its name, for so many heads; those that are scaled have the scales of `scales`.

    >>> named("sh")(6).training_set.scales
    (1, 1, 2, 2, 4, 4)
    """
    scaled = "sh" in name.replace("-", "+").split("+")
    return lambda heads: mechanism(name, **settings, **({"scales": scales(heads)} if scaled else {}))


def _convolved(heads: int) -> Primal:
    """Gated scaled heads whose queries and keys are convolved before, every channel by a kernel of its own."""
    return replace(named("gate+sh")(heads), inputs=(DepthwiseConv1d(5, causal=True, channels="each"),))


MECHANISMS: dict[str, Callable[[int], Primal]] = {
    "softmax": named("softmax"),
    "sh": named("sh"),
    "gate": named("gate"),
    "gate+sh": named("gate+sh"),
    "conv+gate+sh": _convolved,
    "qk-norm": named("qk-norm"),
    "bn": named("bn"),
}
"""By the name of its column: the mechanism for so many heads."""


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
    known = tuple(dict.fromkeys((*MECHANISMS, *mechanism_names())))
    columns = some("there is no mechanism", mechanisms or tuple(MECHANISMS), known)
    stated = {
        (size, column): MECHANISMS.get(column, named(column))(LANGUAGE_SIZES[size].heads)
        for size in sizes
        for column in columns
    }
    return {
        (size, column): Job(DATA, f"{column}, {size}", primal, text_recipe(size, **changes), tuple(seeds))
        for (size, column), primal in stated.items()
    }
