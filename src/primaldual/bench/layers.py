"""`primaldual.MultiheadAttention` against the same layer with softmax attention: projections included, no weights.

Where the case has rotary positions the rival is a layer as people write it in torch (`rotary`).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import MultiheadAttention
from ..ops.layer import ROUTES
from .case import Case
from .rotary import RotarySoftmax, compiled
from .timing import Contestant, Step
from .workload import BACK_ENDS, Workload, check_dense, forced, input_sets, size_of


def workload(case: Case, device: torch.device) -> Workload:
    """Ours; the softmax layer as it is and on every fused back end; and the one that holds its weights in memory."""
    made: dict[str, Any] = {"device": device, "dtype": case.torch_dtype}
    shape = (case.batch, case.length, case.heads * case.head_dim)
    if case.impl == "reference":
        check_dense(case, device)

    def draw() -> tuple[Tensor, Tensor]:
        return torch.randn(shape, **made).requires_grad_(case.trains), torch.randn(shape, **made)

    first = draw()
    held = size_of(*first) if case.trains else size_of(first[0])
    count, in_cache = input_sets(held, device)
    sets = [first, *(draw() for _ in range(count - 1))]

    def layer(of: Case, impl: str) -> MultiheadAttention:
        width = of.heads * of.head_dim
        one = MultiheadAttention(
            width, of.heads, of.dropout, batch_first=True, mechanism=of.primal, impl=impl, **made
        )  # fmt: skip
        return one.train(case.trains)

    def contestant(name: str, one: nn.Module, context: Any = nullcontext) -> Contestant:
        run = _train if case.trains else _infer
        steps: list[Step] = [partial(run, one, x, up, case.causal) for x, up in sets]
        return Contestant(name, steps, held + size_of(*one.parameters(), *one.buffers()), context)

    contexts = {"default": nullcontext} | (forced(device) if device.type == "cuda" else {})
    rivals = []
    if case.rotary:
        people = RotarySoftmax(case.heads, case.head_dim, case.length, **made)
        rivals = [contestant(name, people, context) for name, context in contexts.items()]
        if device.type == "cuda":
            torch.compiler.reset()  # what is compiled for so many shapes is not compiled again
            rivals += [contestant(f"compiled {name}", compiled(people, BACK_ENDS[name])) for name in COMPILED]
    else:
        softmax = layer(case.softmax, "auto")
        rivals = [contestant(name, softmax, context) for name, context in contexts.items()]
    ours = layer(case, case.impl)
    with torch.cuda.stream(torch.cuda.Stream()) if case.mode == "captured" else nullcontext():  # as it is captured
        executor = _executor(ours, first[0], case.causal)
    return Workload(
        contestant(case.mechanism, ours), tuple(rivals), executor, count, in_cache,
        contestant("materialised", layer(case.softmax, "reference")),
    )  # fmt: skip


COMPILED = ("cudnn", "flash")
"""Back ends that a compiled rival is measured with."""


def _executor(one: MultiheadAttention, x: Tensor, causal: bool) -> str:
    """The route, and the executors of the attentions in it."""
    state = one.state(x, x, x, need_weights=False, is_causal=causal)
    route = one.plan(x, is_causal=causal).route
    inner = [chosen.impl for chosen in ROUTES[route].inner(state)]
    return ", ".join([route, *dict.fromkeys(inner)])


def _infer(layer: nn.Module, x: Tensor, up: Tensor, causal: bool) -> Tensor:
    with torch.no_grad():
        output: Tensor = layer(x, x, x, need_weights=False, is_causal=causal)[0]
    return output


def _train(layer: nn.Module, x: Tensor, up: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Forward and backward: the gradients of the input and of every parameter."""
    output, _ = layer(x, x, x, need_weights=False, is_causal=causal)
    return torch.autograd.grad(output, (x, *layer.parameters()), up)
