"""The projections of scaled heads: inputs are pooled first, and each group of heads projects its own points.

    [q; k; v]_1 = W_1 x + b_1,   [k; v]_s = W_s · pool_s(x) + b_s,   βμ_h = β (W_K · mean of the head's points + b_K)

All lie in one flat buffer: first what every token has, its queries and the keys and values of heads with windows of one
token, then the points of one scale after the other. Each of these parts is one matrix product, and one pass over the
inputs pools them at all scales. Gradients come in such a buffer, too. On the way back that of μ is shared out among the
keys, as in `recentred`, and the inputs are pooled again. What does not wait for one another runs on streams of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..derivatives import differentiated_once
from ..kept import on_device
from ..launching import launch_kernel, power_of_2
from ..native.notes import gather, product
from ..ragged.layout import HeadLayout, Layout
from .launching import forked, kernels
from .recentred import BLOCK, affine, beta_gradient, column_sums, shift_of


class Groups(NamedTuple):
    """(scale, heads) of each group; and the sizes of a call: batch, tokens, heads, head dimension."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    batch: int
    tokens: int
    heads: int
    head_dim: int

    @property
    def scales(self) -> tuple[int, ...]:
        """Of every head."""
        of_heads = {head: scale for scale, heads in self.groups for head in heads}
        return tuple(of_heads[head] for head in range(self.heads))

    @property
    def windows(self) -> list[int]:
        return [-(-self.tokens // scale) for scale, _ in self.groups]

    @property
    def distinct(self) -> list[int]:
        """Scales whose points have means of their own: where no window is shorter than the others, the last."""
        scales = [scale for scale, _ in self.groups]
        return scales if any(self.tokens % scale for scale in scales) else scales[-1:]

    @property
    def widths(self) -> list[int]:
        """Keys and values of a point."""
        return [2 * len(heads) * self.head_dim for _, heads in self.groups]

    @property
    def pooled(self) -> slice:
        """The groups with windows of several tokens."""
        return slice(self.groups[0][0] == 1, None)

    @property
    def row(self) -> int:
        """What a token has: queries, and the keys and values of heads with windows of one token."""
        return self.heads * self.head_dim + sum(self.widths[: self.pooled.start])

    @property
    def points(self) -> list[int]:
        """Of each pooled group, in all sequences."""
        return [self.batch * windows for windows in self.windows[self.pooled]]

    @property
    def columns(self) -> list[int]:
        """Of the parts of a flat buffer: that of the tokens, and one for each pooled group."""
        return [self.row, *self.widths[self.pooled]]

    @property
    def sizes(self) -> list[int]:
        """Of these parts."""
        rows = [self.batch * self.tokens, *self.points]
        return [many * columns for many, columns in zip(rows, self.columns, strict=True)]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Of a flat buffer, [tokens or points, columns] each."""
        return [part.view(-1, columns) for part, columns in zip(flat.split(self.sizes), self.columns, strict=True)]


@functools.lru_cache(maxsize=64)
def layout(groups: Groups) -> Layout:
    """Where each head's keys and values are in the flat buffer, longest heads first."""
    entries = []
    D, offsets = groups.head_dim, [0, *accumulate(groups.sizes)]
    for at, ((scale, heads), windows) in enumerate(zip(groups.groups, groups.windows, strict=True)):
        part = at + 1 - groups.pooled.start
        first, width = offsets[part] + (0 if part else groups.heads * D), groups.columns[part]
        for place, head in enumerate(heads):
            of_keys = first + place * D
            of_values = of_keys + len(heads) * D
            strides = windows * width, width
            entries.append(HeadLayout(head, windows, scale, of_keys, *strides, of_values, *strides))
    return tuple(entries)


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, recentred: bool, factor: float,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The flat buffer of queries, keys and values; and βμ [B, H, D] where heads are re-centred.

    βμ is to be taken off the queries and used for nothing else: its gradient is found here, from theirs.
    """
    return _Projected.apply(x, weight, bias, beta, groups, recentred, factor)


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, groups: Groups, recentred: bool,
        factor: float,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x = x.contiguous()
        flat, shift, rows, mean = forward(x, weight, bias, beta, groups, recentred, factor)
        if shift is not None:
            ctx.mark_non_differentiable(shift)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, rows, beta, None if beta is None else mean)
        ctx.settings = groups, factor, None if bias is None else bias.dtype
        return flat, shift

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, rows, beta, mean = ctx.saved_tensors
        groups, factor, bias_dtype = ctx.settings
        found = backward(grad, x, rows, beta, mean, groups, factor, bias_dtype, ctx.needs_input_grad)
        return *found, None, None, None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, groups: Groups, recentred: bool, factor: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The flat buffer and βμ; the weight's rows in the order of its parts, and μ."""
    E = x.shape[-1]
    flat = x.new_empty(sum(groups.sizes))
    tables = _tables(groups, x.device)
    mean = shift = None
    biases: Sequence[Tensor | None] = [None] * len(groups.columns)
    fork = forked(x, 2)
    with fork.part(0):
        pooled, sums = _pool(x, groups, recentred)
        if sums is not None:
            mean, shift = shift_of(sums, weight, bias, beta, factor, groups.heads, tables.means)
    rows = gather(weight, tables.order)
    if bias is not None:
        biases = gather(bias, tables.order).split(groups.columns)
    fork = forked(x, 2)  # from here on the other stream has these rows, too
    inputs, parts = [x.view(-1, E), *pooled], groups.parts(flat)
    for n, each in enumerate(zip(inputs, rows.split(groups.columns), biases, parts, strict=True)):
        with fork.part(0 if n else 1):
            affine(*each)
    fork.join()
    return flat, shift, rows, mean


def backward(
    grad: Tensor, x: Tensor, rows: Tensor, beta: Tensor | None, mean: Tensor | None, groups: Groups, factor: float,
    bias_dtype: torch.dtype | None, wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, weight, bias and β, where they are wanted, from that of the flat buffer."""
    want_x, want_weight, want_bias, want_beta = wanted[:4]
    E = x.shape[-1]
    tables = _tables(groups, x.device)
    (of_tokens, *of_points), (own, *own_pooled) = groups.parts(grad), rows.split(groups.columns)
    dx = torch.empty_like(x) if want_x else None
    drows = torch.empty_like(rows) if want_weight else None
    dbias = torch.empty(3 * E, dtype=bias_dtype, device=x.device) if want_bias else None
    dbeta = None

    sums = column_sums(of_tokens[:, :E].unflatten(0, x.shape[:2]))
    of_values = _finish(grad, sums, beta, factor, groups)
    fork = forked(x, 3)
    with fork.part(0):
        if dx is not None:
            back = x.new_empty(sum(groups.points), E)
            for part, weight, to in zip(of_points, own_pooled, back.split(groups.points), strict=True):
                product(part, weight, to)
            _unpool(back, dx, groups)
            to = dx.view(-1, E)
            product(of_tokens, own, to, to)
    with fork.part(1):
        if drows is not None:
            pooled, _ = _pool(x, groups, False)
            for part, inputs, to in zip(of_points, pooled, drows.split(groups.columns)[1:], strict=True):
                product(part.T, inputs, to)
        if dbias is not None:
            bias_gradients(sums, of_values, beta, factor, dbias, groups)
        if want_beta and beta is not None and mean is not None:
            dbeta = beta_gradient(sums, mean, beta.dtype)
    if drows is not None:
        product(of_tokens.T, x.view(-1, E), drows[: groups.row])
    fork.join()
    dweight = None if drows is None else gather(drows, tables.places)
    return dx, dweight, dbias, dbeta


class _Tables(NamedTuple):
    """What the kernels look up."""

    order: Tensor  # of the packed weight's rows, as the parts want them
    places: Tensor  # the way back
    pooled: Tensor  # scale, windows and first point of each pooled group
    means: Tensor  # of each head: where its sums are, and of how many points
    heads: Tensor  # of each head: itself, its points; offsets of keys and values, strides of batch and row, in heads
    windows_of_heads: Tensor  # scale and windows of each head


@on_device(most=256)
def _tables(groups: Groups, device: torch.device) -> _Tables:
    H, D, distinct = groups.heads, groups.head_dim, groups.distinct
    order, pooled, first = list(range(H)), [], 0
    for (scale, heads), windows in zip(groups.groups, groups.windows, strict=True):
        order += [side * H + head for side in (1, 2) for head in heads]
        if scale > 1:
            pooled.append((scale, windows, first))
            first += groups.batch * windows

    def put(data: object) -> Tensor:
        return torch.tensor(data, dtype=torch.int64, device=device)

    rows = (put(order)[:, None] * D + put(range(D))).flatten()
    in_heads = [(at.k_offset // D, at.v_offset // D, at.k_batch // D, at.k_row // D) for at in layout(groups)]
    heads_at = put([(at.head, at.points, *place) for at, place in zip(layout(groups), in_heads, strict=True)])
    of_heads = [(scale, -(-groups.tokens // scale)) for scale in groups.scales]
    means = [(distinct.index(s), windows) if s in distinct else (0, groups.windows[-1]) for s, windows in of_heads]
    return _Tables(rows, rows.argsort(), put(pooled), put(means), heads_at, put(of_heads))


def windows_of_heads(groups: Groups, device: torch.device) -> Tensor:
    """Scale and windows of each head, [H, 2]."""
    return _tables(groups, device).windows_of_heads


def _pool(x: Tensor, groups: Groups, want_sums: bool) -> tuple[Sequence[Tensor], Tensor | None]:
    """Means over windows, [B · windows, E] of each pooled group; and the sums of distinct ones, [B, .., blocks, E]."""
    B, N, E = x.shape
    scales, blocks = tuple(scale for scale, _ in groups.groups), -(-N // BLOCK)
    many = len(groups.distinct) if want_sums else 0
    out = x.new_empty(sum(groups.points), E)
    sums = x.new_empty(B, many, blocks, E, dtype=torch.float32) if many else None
    launch_kernel(kernels().pool, (blocks, -(-E // 64), B), (x, out, sums), (N, E, scales, many, BLOCK, 64))
    return out.split(groups.points), sums


def shift_of_groups(
    x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, factor: float, groups: Groups
) -> tuple[Tensor, Tensor]:
    """μ and βμ, [B, H, D] each, from tokens that are not pooled."""
    B, N, E = x.shape
    sums = x.new_empty(B, len(groups.distinct), -(-N // BLOCK), E, dtype=torch.float32)
    for n, scale in enumerate(groups.distinct):
        column_sums(x, out=sums[:, n], scale=scale)
    return shift_of(sums, weight, bias, beta, factor, groups.heads, _tables(groups, x.device).means)


def _finish(grad: Tensor, sums: Tensor, beta: Tensor | None, factor: float, groups: Groups) -> Tensor:
    """The gradient of μ, −β Σ_i dq_i, shared out among those of the keys; and sums of the values', [.., E]."""
    B, H, D = groups.batch, groups.heads, groups.head_dim
    blocks = -(-max(groups.windows) // BLOCK)
    found = sums.new_empty(B * blocks, H * D)
    launch_kernel(
        kernels().finish, (blocks, 2 * H, B), (grad, sums, beta, found, _tables(groups, sums.device).heads),
        (H, sums.shape[1], factor, D, power_of_2(D), BLOCK, min(32, power_of_2(sums.shape[1])),
         beta is not None or factor != 0.0, beta is not None),
    )  # fmt: skip
    return found


def bias_gradients(
    sums: Tensor, of_values: Tensor, beta: Tensor | None, factor: float, out: Tensor, groups: Groups
) -> None:  # fmt: skip
    """Gradients of the biases of queries, keys and values."""
    E = sums.shape[-1]
    launch_kernel(
        kernels().biases, (-(-E // 32), 3, 1), (sums, of_values, beta, out),
        (sums.numel() // E, of_values.shape[0], E, factor, groups.head_dim, 128, 32, beta is not None),
    )  # fmt: skip


def _unpool(back: Tensor, dx: Tensor, groups: Groups) -> None:
    """The gradients of the points of all pooled groups, shared out among the tokens of each window."""
    B, N, E = dx.shape
    table = _tables(groups, dx.device).pooled
    launch_kernel(kernels().unpool, (-(-N // 32), -(-E // 128), B), (dx, back, table), (N, E, table.shape[0], 32, 128))
