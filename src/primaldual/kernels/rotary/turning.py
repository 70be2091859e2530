"""Queries and keys turned by tables of cosines and sines: an autograd function, and in place."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..launching import empty_like_heads, in_rows, launch_kernel, power_of_2, strides_of

ROWS = 64
"""Rows of a program, of a token's heads after one another."""


def turned(q: Tensor, k: Tensor, q_table: Tensor, k_table: Tensor) -> tuple[Tensor, Tensor]:
    """R_i q_i and R_j k_j for queries [B, H, L, D] and keys [B, kv_heads, S, D].

    A table [1 or B, length, r] has the cosines of the r/2 angles of each place, then their sines, in float32.
    """
    found: tuple[Tensor, Tensor] = _Turned.apply(q, k, q_table, k_table, False)
    return found


class _Turned(torch.autograd.Function):
    """R is orthogonal: what comes back is turned the other way, by the same kernel, as often as one likes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, q_table: Tensor, k_table: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_table, k_table)
        ctx.back = back
        q, k = in_rows(q), in_rows(k)
        to_q, to_k = empty_like_heads(q, q.shape[-1]), empty_like_heads(k, k.shape[-1])
        turn(q, k, to_q, to_k, q_table, k_table, back)
        return to_q, to_k

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *_Turned.apply(dq, dk, *ctx.saved_tensors, not ctx.back), None, None, None


def turn(q: Tensor, k: Tensor, to_q: Tensor, to_k: Tensor, q_table: Tensor, k_table: Tensor, back: bool) -> None:
    """The same into tensors that are there, which may be q and k themselves; `back`: by the opposite angles."""
    (batch, q_heads, queries, dim), (_, k_heads, keys, _) = q.shape, k.shape
    half = q_table.shape[-1] // 2
    in_place = to_q.data_ptr() == q.data_ptr() and to_k.data_ptr() == k.data_ptr()
    rest = 0 if in_place else dim - 2 * half
    programs = -(-max(queries * q_heads, keys * k_heads) // ROWS)
    launch_kernel(
        _kernels().turn, (programs, 2, batch), (q, k, to_q, to_k, q_table, k_table),
        (*strides_of(q, k, to_q, to_k), *(0 if x.shape[0] == 1 else x.stride(0) for x in (q_table, k_table)), queries,
         keys, q_heads, k_heads, half, power_of_2(half), rest, power_of_2(rest), ROWS, back),
    )  # fmt: skip


@functools.cache
def _kernels() -> ModuleType:
    """Imported where they are launched: not everybody has Triton."""
    from . import kernels

    return kernels
