"""What generators share: work in chunks on many cores, the same whatever their number, and a hash of the settings."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import numpy as np

from ...base.environment import cores

Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with how many are done and how many there will be."""


def stream(seed: int, *part: int) -> np.random.Generator:
    """The random numbers of a part of the work, such as a chunk, independent of those of any other."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=part))


def in_order(work: Callable[[int], Result], chunks: Iterable[int], processes: int | None = None) -> Generator[Result]:
    """`work` of each chunk, in the order of `chunks`, which may be endless: close the iterator when there is enough.

    Args:
        work: a function of a module, so that another process finds it; all it depends on are its arguments.
        processes: 1 works in this one; otherwise new ones are started, all cores' worth unless given. They import the
            script that runs, which therefore calls generators below `if __name__ == "__main__":`.
    """
    processes = cores() if processes is None else processes
    if processes == 1:
        yield from map(work, chunks)
        return
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))  # a fork may hang where threads run
    waiting: deque[Future[Result]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(work, chunk))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that generates died: out of memory, or started by a script without "
            '`if __name__ == "__main__":`; processes=1 works in this process'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def check(seed: int, processes: int | None) -> None:
    """What every generator is given."""
    if seed < 0:
        raise ValueError(f"seed is {seed}: take 0 or a larger integer")
    if processes is not None and processes < 1:
        raise ValueError(f"processes is {processes}: take 1 or more, or None for all cores")


def settings_hash(generator: str, version: int, **settings: object) -> str:
    """SHA-256 of what decides the result of a generator."""
    stated = {"generator": generator, "version": version, **settings}
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
