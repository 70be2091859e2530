"""Scaled softmax heads on cuDNN's kernels, one stream per scale.

For long sequences the library's kernels cannot be beaten; what can be saved is everything around them. The longest
heads start at once. Every other scale pools, attends and writes its share of the result on a stream of its own, in the
shadow of the longest, and so does its way back: no concatenation, no zero-filled gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..dual import GroupHeadsByScale
from ..dual.rewrites import pooling_of
from ..primal import Recenter
from .problem import Problem
from .ragged_launch import place, pool_heads, without_triton


def applies(p: Problem) -> bool:
    """Mean pooling of all tokens at two or more scales, at most a re-centring, and shapes that cuDNN takes."""
    if p.is_causal or p.key_hidden is not None or p.attn_hidden is not None:
        return False
    pooled = pooling_of(p.primal.training_set)
    groups = GroupHeadsByScale.groups(p.scales)
    if len(groups) < 2 or pooled is None or pooled.how != "mean" or pooled.grid is not None or pooled.prefix:
        return False
    if any(p.k.shape[2] % scale for scale, _ in groups):
        return False
    if [h for _, heads in groups for h in heads] != list(range(p.q.shape[1])):
        return False
    maps = p.primal.point_maps
    if len(maps) > 1 or (maps and not isinstance(maps[0], Recenter)):
        return False
    return usable(p.q, p.k, p.v)


def usable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN's attention takes these tensors, called outside a compiler."""
    if not q.is_cuda or torch.compiler.is_compiling() or without_triton():
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.numel() or not k.numel():
        return False
    if max(q.shape[-1], v.shape[-1]) > 128 or q.shape[-1] % 8 or v.shape[-1] % 8:
        return False
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def run(p: Problem) -> Tensor:
    """Outputs [B, H, L, Dv]."""
    groups = tuple((scale, len(heads)) for scale, heads in GroupHeadsByScale.groups(p.scales))
    beta = None
    if p.primal.point_maps:
        map_ = p.primal.point_maps[0]
        assert isinstance(map_, Recenter)
        beta = p.parameters.get("beta") if map_.learnable else None
        beta = p.q.new_full((p.q.shape[1],), map_.beta, dtype=torch.float32) if beta is None else beta.float()
    return _Tokens.apply(p.q, p.k, p.v, beta, groups, p.dropout_p)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], shift: Tensor | None, dropout_p: float) -> Tensor:
    """Heads whose points are given, group by group: q [B, H, L, D], keys[g] [B, heads of g, points of g, D].

    shift [B, H, D] is taken off the queries.
    """
    points = [x for pair in zip(keys, values, strict=True) for x in pair]
    return _Points.apply(q, shift, dropout_p, *points)


@functools.cache
def _streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """They go before the longest heads, which then cover up what the short ones still have to copy."""
    return tuple(torch.cuda.Stream(device, priority=-1) for _ in range(count))


class _Fork:
    """One stream per part; the first part stays on the current one.

    Every stream starts after the current one, and the current one waits for all at the end: so memory that goes back
    to the pool of any of them is free by the time it is used again.
    """

    def __init__(self, parts: int) -> None:
        self.current = torch.cuda.current_stream()
        self.others = _streams(self.current.device, parts - 1)
        for stream in self.others:
            stream.wait_stream(self.current)

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        if number == 0:
            yield
            return
        with torch.cuda.stream(self.others[number - 1]):
            yield

    def join(self) -> None:
        for stream in self.others:
            self.current.wait_stream(stream)


def _forward(q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None, out: Tensor, p: float) -> tuple[list[Tensor], Any]:
    """One group of heads, into its share of `out`; and what its way back needs."""
    if shift is not None:
        moved = torch.empty_like(q)
        place(q, moved, add=-shift)
        q = moved
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p, False, False)
    place(found[0], out)
    return [q, k, v, found[1], found[6], found[7]], found[2:6]


def _backward(grad: Tensor, out: Tensor, kept: list[Tensor], plain: Any, p: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, lse, seed, offset = kept
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, None, *plain, p, False
    )


def _output(q: Tensor, value_dim: int) -> Tensor:
    return torch.empty_like(q) if q.shape[-1] == value_dim else q.new_empty(*q.shape[:3], value_dim)


class _Tokens(torch.autograd.Function):
    """Keys and values are given token by token, and pooled here."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, groups: tuple[tuple[int, int], ...], p: float
    ) -> Tensor:
        out = _output(q, v.shape[-1])
        kept, plain = [], []
        fork = _Fork(len(groups))
        for number, (part, scale) in enumerate(_parts(groups)):
            with fork.part(number):
                keys, values = pool_heads(k[:, part], v[:, part], scale)
                mean = None if beta is None else keys.mean(2, dtype=torch.float32)
                shift = None if mean is None or beta is None else mean * beta[part, None]
                needed, rest = _forward(q[:, part], keys, values, shift, out[:, part], p)
                kept += [*needed, mean]
                plain.append(rest)
        fork.join()
        ctx.save_for_backward(out, beta, *kept)
        ctx.settings = (groups, p, plain, k.shape)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, beta, *kept = ctx.saved_tensors
        groups, p, plain, shape = ctx.settings
        dq = _output(out, shape[-1])
        dk, dv = (torch.empty(*shape[:3], n, dtype=out.dtype, device=out.device) for n in (shape[-1], out.shape[-1]))
        dbeta = None if beta is None else torch.zeros_like(beta)
        fork = _Fork(len(groups))
        for number, (part, scale) in enumerate(_parts(groups)):
            *needed, mean = kept[7 * number : 7 * number + 7]
            with fork.part(number):
                dqueries, dkeys, dvalues = _backward(grad[:, part], out[:, part], needed, plain[number], p)
                place(dqueries, dq[:, part])
                dmean = None
                if beta is not None and dbeta is not None:
                    dshift = -dqueries.sum(2, dtype=torch.float32)
                    dmean = dshift * (beta[part, None] / dkeys.shape[2])
                    dbeta[part] = (dshift * mean).sum((0, 2))
                place(dkeys, dk[:, part], add=dmean, window=scale)
                place(dvalues, dv[:, part], window=scale)
        fork.join()
        return dq, dk, dv, dbeta, None, None


class _Points(torch.autograd.Function):
    """Keys and values of every group are given as they are."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, shift: Tensor | None, p: float, *points: Tensor) -> Tensor:
        out = _output(q, points[1].shape[-1])
        kept, plain, parts = [], [], _slices(points[::2])
        fork = _Fork(len(parts))
        for number, part in enumerate(parts):
            keys, values = points[2 * number], points[2 * number + 1]
            with fork.part(number):
                of_part = None if shift is None else shift[:, part].contiguous()
                needed, rest = _forward(q[:, part], keys, values, of_part, out[:, part], p)
                kept += needed
                plain.append(rest)
        fork.join()
        ctx.save_for_backward(out, *kept)
        ctx.settings = (parts, p, plain, shift is not None)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, *kept = ctx.saved_tensors
        parts, p, plain, shifted = ctx.settings
        dq = _output(out, kept[0].shape[-1])
        shares, gradients = [], []
        fork = _Fork(len(parts))
        for number, part in enumerate(parts):
            with fork.part(number):
                needed = kept[6 * number : 6 * number + 6]
                dqueries, dkeys, dvalues = _backward(grad[:, part], out[:, part], needed, plain[number], p)
                place(dqueries, dq[:, part])
                gradients += [dkeys, dvalues]
                if shifted:
                    shares.append(-dqueries.sum(2, dtype=torch.float32))
        fork.join()
        return dq, torch.cat(shares, 1) if shifted else None, None, *gradients


def _slices(keys: tuple[Tensor, ...]) -> list[slice]:
    parts, start = [], 0
    for x in keys:
        parts.append(slice(start, start + x.shape[1]))
        start += x.shape[1]
    return parts


def _parts(groups: tuple[tuple[int, int], ...]) -> list[tuple[slice, int]]:
    """(heads, scale) of each group; they stand side by side, longest first."""
    parts, start = [], 0
    for scale, heads in groups:
        parts.append((slice(start, start + heads), scale))
        start += heads
    return parts
