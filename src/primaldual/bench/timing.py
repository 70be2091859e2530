"""Seconds of a step: device events on CUDA, the wall clock elsewhere; eager, or captured in one CUDA graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any, NamedTuple

import torch

from ..training.capture import step_graph

Step = Callable[[], Any]
WARM_UP, WARM_SECONDS = 3, 0.5
SAMPLE_SECONDS = {"eager": 5e-3, "captured": 2e-3}
"""A timed sample repeats the step until it lasts this long."""


class Contestant(NamedTuple):
    """Something to time.

    name: what it is called. steps: the same step on different inputs, run in turns. held: bytes of one step's inputs
    and parameters. context: entered around warm-up, capture and every sample, so that it costs no time inside.
    """

    name: str
    steps: Sequence[Step]
    held: int
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def elapsed(run: Step, device: torch.device) -> float:
    """Seconds from an idle device to an idle device."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    run()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1000


class Timed:
    """A contestant, warmed up, that gives one sample at a time."""

    def __init__(self, contestant: Contestant, mode: str, device: torch.device) -> None:
        self.contestant, self.device = contestant, device
        with contestant.context():
            for step in contestant.steps:
                step()
            steps = contestant.steps
            if mode == "captured":
                steps = [step_graph(step).graph.replay for step in steps]
        self._steps = cycle(steps)
        warm: list[float] = []
        while len(warm) < WARM_UP and sum(warm) < WARM_SECONDS:
            warm.append(self._seconds(1))
        self.inner = math.ceil(SAMPLE_SECONDS[mode] / max(min(warm), 1e-7))
        if self.inner > 1:
            self.sample()

    def sample(self) -> float:
        """Seconds per step, over `inner` steps in a row."""
        return self._seconds(self.inner) / self.inner

    def _seconds(self, count: int) -> float:
        with self.contestant.context():
            return elapsed(lambda: self._run(count), self.device)

    def _run(self, count: int) -> None:
        for _ in range(count):
            next(self._steps)()


def in_turns(timed: Sequence[Timed], repeats: int, budget: float) -> list[list[float]]:
    """A sample of each per round, in alternating order; fewer rounds (3 at least) once `budget` seconds are spent."""
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < repeats and (len(rounds) < 3 or time.perf_counter() - start < budget):
        order = list(enumerate(timed))
        if len(rounds) % 2:
            order.reverse()
        found = {place: one.sample() for place, one in order}
        rounds.append([found[place] for place in range(len(timed))])
    return rounds


def working_bytes(contestant: Contestant, device: torch.device) -> int | None:
    """The most bytes that one eager step allocates beyond what was allocated before it; CUDA alone counts them."""
    if device.type != "cuda":
        return None
    with contestant.context():
        contestant.steps[0]()  # workspaces that libraries keep are not the step's
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        contestant.steps[0]()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
