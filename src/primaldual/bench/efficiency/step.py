"""A step of the model, and what torch says of it: the FLOPs of its operators, the most bytes that were allocated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from ...models import SequenceClassifier
from ..timing import Contestant, working_bytes
from ..workload import size_of
from .setting import CLASSES, Setting

BYTES = 257
"""Ids of the tokens: bytes, and one for padding."""


class ModelStep:
    """A step of a model with random weights, on random documents; gradients are let go when it ends.

    Args:
        name: of the mechanism.
        setting: what is run.
        device: where.
    """

    def __init__(self, name: str, setting: Setting, device: torch.device) -> None:
        self.setting, self.device = setting, device
        with torch.device(device):
            self.model = SequenceClassifier(setting.config(name)).to(setting.dtype).train(setting.trains)
            self.tokens = torch.randint(1, BYTES, (setting.pairs, 2, setting.length))
            self.labels = torch.randint(CLASSES, (setting.pairs,))

    def __call__(self) -> object:
        if not self.setting.trains:
            with torch.no_grad():
                return self._scores()
        return torch.autograd.grad(cross_entropy(self._scores().float(), self.labels), list(self.model.parameters()))

    def _scores(self) -> Tensor:
        scores: Tensor
        if self.setting.passes == 1:
            scores = self.model(self.tokens)
        else:
            scores = self.model.compare(*(self.model.encode(document) for document in self.tokens.unbind(1)))
        return scores

    @property
    def held(self) -> int:
        """Bytes of weights and tokens."""
        return size_of(*self.model.parameters(), *self.model.buffers(), self.tokens)

    def peak(self) -> int:
        """Bytes that are held, and the most that a step allocates beyond them."""
        working = working_bytes(Contestant("step", [self], self.held), self.device)
        return self.held + (self._allocated() if working is None else working)

    def _allocated(self) -> int:
        """On a CPU, where no allocator counts: the largest sum of what torch's profiler saw come and go."""
        self()
        with _quiet(), torch.profiler.profile(profile_memory=True) as profile:
            self()
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        there = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            there += event.nbytes()
            most = max(most, there)
        return most


def counted_by_torch(name: str, setting: Setting) -> int:
    """FLOPs of all matrix products of a step, as torch counts them operator by operator; nothing is computed."""
    step = ModelStep(name, setting, torch.device("meta"))
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's library writes to the terminal whenever it starts and ends."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
