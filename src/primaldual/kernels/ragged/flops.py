"""What the operators of `points` and `tokens` count as in torch.utils.flop_counter.

A query and a point cost q·k and p·v forward; backward q·k again, grad·v, and the sums into dq, dk and dv. That is what
must be computed: blocks that a kernel computes twice count once, causal heads as if they saw every point, and pooling
not at all (it has no products). `dual.count` and torch's formulas for its own attention do the same.
"""

from __future__ import annotations

from typing import Any

from .layout import of_integers


def _forward(pairs: int, dim: int, value_dim: int) -> int:
    return 2 * pairs * (dim + value_dim)


def _backward(pairs: int, dim: int, value_dim: int) -> int:
    return 2 * pairs * (3 * dim + 2 * value_dim)


def _of_scales(q: Any, k: Any, scales: Any) -> int:
    """Pairs of queries and windows, in shapes [B, H, length, D]."""
    return int(q[0] * q[2] * sum(-(-k[2] // scale) for scale in scales))


def _of_layout(q: Any, layout: Any, own_k: Any) -> int:
    """Pairs of queries and points; and a query's own point, where heads have them."""
    heads = of_integers(layout)
    own = 0 if own_k is None else sum(head.window > 1 for head in heads)
    return int(q[0] * q[2] * (sum(head.points for head in heads) + own))


def tokens(q: Any, k: Any, v: Any, beta: Any, scales: Any, *_: Any, **__: Any) -> int:
    return _forward(_of_scales(q, k, scales), q[3], v[3])


def tokens_backward(
    grad: Any, q: Any, k: Any, v: Any, beta: Any, out: Any, lse: Any, keys: Any, values: Any, scales: Any,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    return _backward(_of_scales(q, k, scales), q[3], v[3])


def points(
    q: Any, keys: Any, values: Any, layout: Any, value_dim: Any, shift: Any, bias: Any, own_k: Any, *_: Any, **__: Any
) -> int:
    return _forward(_of_layout(q, layout, own_k), q[3], value_dim)


def points_backward(
    grad: Any, q: Any, keys: Any, values: Any, out: Any, lse: Any, layout: Any, shift: Any, bias: Any, own_k: Any,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    return _backward(_of_layout(q, layout, own_k), q[3], out[3])
