"""`primaldual.MultiheadAttention` against the same layer with softmax attention: projections included, no weights."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..nn import MultiheadAttention
from .case import Case
from .timing import Contestant, Step
from .workload import Workload, check_dense, forced, input_sets, size_of


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

    def contestant(name: str, one: MultiheadAttention, context: Any = nullcontext) -> Contestant:
        run = _train if case.trains else _infer
        steps: list[Step] = [partial(run, one, x, up, case.causal) for x, up in sets]
        return Contestant(name, steps, held + size_of(*one.parameters(), *one.buffers()), context)

    softmax = layer(case.softmax, "auto")
    contexts = {"default": nullcontext} | (forced(device) if device.type == "cuda" else {})
    return Workload(
        contestant(case.mechanism, layer(case, case.impl)),
        tuple(contestant(name, softmax, context) for name, context in contexts.items()),
        None, count, in_cache,
        contestant("materialised", layer(case.softmax, "reference")),
    )  # fmt: skip


def _infer(layer: MultiheadAttention, x: Tensor, up: Tensor, causal: bool) -> Tensor:
    with torch.no_grad():
        output: Tensor = layer(x, x, x, need_weights=False, is_causal=causal)[0]
    return output


def _train(layer: MultiheadAttention, x: Tensor, up: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Forward and backward: the gradients of the input and of every parameter."""
    output, _ = layer(x, x, x, need_weights=False, is_causal=causal)
    return torch.autograd.grad(output, (x, *layer.parameters()), up)
