"""`primaldual.attention` against torch's fused softmax attention, on the same random tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..ops import attention, plan
from .case import Case
from .timing import Contestant, Step
from .workload import Workload, check_dense, forced, input_sets, size_of

Inputs = tuple[Tensor, Tensor, Tensor]


def workload(case: Case, device: torch.device) -> Workload:
    """Ours and every fused back end. What the mechanism learns gets its gradient too."""
    primal, heads = case.primal, case.heads
    made: dict[str, Any] = {"device": device, "dtype": case.torch_dtype}
    shape = (case.batch, heads, case.length, case.head_dim)
    learned = {n: p.to(**made).requires_grad_(case.trains) for n, p in primal.learned(heads, case.head_dim).items()}
    fixed = {n: p.to(**made) for n, p in primal.features.state(case.head_dim).items()}
    options: dict[str, Any] = {"is_causal": case.causal, "dropout_p": case.dropout}
    ours_options = options | {"parameters": learned | fixed, "impl": case.impl}

    def draw() -> tuple[Inputs, Tensor]:
        q, k, v = (torch.randn(shape, **made).requires_grad_(case.trains) for _ in range(3))
        return (q, k, v), torch.randn(shape, **made)

    first = draw()
    held = size_of(*first[0]) + (size_of(first[1]) if case.trains else 0)
    with torch.cuda.stream(torch.cuda.Stream()) if case.mode == "captured" else nullcontext():  # as it is captured
        executor = plan(*first[0], primal, **ours_options).impl
    if executor == "reference":
        check_dense(case, device)
    count, in_cache = input_sets(held, device)
    sets = [first, *(draw() for _ in range(count - 1))]

    def ours(qkv: Inputs) -> Tensor:
        out = attention(*qkv, primal, **ours_options)
        assert isinstance(out, Tensor)
        return out

    def rival(qkv: Inputs) -> Tensor:
        return scaled_dot_product_attention(*qkv, **options)

    def steps(run: Callable[[Inputs], Tensor], parameters: tuple[Tensor, ...] = ()) -> list[Step]:
        if case.trains:
            return [partial(_train, run, qkv, up, parameters) for qkv, up in sets]
        return [partial(run, qkv) for qkv, _ in sets]

    rivals = tuple(Contestant(name, steps(rival), held, context) for name, context in forced(device).items())
    return Workload(
        Contestant(case.mechanism, steps(ours, tuple(learned.values())), held + size_of(*learned.values())),
        rivals, executor, count, in_cache,
    )  # fmt: skip


def _train(
    run: Callable[[Inputs], Tensor], qkv: Inputs, up: Tensor, parameters: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Forward and backward: the gradients."""
    return torch.autograd.grad(run(qkv), (*qkv, *parameters), up)
