"""Queries and keys come out of the projection turned by the angles of their places.

    [q; k; v] = W x + b,   q_i ← R_i q_i,   k_j ← R_j k_j,   and g = A x + a, where outputs are gated

One product, and one launch that turns two thirds of its output where they are. On the way back the gradients of q, k
and v are thirds of one buffer; those of q and k are turned the other way in it, and two products give everything; with
g two more, which add to what is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivatives import differentiated_once
from ..native.notes import product
from ..rotary.turning import turn
from .launching import forked
from .recentred import affine, column_sums, total
from .unpooled import together


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: tuple[Tensor, Tensor | None] | None, q_table: Tensor,
    k_table: Tensor, heads: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Turned queries and keys, and values, [B, H, N, D]: thirds of one buffer. Tables are those of `rotary`.

    With weight and bias of a gate, [H or H·D, E], also g [B, H, N, 1 or D].
    """
    of_gate = (None, None) if gate is None else gate
    found: tuple[Tensor, ...] = _Projected.apply(x, weight, bias, *of_gate, q_table, k_table, heads)
    return found


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, gate_bias: Tensor | None,
        q_table: Tensor, k_table: Tensor, heads: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x = x.contiguous()
        B, N, E = x.shape
        packed = x.new_empty(B, N, 3, heads, weight.shape[0] // (3 * heads))
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        affine(x.view(-1, E), weight, bias, packed.view(B * N, -1))
        turn(q, k, q, k, q_table, k_table, False)
        ctx.save_for_backward(x, weight, gate, q_table, k_table)
        ctx.dtypes = [None if b is None else b.dtype for b in (bias, gate_bias)]
        if gate is None:
            return q, k, v
        g = x.new_empty(B, N, heads, gate.shape[0] // heads)
        affine(x.view(-1, E), gate, gate_bias, g.view(B * N, -1))
        return q, k, v, g.transpose(1, 2)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate, q_table, k_table = ctx.saved_tensors
        want_x, want_weight, want_bias, want_gate, want_gate_bias = ctx.needs_input_grad[:5]
        found = together(gradients[:3])
        dq, dk = found.permute(2, 0, 3, 1, 4)[:2].unbind(0)
        turn(dq, dk, dq, dk, q_table, k_table, True)
        tokens = x.view(-1, x.shape[-1])
        parts = [(found.flatten(2), weight, want_weight, want_bias)]
        if gate is not None:
            parts += [(gradients[3].transpose(1, 2).flatten(2), gate, want_gate, want_gate_bias)]
        dx = torch.empty_like(x) if want_x else None
        dweights = [torch.empty_like(w) if wanted else None for _, w, wanted, _ in parts]
        dbiases = [
            torch.empty(w.shape[0], dtype=dtype, device=x.device) if wanted else None
            for (_, w, _, wanted), dtype in zip(parts, ctx.dtypes, strict=False)
        ]
        fork = forked(x, 3)
        with fork.part(0):
            for place, (rows, w, _, _) in enumerate(parts):
                if dx is not None:
                    to = dx.view_as(tokens)
                    product(rows.flatten(0, 1), w, to, to if place else None)
        with fork.part(1):
            for (rows, *_), dbias in zip(parts, dbiases, strict=True):
                if dbias is not None:
                    total(column_sums(rows), dbias)
        for (rows, *_), dweight in zip(parts, dweights, strict=True):
            if dweight is not None:
                product(rows.flatten(0, 1).T, tokens, dweight)
        fork.join()
        of_gate = (None, None) if gate is None else (dweights[1], dbiases[1])
        return dx, dweights[0], dbiases[0], *of_gate, None, None, None
