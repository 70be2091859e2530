"""CUDA graphs: a function is recorded once and replayed with one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARM_UP = 3
"""Runs before the capture: kernels are loaded and tuned, workspaces made."""


class WaitsForDeviceError(RuntimeError):
    """A function waits for the device, and so cannot be captured."""


class StepGraph(NamedTuple):
    """A CUDA graph of one step, and the tensors that its replays write."""

    graph: torch.cuda.CUDAGraph
    result: Any


def step_graph(step: Callable[[], Any], warm_up: int = WARM_UP) -> StepGraph:
    """One whole step as a CUDA graph, after a warm-up on a side stream."""
    with _side_stream():
        for _ in range(warm_up):
            step()
    return _record(step)


class Captured:
    """A function on a CUDA device that reads and writes tensors in place, captured.

    What the warm-up does to those tensors is the caller's to undo.

    Args:
        function: of the tensors in `inputs`.
        inputs: examples; their shapes are those of every later call.
        pool: the memory of an earlier graph (`Captured.pool`), to be shared with it.
    """

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...] = (), pool: Any = None) -> None:
        self._inputs = tuple(x.clone() for x in inputs)
        step = partial(function, *self._inputs)
        with _side_stream():
            for _ in range(WARM_UP - 1):
                step()
            with no_waiting():  # a capture that fails half-way leaves allocator and generators in disorder
                step()
        self._graph, self._output = _record(step, pool)

    @property
    def pool(self) -> Any:
        """The memory of this graph."""
        return self._graph.pool()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """As the function."""
        for place, x in zip(self._inputs, inputs, strict=True):
            place.copy_(x)
        self._graph.replay()
        return self._output.clone()  # another graph of the pool may write there


def _record(step: Callable[[], Any], pool: Any = None) -> StepGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return StepGraph(graph, result)


@contextmanager
def _side_stream() -> Iterator[None]:
    """What is launched inside comes after what was launched before, and before what is launched afterwards."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:  # what was begun must not run into what the caller does next
        current.wait_stream(side)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, what makes the host wait for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise WaitsForDeviceError(str(error).partition("\n")[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
