"""What the compiled part (`native`) must know to run a kind of call: its steps, and where what they work on lies.

The Python path is walked, on tensors like the given ones, with launches, matrix products and cuDNN's attention noted
down instead of made (`notes`). Whatever else it does is refused, and so is a kernel that is not as expected
(`packing`): then the call stays in Python.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..launching import precision
from .notes import Fused, FusedBack, Gather, Launch, Noted, Product, noted
from .packing import RefusedError, hooked, pack

logger = logging.getLogger(__name__)

OUT, KEPT, SCRATCH, GRAD, RESULTS, FIRST = 5, 6, 7, 8, 9, 14
"""Numbers of buffers after the five inputs: the output, what the forward pass keeps for the way back, what a pass needs
for itself, the gradient of the output, those of the inputs; and the first of those that hold one tensor's memory."""

LARGE = 2**22
"""Bytes from which on memory is allocated when it is first needed, and freed after the last time: there the host has
the time for it. Smaller memory is allocated at once."""

MOST = 1024
"""Kinds of calls that the compiled part knows at a time; beside these it knows for good what a CUDA graph holds."""

_held: dict[int, list[object]] = {}
"""Kernels and tables that replays point to, by the number of the replay: as long as it lives."""

Inputs = tuple[Tensor | None, ...]
Wanted = tuple[bool, ...]
"""Five of each."""


class Passes(NamedTuple):
    """A kind of attention as Python does it, both passes.

    forward(inputs, back) gives the output, and what the way back needs if there is one. backward(grad, inputs, wanted,
    *that) gives the gradients of the inputs, at least of those that are wanted.
    """

    forward: Callable[[Inputs, bool], tuple[Tensor, tuple[Any, ...]]]
    backward: Callable[..., Sequence[Tensor | None]]


def attend(
    library: ModuleType, kind: tuple[int, ...], numbers: tuple[float, ...], inputs: Inputs, passes: Callable[[], Passes]
) -> Tensor | None:
    """The output, by the compiled part, which learns a kind of call when it first sees it; None where it refuses.

    Beside the inputs, `kind` and `numbers` tell calls apart: whatever the passes depend on.
    """
    x = inputs[0]
    assert x is not None
    kind = *kind, precision(x) == "tf32"
    out = library.attend(kind, numbers, inputs)
    if out is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        held: list[object] = []
        try:
            parts = _learn(passes(), inputs, held)
        except (RefusedError, torch.OutOfMemoryError) as error:  # all that both passes need is there at once
            logger.debug("attention of kind %s stays in Python: %s", kind, error)
            parts = [], [], {}, None, (0, 0, 0, 0), [], (None,) * 5
        replay = library.learn(kind, numbers, inputs, *parts, MOST)
        if replay is not None:
            _held[replay] = held
        _let_go(library.gone(), x.device)
        out = library.attend(kind, numbers, inputs)
    return out if isinstance(out, Tensor) else None


def _let_go(gone: Sequence[int], device: torch.device) -> None:
    """Free what replays pointed to that are gone, when no launch is on its way that reads it."""
    if gone and device.type == "cuda":
        torch.cuda.synchronize(device)
    for replay in gone:
        _held.pop(replay, None)


def _learn(passes: Passes, inputs: Inputs, held: list[object]) -> tuple[Any, ...]:
    if hooked():
        raise RefusedError("something listens to Triton's launches")
    wanted = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs)
    with torch.no_grad(), torch.cuda.device_of(inputs[0]):
        _walk(passes, inputs, wanted)  # what is looked up later is made
        with _Allocations() as made:
            return _parts(_walk(passes, inputs, wanted), made.storages, held)


class _Allocations(TorchDispatchMode):
    """Notes memory that is allocated, and lets nothing else happen: it would not be noted down."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.storages.add(_storage(result))
        elif not func.is_view:
            raise RefusedError(f"{func} is neither a launch nor a product")
        return result


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Walk(NamedTuple):
    """Both passes: what they were given and gave, and their steps."""

    inputs: Inputs
    out: Tensor
    grad: Tensor | None
    gradients: Sequence[Tensor | None]
    forward: list[Noted]
    backward: list[Noted]

    @property
    def given(self) -> list[tuple[int, Tensor | None]]:
        """To the backward pass, with the numbers of their buffers."""
        return [*enumerate(self.inputs), (OUT, self.out), (GRAD, self.grad)]


def _walk(passes: Passes, inputs: Inputs, wanted: Sequence[bool]) -> _Walk:
    given = tuple(None if x is None else _like(x) for x in inputs)
    back = any(wanted)
    with noted() as steps:
        out, state = passes.forward(given, back)
        many = len(steps)
        grad = torch.empty_like(out) if back else None
        found = passes.backward(grad, given, wanted, *state) if back else (None,) * 5
    gradients = [x if want else None for x, want in zip(found, wanted, strict=True)]
    return _Walk(given, out, grad, gradients, steps[:many], steps[many:])


def _like(x: Tensor) -> Tensor:
    """A tensor in memory of its own that lies like another, at a multiple of 16 bytes or not."""
    offset = int(x.data_ptr() % 16 != 0)
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return torch.empty(size + offset, dtype=x.dtype, device=x.device).as_strided(x.shape, x.stride(), offset)


class _Lifetime(NamedTuple):
    """The first and the last step of a pass that need some memory, its bytes, and the type of its first tensor."""

    first: int
    last: int
    size: int
    dtype: torch.dtype


def _lifetimes(steps: Sequence[Noted]) -> dict[int, _Lifetime]:
    found: dict[int, _Lifetime] = {}
    for at, step in enumerate(steps):
        for x in step.tensors if isinstance(step, Launch) else step:
            if x is not None:
                new = _Lifetime(at, at, x.untyped_storage().nbytes(), x.dtype)
                found[_storage(x)] = found.get(_storage(x), new)._replace(last=at)
    return found


class _Places:
    """Where the tensors of a walk are: a buffer, and bytes from its beginning."""

    def __init__(self, walk: _Walk, made: set[int]) -> None:
        self.at: dict[int, tuple[int, int]] = {}  # of a storage: buffer, and bytes from there to the storage
        self.dtype = walk.out.dtype
        self.buffers = FIRST
        for buffer, x in walk.given:
            if x is not None:
                self.at[_storage(x)] = buffer, -int(x.storage_offset()) * x.itemsize
        for number, x in enumerate(walk.gradients):
            if x is not None:
                self.at.setdefault(_storage(x), (RESULTS + number, 0))
        self.by_torch: set[int] = set()  # buffers that torch fills
        for step in (*walk.forward, *walk.backward):
            for x in step.given if isinstance(step, Fused | FusedBack) else ():
                if _storage(x) not in self.at:
                    self.at[_storage(x)] = self.buffers, 0
                    self.buffers += 1
                self.by_torch.add(self.at[_storage(x)][0])
        forward, backward = _lifetimes(walk.forward), _lifetimes(walk.backward)
        self.saved = sorted({self.at[x][0] for x in forward.keys() & backward.keys() if x in self.at} & self.by_torch)
        free = made - self.at.keys()
        self.kept = self._divide(KEPT, {x: span for x, span in forward.items() if x in free and x in backward})
        self.scratch = [
            self._divide(SCRATCH, {x: span for x, span in mine.items() if x in free and x not in other})
            for mine, other in ((forward, backward), (backward, forward))
        ]

    def _divide(self, buffer: int, spans: dict[int, _Lifetime]) -> int:
        """Give small memory a place in a buffer, and large one that is not kept a buffer of its own; the size."""
        size = 0
        for storage, span in spans.items():
            if buffer == SCRATCH and span.size >= LARGE:
                self.at[storage] = self.buffers, 0
                self.buffers += 1
            else:
                self.at[storage] = buffer, size
                size += -(-span.size // 256) * 256
        return size // self.dtype.itemsize

    def of(self, x: Tensor) -> tuple[int, int] | None:
        """Buffer and bytes; none of a table, which stays where it is."""
        if (found := self.at.get(_storage(x))) is None:
            return None
        return found[0], found[1] + int(x.storage_offset()) * x.itemsize

    def view(self, x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
        """Buffer, sizes, strides and offset in elements."""
        found = self.of(x)
        if found is None or (found[0] in (KEPT, SCRATCH) and x.dtype != self.dtype):
            raise RefusedError("a product of something else")
        return found[0], tuple(x.shape), x.stride(), found[1] // x.itemsize

    def steps(self, steps: Sequence[Noted], made: Container[int]) -> list[tuple[Any, ...]]:
        """With memory, where buffers are `made` here, from the first step that needs it to the last."""
        spans = {self.at[x][0]: span for x, span in _lifetimes(steps).items() if x in self.at and self.at[x][0] in made}
        found: list[tuple[Any, ...]] = []
        for at, step in enumerate(steps):
            for buffer, span in spans.items():
                if span.first == at and buffer not in self.by_torch:
                    found.append((buffer, span.size // span.dtype.itemsize, span.dtype))
            found.append(self._step(step))
            done = [buffer for buffer, span in spans.items() if span.last == at and buffer >= FIRST]
            found += [(buffer,) for buffer in done if buffer not in self.saved]
        return found

    def _step(self, step: Noted) -> tuple[Any, ...]:
        if isinstance(step, Launch):
            return pack(step.ready, step.tensors, self.of)
        if isinstance(step, Product):
            return *(self.view(x) for x in step[:3]), None if step.add is None else self.view(step.add)
        if isinstance(step, Gather):
            return self.view(step.out), self.view(step.x), step.order
        given = [(self.at[_storage(x)][0], _in_memory(x)) for x in step.given]
        return tuple(self.view(x) for x in step[: -len(given)]), given


def _parts(walk: _Walk, made: set[int], held: list[object]) -> tuple[Any, ...]:
    """The steps of both passes; how what the second reads must lie, the output, sizes of buffers, and gradients.

    What the steps point to, and does not lie in a buffer, goes to `held`.
    """
    places = _Places(walk, made)
    own = range(FIRST, places.buffers)
    forward = places.steps(walk.forward, {OUT, *own})
    backward = places.steps(walk.backward, {*range(RESULTS, FIRST), *own})
    read = _lifetimes(walk.backward)
    of_torch = {places.at[_storage(x)][0]: x for step in walk.forward if isinstance(step, Fused) for x in step.given}
    given = dict(walk.given) | {buffer: x for buffer, x in of_torch.items() if buffer in places.saved}
    read_as = {buffer: _in_memory(x) for buffer, x in given.items() if x is not None and _storage(x) in read}
    gradients = [None if x is None else places.view(x) for x in walk.gradients]
    for step in (*walk.forward, *walk.backward):
        if isinstance(step, Launch):
            held.append((step.ready, [x for x in step.tensors if x is not None and places.of(x) is None]))
        elif isinstance(step, Gather):
            held.append(step.order)
    sizes = places.buffers, places.kept, *places.scratch
    apart = [buffer for buffer in places.saved if buffer >= FIRST]
    return forward, backward, read_as, _in_memory(walk.out), sizes, apart, gradients


def _in_memory(x: Tensor) -> tuple[Any, ...]:
    """Sizes, strides, type, and whether it begins at a multiple of 16 bytes."""
    return tuple(x.shape), x.stride(), x.dtype, x.data_ptr() % 16 == 0
