"""What a step must do at least: floating-point operations, and bytes through memory.

FLOPs (a multiply-add is two) are those of the expansion after its exact rewrites. The backward pass of an attention
that scores pairs takes 2.5 times its forward pass (the scores are computed again), that of a projection or of a
re-associated sum twice. A causal mask leaves half of the pairs.

Bytes: every input read once, every output written once; backward reads inputs, outputs and the outputs' gradients
and writes the inputs' gradients. What a kernel moves beyond that shows as a lower share.
"""

from __future__ import annotations

from ..dual import derive
from ..primal import Sparse
from .case import Case

MOST_COUNTED = 16384
"""Patterns are counted pair by pair: beyond this length that takes gigabytes."""


def flops(case: Case) -> int | None:
    """FLOPs of one step; None where nothing counts them."""
    primal, N = case.primal, case.length
    if isinstance(primal.training_set, Sparse) and MOST_COUNTED < N:
        return None
    expansion = derive(primal)
    cost = expansion.cost(queries=N, keys=N, heads=case.heads, head_dim=case.head_dim)
    linear = expansion.associated
    attention = cost.attention * (3.0 if linear else 3.5) if case.trains else float(cost.attention)
    if case.causal and not linear:
        attention *= (N + 1) / (2 * N)
    if case.subject == "kernels":
        return round(case.batch * attention)
    channels = case.heads * case.head_dim
    rest = cost.projection + cost.maps + 4 * N * channels**2  # queries and outputs are projected too
    return round(case.batch * (attention + rest * (3 if case.trains else 1)))


def bytes_moved(case: Case) -> int:
    """The fewest bytes of one step."""
    size, channels = case.torch_dtype.itemsize, case.heads * case.head_dim
    tensor = case.batch * case.length * channels * size
    if case.subject == "kernels":  # q k v, out; q k v out dout, dq dk dv
        return tensor * (12 if case.trains else 4)
    made = sum(part.start.numel() for part in case.primal.made(case.heads, case.head_dim).values())
    parameters = (4 * channels + made) * (channels + 1) * size
    return (5 * tensor + 3 * parameters) if case.trains else (2 * tensor + parameters)  # x, out; x dout, dx
