"""CUDA graphs: a function is recorded once and replayed with one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3
"""Runs before the capture: kernels are loaded and tuned, workspaces made."""


class WaitsForDeviceError(RuntimeError):
    """A function waits for the device, and so cannot be captured."""


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
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP - 1):
                    function(*self._inputs)
                with no_waiting():  # a capture that fails half-way leaves allocator and generators in disorder
                    function(*self._inputs)
        finally:  # what was begun must not run into what the caller does next
            current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = function(*self._inputs)

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
