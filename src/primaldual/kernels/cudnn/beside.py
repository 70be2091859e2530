"""Scaled softmax heads over long sequences: our kernel forward, and on the way back cuDNN's beside ours.

Forward one launch pools, attends and puts every head in place. Backward cuDNN's kernels are the faster ones for heads
with many points. Each group of these goes on a stream of its own, longest first, and spreads its gradients there; ours
take the other heads, and fill what the long ones leave.
"""

from __future__ import annotations

import functools
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dual import GroupHeadsByScale
from ..derivatives import differentiated_once
from ..launching import empty_like_heads, in_rows
from ..ragged.launch import Call, backward, forward
from ..ragged.layout import HeadLayout, Layout
from ..ragged.passes import Shift, place, place_three, pool, sum_rows
from ..streams import Fork
from . import attention as cudnn
from .attention import by_cudnn, like_output

QUERIES = 4096
"""Queries from which on cuDNN's backward pass pays, with its copies and streams. Captured, forward and backward, head
dimension 64, µs: 1107 against 1160 of ours alone at 4096 (batch 8), 8180 against 9150 at 16384 (batch 4)."""

POINTS = 2048
"""Points that a head needs for it: at 4096 two of four scales, at 16384 all."""

NARROW = 32
"""Heads no wider than this stay with ours: cuDNN's kernels take as long for them as for wider ones."""


def long(queries: int, points: int, dim: int) -> bool:
    """Whether a head goes back through cuDNN's kernels."""
    return queries >= QUERIES and points >= POINTS and dim > NARROW and not cudnn.wrong_gradients(points)


class Queries(NamedTuple):
    """Queries [batch, heads, length, dim] at the beginning of a flat buffer; heads side by side, in rows so long."""

    batch: int
    heads: int
    length: int
    dim: int
    row: int

    def of(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self[:4], (self.length * self.row, self.dim, self.row, 1))


def attend(
    packed: Tensor, queries: Queries, shift: Tensor | None, layout: Layout, cudnn: bool,
    dropout_p: float = 0.0, seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Heads whose queries, keys and values are given in one flat buffer; long ones go back through `cudnn`.

    shift [B, H, D] is taken off the queries, in the buffer itself if there is a way back: whoever made it must not need
    them again. Its gradient, −Σ_i dq_i, is left to whoever made it, too.
    """
    parts = divide(layout, queries.length, queries.dim) if cudnn else (Part(slice(None), layout, False),)
    return _Points.apply(packed, shift, queries, layout, parts, dropout_p, seed)


class Part(NamedTuple):
    """Heads side by side that go back together: over as many points each through cuDNN's kernels, or through ours."""

    heads: slice
    layout: Layout  # heads counted from the first one here
    cudnn: bool

    @property
    def points(self) -> int:
        """Of the first head."""
        return self.layout[0].points

    @property
    def window(self) -> int:
        """Of the first head."""
        return self.layout[0].window


def divide(layout: Layout, queries: int, dim: int) -> tuple[Part, ...]:
    """The parts of a layout whose heads stand in order, longest first."""
    return _divide(layout, tuple(long(queries, head.points, dim) for head in layout))


@functools.lru_cache(maxsize=256)
def _divide(layout: Layout, cudnn: tuple[bool, ...]) -> tuple[Part, ...]:
    parts = []
    for key, group in groupby(layout, lambda entry: (cudnn[entry.head], cudnn[entry.head] and entry.window)):
        heads = list(group)
        first = heads[0].head
        mine = tuple(entry._replace(head=entry.head - first) for entry in heads)
        parts.append(Part(slice(first, first + len(heads)), mine, key[0]))
    return tuple(parts)


@functools.lru_cache(maxsize=256)
def _layout(
    scales: tuple[int, ...], batch: int, tokens: int, dim: int, value_dim: int, apart: bool
) -> Layout:  # fmt: skip
    """Points of each scale, [batch, heads, points, dim], one scale after the other.

    Where those with windows of one token are `apart`, they have no place: they are given the tokens themselves.
    """
    entries, before = [], 0
    for scale, heads in GroupHeadsByScale.groups(scales):
        points = tokens // scale
        size = len(heads) * points
        for n, head in enumerate(heads):
            at = batch * before + n * points
            of_keys, of_values = (at * dim, size * dim, dim), (at * value_dim, size * value_dim, value_dim)
            entries.append(HeadLayout(head, points, scale, *of_keys, *of_values))
        before += 0 if apart and scale == 1 else size
    return tuple(entries)


def _heads_of(flat: Tensor, part: Part, batch: int, dim: int, values: bool) -> Tensor:
    """Keys or values [batch, heads, points, dim] of a part, a view of the flat buffer that they lie in."""
    places = [entry[6:] if values else entry[3:6] for entry in part.layout]
    first, of_batch, of_row = places[0]
    of_head = places[1][0] - first if len(places) > 1 else dim
    size, strides = (batch, len(places), part.points, dim), (of_batch, of_head, of_row, 1)
    return flat.as_strided(size, strides, flat.storage_offset() + first)


def _forked(parts: tuple[Part, ...], q: Tensor) -> Fork:
    return Fork(len(parts) if q.is_cuda else 1)


class Tokens(torch.autograd.Function):
    """Keys and values are given token by token, and pooled here; the mean of windows that are whole is the tokens'.

    Queries are re-centred by that times a factor, and times β where there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, factor: float, scales: tuple[int, ...]
    ) -> Tensor:  # fmt: skip
        q, k, v = in_rows(q), in_rows(k), in_rows(v)
        B, _, S, D = k.shape
        apart = scales.count(1)
        layout = _layout(scales, B, S, D, v.shape[-1], apart > 0)
        factor /= S
        sums = sum_rows(k) if factor else None
        shift = None if sums is None else Shift(sums, factor, beta)
        out = empty_like_heads(q, v.shape[-1])
        shifted = None if shift is None else empty_like_heads(q, D)
        keys, values, _ = pool(k, v, layout, False, apart)
        call = Call(layout, shift, tokens=(k, v) if apart else (None, None))
        _, lse = forward(q, keys, values, v.shape[-1], call, shifted, out)
        ctx.save_for_backward(q if shifted is None else shifted, k, v, out, lse, beta, keys, values, sums)
        ctx.settings = divide(layout, q.shape[2], D), factor
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, beta, keys, values, sums = ctx.saved_tensors
        grad = like_output(grad, out)
        dq, dk, dv = (
            empty_like_heads(out, q.shape[-1]),
            empty_like_heads(k, k.shape[-1]),
            empty_like_heads(v, v.shape[-1]),
        )
        found = []
        parts, factor = ctx.settings
        fork = _forked(parts, q)
        for index, part in enumerate(parts):
            with fork.part(index):
                mine = _Share(*(x[:, part.heads] for x in (grad, q, k, v, out, lse, dq, dk, dv)))
                gradients = _tokens_by_cudnn if part.cudnn else _tokens_by_ours
                found.append(gradients(part, mine, keys, values, factor, None if beta is None else beta[part.heads]))
        fork.join()
        if not ctx.needs_input_grad[3]:
            return dq, dk, dv, *[None] * 3
        of_queries = torch.cat([x.sum(2) for x in found if x is not None], 1)
        return dq, dk, dv, -factor * (of_queries * sums.sum(2)).sum((0, 2)), None, None


class _Share(NamedTuple):
    """What a part has of the tensors of a backward pass."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _tokens_by_cudnn(
    part: Part, mine: _Share, keys: Tensor, values: Tensor, factor: float, beta: Tensor | None
) -> Tensor | None:  # fmt: skip
    """Gradients of a part's queries and tokens, into dq, dk and dv; and sums over the first, where it is re-centred."""
    grad, q, k, v, out, lse, dq, dk, dv = mine
    sums = shift = None
    if part.window > 1:
        B, D, DV = q.shape[0], k.shape[-1], v.shape[-1]
        k, v = _heads_of(keys, part, B, D, False), _heads_of(values, part, B, DV, True)
    found = by_cudnn(grad, q, k, v, out, lse)
    if factor:
        sums = sum_rows(found[0])
        shift = Shift(sums, factor, beta)
    place_three(found, (dq, dk, dv), window=part.window, shift=shift)
    return sums


def _tokens_by_ours(
    part: Part, mine: _Share, keys: Tensor, values: Tensor, factor: float, beta: Tensor | None
) -> Tensor | None:  # fmt: skip
    """The same, of heads over different numbers of points."""
    grad, q, k, v, out, lse, dq, dk, dv = mine
    call = Call(part.layout, tokens=(k, v) if part.window == 1 else (None, None))
    backward(grad, q, keys, values, out, lse, call, dk, dv, k.shape[2], dq=dq)
    if not factor:
        return None
    sums = sum_rows(dq)
    place(dk, dk, shift=Shift(sums, factor, beta))
    return sums


class _Points(torch.autograd.Function):
    """Queries, keys and values are given in one buffer, and so are their gradients."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, shift: Tensor | None, queries: Queries, layout: Layout,
        parts: tuple[Part, ...], dropout_p: float, seed: Tensor | None,
    ) -> Tensor:  # fmt: skip
        call = Call(layout, Shift.of(shift), dropout_p=dropout_p, seed=seed)
        q = queries.of(packed)
        shifted = q if shift is not None and ctx.needs_input_grad[0] else None
        out, lse = forward(q, packed, packed, queries.dim, call, shifted)
        ctx.save_for_backward(packed, out, lse, seed)
        ctx.settings = queries, parts, dropout_p
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, out, lse, seed = ctx.saved_tensors
        queries, parts, dropout_p = ctx.settings
        B, D = queries.batch, queries.dim
        grad = like_output(grad, out) if any(part.cudnn for part in parts) else grad
        found = torch.empty_like(packed)
        q, dq = queries.of(packed), queries.of(found)
        fork = _forked(parts, q)
        for index, part in enumerate(parts):
            heads = part.heads
            with fork.part(index):
                if part.cudnn:
                    keys, values = (_heads_of(packed, part, B, D, side) for side in (False, True))
                    each = by_cudnn(grad[:, heads], q[:, heads], keys, values, out[:, heads], lse[:, heads])
                    dkeys, dvalues = (_heads_of(found, part, B, D, side) for side in (False, True))
                    place_three(each, (dq[:, heads], dkeys, dvalues), window=1)
                else:
                    call = Call(part.layout, dropout_p=dropout_p, seed=seed)
                    backward(
                        grad[:, heads], q[:, heads], packed, packed, out[:, heads], lse[:, heads], call,
                        found, found, 0, dq=dq[:, heads],
                    )  # fmt: skip
        fork.join()
        return found, *[None] * 6
