"""Scaled softmax heads on cuDNN's kernels, one stream per scale.

For long sequences the library's kernels cannot be beaten; what can be saved is everything around them. The longest
heads go first. Every other scale pools, attends and writes its share of the result on a stream of its own, in the
shadow of the longest, and so does its way back: no concatenation, no zero-filled gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
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
    if any(p.k.shape[2] % scale or half_empty(p.k.shape[2] // scale) for scale, _ in groups):
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


def half_empty(keys: int) -> bool:
    """Whether cuDNN gives NaN for the gradients of queries whose scores are all below −88.

    It takes 128 keys at a time, and hides what is beyond the last one unless this many are exactly half a block: there
    the weights of keys that do not exist, e^(0 − lse), overflow.
    """
    return keys % 128 == 64


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


def attend(q: Tensor, parts: Sequence[Tensor], shift: Tensor | None, dropout_p: float) -> Tensor:
    """Heads whose points are given: q [B, H, L, D], and for each group its keys and values side by side.

    parts[g] [B · points, 2 · heads of g · D]. shift [B, H, D] is taken off the queries; its gradient, −Σ_i dq_i, is
    left to whoever made it.
    """
    return _Points.apply(q, shift, dropout_p, *parts)


@functools.cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The first goes before the others: they fill what the longest work leaves."""
    return torch.cuda.Stream(device, priority=min(number - 3, 0))


class Fork:
    """Parts of a work, each on a stream of its own; the last one, and all where there is one, on the current stream.

    Every stream starts after the current one, and the current one waits for all at the end: so memory that goes back
    to the pool of any of them is free by the time it is used again.
    """

    def __init__(self, parts: int) -> None:
        self.others: list[torch.cuda.Stream] = []
        if parts > 1:
            self.current = torch.cuda.current_stream()
            self.others = [_stream(self.current.device, number) for number in range(parts - 1)]
        for stream in self.others:
            stream.wait_stream(self.current)

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        if number >= len(self.others):
            yield
            return
        with torch.cuda.stream(self.others[number]):
            yield

    def wait(self, number: int) -> None:
        """Go on, on the current stream, only after this part."""
        if number < len(self.others):
            self.current.wait_stream(self.others[number])

    def join(self) -> None:
        for number in range(len(self.others)):
            self.wait(number)


def _forward(q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None, out: Tensor, p: float) -> tuple[list[Tensor], Any]:
    """One group of heads, into its share of `out`; and what its way back needs."""
    own = _own(q, k, out)
    place(q, own, add=None if shift is None else -shift)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(own, k, v, None, True, p, False, False)
    place(found[0], out)
    return [own, k, v, found[1], found[6], found[7]], found[2:6]


def _own(q: Tensor, k: Tensor, out: Tensor) -> Tensor:
    """Room for queries, with strides that no other call has.

    torch keeps cuDNN's plan of a backward pass by the strides of q, k and v, although the plan holds those of the
    output and of its gradient too. Here these are a share of a wider tensor, and a call that differs in them alone
    would be run by the wrong plan: so rows get some room at the end, as much as tells `out` from the others.
    """
    B, H, L, D = q.shape
    seen = _layouts.setdefault((q.shape, k.shape), [])
    if out.stride() not in seen:
        seen.append(out.stride())
    room = 16 * (1 + seen.index(out.stride()))
    return q.new_empty(B, L, H * D + room)[..., : H * D].unflatten(2, (H, D)).transpose(1, 2)


_layouts: dict[tuple[torch.Size, torch.Size], list[tuple[int, ...]]] = {}
"""The strides of outputs that went with queries and keys of these shapes."""


def _backward(grad: Tensor, out: Tensor, kept: list[Tensor], plain: Any, p: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, lse, seed, offset = kept
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, None, *plain, p, False
    )


def like_output(grad: Tensor, out: Tensor) -> Tensor:
    """The gradient with the strides of the output: see `_own`."""
    return grad if grad.stride() == out.stride() else torch.empty_like(out).copy_(grad)


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
        fork = Fork(len(groups))
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
        grad = like_output(grad, out)
        dq = _output(out, shape[-1])
        dk, dv = (torch.empty(*shape[:3], n, dtype=out.dtype, device=out.device) for n in (shape[-1], out.shape[-1]))
        dbeta = None if beta is None else torch.zeros_like(beta)
        fork = Fork(len(groups))
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
    def forward(ctx: Any, q: Tensor, shift: Tensor | None, p: float, *parts: Tensor) -> Tensor:
        out = _output(q, q.shape[-1])
        kept, plain, start = [], [], 0
        fork = Fork(len(parts))
        for number, points in enumerate(parts):
            keys, values = _apart(points, q)
            part = slice(start, start + keys.shape[1])
            with fork.part(number):
                needed, rest = _forward(
                    q[:, part], keys, values, None if shift is None else shift[:, part], out[:, part], p
                )
                kept += [needed[0], *needed[3:]]
                plain.append((part, rest))
            start = part.stop
        fork.join()
        ctx.save_for_backward(out, *parts, *kept)
        ctx.settings = p, plain
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, *kept = ctx.saved_tensors
        p, plain = ctx.settings
        grad, dq = like_output(grad, out), torch.empty_like(out)
        gradients = []
        fork = Fork(len(plain))
        for number, (part, rest) in enumerate(plain):
            at = len(plain) + 4 * number
            with fork.part(number):
                needed = [kept[at], *_apart(kept[number], out), *kept[at + 1 : at + 4]]
                found = _backward(grad[:, part], out[:, part], needed, rest, p)
                gradients.append(torch.empty_like(kept[number]))
                for x, to in zip(found, (dq[:, part], *_apart(gradients[number], out)), strict=True):
                    place(x, to)
            del found, x  # before the next one needs room
        fork.join()
        return dq, None, None, *gradients


def _apart(points: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """Keys and values [B, heads, points, D] of a group, views of where they lie side by side."""
    B, D = like.shape[0], like.shape[-1]
    return points.view(B, points.shape[0] // B, 2, -1, D).permute(2, 0, 3, 1, 4).unbind(0)


def _parts(groups: tuple[tuple[int, int], ...]) -> list[tuple[slice, int]]:
    """(heads, scale) of each group; they stand side by side, longest first."""
    parts, start = [], 0
    for scale, heads in groups:
        parts.append((slice(start, start + heads), scale))
        start += heads
    return parts
