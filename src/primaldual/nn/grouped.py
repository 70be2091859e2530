"""The projections of scaled heads: inputs are pooled first, and each group of heads projects its own points.

    q = W_Q x + b_Q,   [k; v]_g = W_g · pool_s(x) + b_g,   βμ_h = β (W_K · mean of the head's points + b_K)

Keys and values of a group come out of one matrix product, side by side, and all groups lie in one flat buffer. On the
way back the gradient of μ is shared out among the keys, as in `recentred`, and the points are pooled again. What does
not wait for one another runs on streams of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.gpu.launching import power_of_2
from ..ops.problem import pick
from .launching import forked, launch
from .recentred import BLOCK, affine, column_sums, shift_of


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
    def whole(self) -> bool:
        """Whether no window is shorter than the others: then all heads have the mean of the tokens."""
        return all(self.tokens % scale == 0 for scale, _ in self.groups)

    @property
    def widths(self) -> list[int]:
        """Keys and values of a point."""
        return [2 * len(heads) * self.head_dim for _, heads in self.groups]

    @property
    def sizes(self) -> list[int]:
        return [self.batch * count * width for count, width in zip(self.windows, self.widths, strict=True)]

    def points(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer of keys and values, [points, width] each."""
        return [part.view(-1, width) for part, width in zip(flat.split(self.sizes), self.widths, strict=True)]


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, recentred: bool, number: float,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Queries [B, H, N, D], βμ [B, H, D] where heads are re-centred, and the flat buffer of keys and values.

    βμ is to be taken off the queries and used for nothing else: its gradient is found here, from theirs.
    """
    return _Projected.apply(x, weight, bias, beta, groups, recentred, number)


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, groups: Groups, recentred: bool,
        number: float,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        x = x.contiguous()
        B, N, E = x.shape
        q = x.new_empty(B * N, E)
        points = x.new_empty(sum(groups.sizes))
        mean = shift = None
        rows = []
        fork = forked(x, 5)
        if recentred:
            with fork.part(0):
                mean, shift = shift_of_groups(x, weight, bias, beta, number, groups)
            ctx.mark_non_differentiable(shift)
        for n, ((scale, heads), to) in enumerate(zip(groups.groups, groups.points(points), strict=True)):
            with fork.part(1 + n % 3):
                rows.append(_rows_of(weight, heads, groups))
                affine(_pool(x, scale), rows[n], None if bias is None else _rows_of(bias, heads, groups), to)
        affine(x.view(-1, E), weight[:E], None if bias is None else bias[:E], q)
        fork.join()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, beta, None if beta is None else mean, *rows)
        ctx.settings = groups, number, None if bias is None else bias.dtype
        return q.view(B, N, groups.heads, groups.head_dim).transpose(1, 2), shift, points

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: Tensor, _: Tensor | None, dpoints: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, beta, mean, *rows = ctx.saved_tensors
        groups, number, bias_dtype = ctx.settings
        want_x, want_weight, want_bias, want_beta = ctx.needs_input_grad[:4]
        E = x.shape[-1]
        tokens, dq = x.view(-1, E), dq.transpose(1, 2).reshape(x.shape)
        parts = groups.points(dpoints)
        scaled = [scale > 1 for scale, _ in groups.groups]
        dx = x.new_empty(tokens.shape) if want_x else None
        dweight = torch.empty_like(weight) if want_weight else None
        dbias = torch.empty(3 * E, dtype=bias_dtype, device=x.device) if want_bias else None
        dbeta = back = None

        fork = forked(x, 3)
        with fork.part(0):
            sums = column_sums(dq)
            of_values = _finish(parts, sums, beta, number, groups)
        with fork.part(1):
            if dx is not None:
                torch.mm(dq.view(-1, E), weight[:E], out=dx)
        if dweight is not None:
            torch.mm(dq.view(-1, E).T, tokens, out=dweight[:E])
        fork.join()

        fork = forked(x, 5)
        if dx is not None:
            pooled = [part.shape[0] for part, after in zip(parts, scaled, strict=True) if after]
            back = x.new_empty(sum(pooled), E)
            to = iter(back.split(pooled))
            for part, own, after in zip(parts, rows, scaled, strict=True):
                with fork.part(1 if after else 0):
                    if after:
                        torch.mm(part, own, out=next(to))
                    else:
                        dx.addmm_(part, own)
        if dweight is not None:
            for n, ((scale, heads), part) in enumerate(zip(groups.groups, parts, strict=True)):
                with fork.part(2 + n % 2):
                    _put(part.T @ _pool(x, scale), dweight, heads, groups)
        with fork.part(2):
            if dbias is not None:
                biases(sums, of_values, beta, number, dbias, groups)
            if want_beta and mean is not None:
                dbeta = -(sums.sum(1).view_as(mean) * mean).sum((0, 2)).to(beta.dtype)
        if dx is not None and back is not None:
            fork.wait(0)
            fork.wait(1)
            dx = _unpool(dx.view_as(x), back, groups)
        fork.join()
        return dx, dweight, dbias, dbeta, None, None, None


def _rows_of(x: Tensor, heads: tuple[int, ...], groups: Groups) -> Tensor:
    """Of the packed weight or bias the rows of these heads' keys, then those of their values."""
    of_keys_and_values = x[groups.heads * groups.head_dim :].unflatten(0, (2, groups.heads, groups.head_dim))
    return pick(of_keys_and_values, 1, heads).flatten(0, 2)


def _put(rows: Tensor, to: Tensor, heads: tuple[int, ...], groups: Groups) -> None:
    """The way back of `_rows_of`."""
    E = groups.heads * groups.head_dim
    to = to[E:].unflatten(0, (2, groups.heads, groups.head_dim))
    rows = rows.unflatten(0, (2, len(heads), groups.head_dim))
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        to.narrow(1, heads[0], len(heads)).copy_(rows)
        return
    for place, head in enumerate(heads):
        to[:, head].copy_(rows[:, place])


class _Tables(NamedTuple):
    """What the kernels look up."""

    pooled: Tensor  # scale, windows and first point of each pooled group
    means: Tensor  # of each head: where its sums are, and of how many points
    heads: list[Tensor]  # of each group
    votes: Tensor  # scale and windows of each head


@functools.lru_cache(maxsize=64)
def _tables(groups: Groups, device: torch.device) -> _Tables:
    pooled, means, first = [], [(0, groups.tokens)] * groups.heads, 0
    of_heads = [(1, groups.tokens)] * groups.heads
    for number, ((scale, heads), windows) in enumerate(zip(groups.groups, groups.windows, strict=True)):
        for head in heads:
            of_heads[head] = (scale, windows)
            if not groups.whole:
                means[head] = (number, windows)
        if scale > 1:
            pooled.append((scale, windows, first))
            first += groups.batch * windows

    def put(data: Sequence[object]) -> Tensor:
        return torch.tensor(data, dtype=torch.int64, device=device)

    return _Tables(put(pooled), put(means), [put(heads) for _, heads in groups.groups], put(of_heads))


def votes(groups: Groups, device: torch.device) -> Tensor:
    """Scale and windows of each head, [H, 2]."""
    return _tables(groups, device).votes


def _pool(x: Tensor, scale: int) -> Tensor:
    """The means over windows of so many tokens, [B · windows, E]."""
    B, N, E = x.shape
    if scale == 1:
        return x.view(-1, E)
    W, BW = -(-N // scale), max(1, 64 // power_of_2(scale))
    out = x.new_empty(B * W, E)
    launch("pool", (-(-W // BW), -(-E // 128), B), (x, out), (N, E, W, scale, BW, 128))
    return out


def shift_of_groups(
    x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, number: float, groups: Groups
) -> tuple[Tensor, Tensor]:
    """μ and βμ, [B, H, D] each."""
    B, N, E = x.shape
    scales = [1] if groups.whole else [scale for scale, _ in groups.groups]
    sums = x.new_empty(B, len(scales), -(-N // BLOCK), E, dtype=torch.float32)
    for n, scale in enumerate(scales):
        column_sums(x, out=sums[:, n], scale=scale)
    return shift_of(sums, weight, bias, beta, number, groups.heads, _tables(groups, x.device).means)


def _finish(parts: list[Tensor], sums: Tensor, beta: Tensor | None, number: float, groups: Groups) -> Tensor:
    """The gradient of μ, −β Σ_i dq_i, shared out among those of the keys; and sums of the values', [.., E]."""
    B, H, D = groups.batch, groups.heads, groups.head_dim
    blocks = -(-max(groups.windows) // BLOCK)
    found = sums.new_empty(B * blocks, H * D)
    for part, heads, windows in zip(parts, _tables(groups, sums.device).heads, groups.windows, strict=True):
        launch(
            "finish", (blocks, 2 * heads.shape[0], B), (part, sums, beta, found, heads),
            (H, heads.shape[0], windows, blocks, sums.shape[1], number, D, power_of_2(D), BLOCK,
             min(32, power_of_2(sums.shape[1])), beta is not None or number != 0.0, beta is not None),
        )  # fmt: skip
    return found


def biases(
    sums: Tensor, of_values: Tensor, beta: Tensor | None, number: float, out: Tensor, groups: Groups
) -> None:  # fmt: skip
    """Gradients of the biases of queries, keys and values."""
    E = sums.shape[-1]
    launch(
        "biases", (-(-E // 32), 3, 1), (sums, of_values, beta, out),
        (sums.numel() // E, of_values.shape[0], E, number, groups.head_dim, 128, 32, beta is not None),
    )  # fmt: skip


def _unpool(dx: Tensor, back: Tensor, groups: Groups) -> Tensor:
    """dx and, of every pooled group, its points' gradients shared out among the tokens of each window."""
    B, N, E = dx.shape
    table = _tables(groups, dx.device).pooled
    launch("unpool", (-(-N // 32), -(-E // 128), B), (dx, back, table), (N, E, table.shape[0], 32, 128))
    return dx
