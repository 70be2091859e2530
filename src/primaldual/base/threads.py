"""How many threads torch works with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Found = TypeVar("Found")


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Inside, at most so many: threads that wait for each other cost more than they bring where others work too."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(do: Callable[[Item], Found], items: Sequence[Item], jobs: int) -> list[Found]:
    """What is made of every item, by so many threads; the first error ends all, when what has begun is done.

    >>> side_by_side(lambda x: 2 * x, [1, 2, 3], jobs=2)
    [2, 4, 6]
    """
    if jobs == 1 or len(items) < 2:
        return [do(item) for item in items]
    before = torch.get_num_threads()
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(do, item) for item in items]
        try:
            return [one.result() for one in waiting]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(before)  # threads that come later have as many as those that were there
