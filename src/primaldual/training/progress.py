"""What is known of a training under way: its history, and what those are told who watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

History = dict[str, list[Any]]
"""Of one member, at every evaluation: the "epoch" or "step", the mean "loss" in that epoch, or since the evaluation
before, and the metric on every part; None where a part was not evaluated then (`Recipe.test_at_end`)."""


@dataclass(frozen=True)
class Progress:
    """What is known after an evaluation; or, within an epoch that takes long, how far it is.

    Args:
        done, total: epochs (or steps) that are done, with a share of the epoch under way, and that there will be.
        seeds: of the members that still train; `values` has a number for each of them.
        values: "loss", and the metric of each part that is evaluated; none within an epoch.
        messages: about members that stopped.
        unit: "epoch" or "step".
    """

    done: float
    total: int
    seeds: tuple[int, ...]
    values: dict[str, tuple[float, ...]]
    messages: tuple[str, ...] = ()
    unit: str = "epoch"


Watch = Callable[[Progress], None]


def best_at(values: list[float], highest: bool) -> int:
    """Where the best value stands; the first of equals.

    >>> best_at([97.0, 99.0, 99.0], highest=True)
    1
    """
    return values.index((max if highest else min)(values))
