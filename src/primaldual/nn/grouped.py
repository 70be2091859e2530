"""The projections of scaled heads: inputs are pooled first, and each group of heads projects its own points.

    q = W_Q x + b_Q,   [k; v]_g = W_g · pool_s(x) + b_g,   βμ_h = β (W_K · mean of the head's points + b_K)

Keys and values of a group come out of one matrix product, side by side, and all groups lie in one flat buffer. On the
way back the gradient of μ is shared out among the keys, as in `recentred`, and the points are pooled again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launching import launch, launches, power
from .recentred import total, wide


class Groups(NamedTuple):
    """(scale, heads) of each group; and the sizes of a call: batch, tokens, heads, head dimension."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    batch: int
    tokens: int
    heads: int
    head_dim: int

    @property
    def windows(self) -> list[int]:
        return [-(-self.tokens // scale) for scale, _ in self.groups]

    @property
    def widths(self) -> list[int]:
        """Keys and values of a point."""
        return [2 * len(heads) * self.head_dim for _, heads in self.groups]

    @property
    def sizes(self) -> list[int]:
        return [self.batch * count * width for count, width in zip(self.windows, self.widths, strict=True)]

    def order(self, device: torch.device, back: bool = False) -> Tensor:
        """Rows of the packed key and value weights in the order of the groups; or the way back."""
        return _order(tuple(heads for _, heads in self.groups), self.head_dim, device, back)

    def points(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer of keys and values, [points, width] each."""
        return [part.view(-1, width) for part, width in zip(flat.split(self.sizes), self.widths, strict=True)]

    def apart(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same as keys and values, [batch, heads of the group, windows, head_dim] each."""
        parts = zip(flat.split(self.sizes), self.groups, self.windows, strict=True)
        shaped = (part.view(self.batch, W, 2, len(heads), self.head_dim) for part, (_, heads), W in parts)
        return [tuple(x.permute(2, 0, 3, 1, 4).unbind(0)) for x in shaped]


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, recentred: bool, number: float, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries [B, H, N, D], the flat buffer of keys and values, and βμ [B, H, D] where heads are re-centred."""
    return _Projected.apply(x, weight, bias, beta, groups, recentred, number)


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, beta: Tensor | None, groups: Groups, recentred: bool,
        number: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        x = x.contiguous()
        B, N, E = x.shape
        order = groups.order(x.device)
        tokens, rows = x.view(-1, E), weight[E:].index_select(0, order)
        biases = None if bias is None else bias[E:].index_select(0, order)
        points, sums = _pool(x, groups, recentred)
        q = torch.nn.functional.linear(tokens, weight[:E], None if bias is None else bias[:E])
        flat = x.new_empty(sum(groups.sizes))
        at = 0
        for p, to in zip(points, groups.points(flat), strict=True):
            end = at + to.shape[1]
            if biases is None:
                torch.mm(p, rows[at:end].T, out=to)
            else:
                torch.addmm(biases[at:end], p, rows[at:end].T, out=to)
            at = end
        mean, shift = _shift(sums, weight, bias, beta, number, groups) if recentred else (None, None)
        ctx.save_for_backward(x, weight, rows, beta, None if beta is None else mean)
        ctx.settings = groups, recentred, number, None if bias is None else bias.dtype
        return q.view(B, N, groups.heads, groups.head_dim).transpose(1, 2), flat, shift

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: Tensor, dflat: Tensor, dshift: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rows, beta, mean = ctx.saved_tensors
        groups, recentred, number, bias_dtype = ctx.settings
        E = x.shape[-1]
        dq = dq.transpose(1, 2).reshape(-1, E)
        dshift = dshift.contiguous() if recentred and dshift is not None else None
        dflat, sums = _finish(dflat, dshift, beta, number, groups)
        parts = groups.points(dflat)
        dx = dweight = dbias = dbeta = None
        if ctx.needs_input_grad[0]:
            dx = dq @ weight[:E]
            scaled = [part.shape[0] for (scale, _), part in zip(groups.groups, parts, strict=True) if scale > 1]
            back = x.new_empty(sum(scaled), E)
            rest = iter(back.split(scaled))
            for (scale, _), part, own in zip(groups.groups, parts, rows.split(groups.widths), strict=True):
                if scale == 1:
                    dx.addmm_(part, own)
                else:
                    torch.mm(part, own, out=next(rest))
            dx = _unpool(dx.view_as(x), back, groups)
            del back, rest
        if ctx.needs_input_grad[1]:
            points, _ = _pool(x, groups, False)
            dweight, in_groups = torch.empty_like(weight), weight.new_empty(2 * E, E)
            torch.mm(dq.T, x.view(-1, E), out=dweight[:E])
            for part, p, to in zip(parts, points, in_groups.split(groups.widths), strict=True):
                torch.mm(part.T, p, out=to)
            torch.index_select(in_groups, 0, groups.order(x.device, back=True), out=dweight[E:])
        if ctx.needs_input_grad[2]:
            dbias = torch.empty(3 * E, dtype=bias_dtype, device=x.device)
            torch.sum(dq, 0, out=dbias[:E])
            total(sums, bias_dtype, dbias[E:])
        if dshift is not None and beta is not None and ctx.needs_input_grad[3]:
            dbeta = (dshift * mean).sum((0, 2)).to(beta.dtype)
        return dx, dweight, dbias, dbeta, None, None, None


class Apart(torch.autograd.Function):
    """The flat buffer as keys and values of each group, which get their gradients into one buffer again."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, groups: Groups) -> tuple[Tensor, ...]:
        ctx.groups = groups
        return tuple(x for pair in groups.apart(flat) for x in pair)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        flat = grads[0].new_empty(sum(ctx.groups.sizes))
        for number, (dk, dv) in enumerate(ctx.groups.apart(flat)):
            dk.copy_(grads[2 * number])
            dv.copy_(grads[2 * number + 1])
        return flat, None


@functools.lru_cache(maxsize=64)
def _order(heads_of: tuple[tuple[int, ...], ...], D: int, device: torch.device, back: bool) -> Tensor:
    E = D * sum(len(heads) for heads in heads_of)
    rows = [part * E + head * D + d for heads in heads_of for part in range(2) for head in heads for d in range(D)]
    return torch.tensor(sorted(range(2 * E), key=rows.__getitem__) if back else rows, device=device)


@functools.lru_cache(maxsize=64)
def _table(groups: Groups, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels look up: for `pool` and `unpool`, for `shift`, and for `finish`."""
    pools, heads, rows, first, offset, column = [], [(0, 0)] * groups.heads, [], 0, 0, 0
    sizes = zip(groups.groups, groups.windows, groups.widths, groups.sizes, strict=True)
    for number, ((scale, own), windows, width, size) in enumerate(sizes):
        pools.append((scale, windows, first if scale > 1 else -1))
        rows.append((windows, offset, width, column))
        for head in own:
            heads[head] = (number, windows)
        first += groups.batch * windows if scale > 1 else 0
        offset, column = offset + size, column + width

    def put(data: Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(data, dtype=torch.int64, device=device)

    return put(pools), put(heads), put(rows)


def _pool(x: Tensor, groups: Groups, want_sums: bool) -> tuple[list[Tensor], Tensor | None]:
    """The points [B · windows, E] of each group; and sums of them, [B, groups, blocks, E], where they are wanted."""
    B, N, E = x.shape
    scales = [scale for scale, _ in groups.groups]
    if not launches(x):
        means = [x if s == 1 else _means(x, s) for s in scales]
        sums = torch.stack([p.sum(1, dtype=wide(x)) for p in means], 1).unsqueeze(2) if want_sums else None
        return [p.reshape(-1, E) for p in means], sums
    pooled = [B * W for W, s in zip(groups.windows, scales, strict=True) if s > 1]
    flat = x.new_empty(sum(pooled), E)
    rest = iter(flat.split(pooled))
    points = [x.view(-1, E) if s == 1 else next(rest) for s in scales]
    size = 64 if N <= 2048 else 128  # tokens of a block
    blocks = max(-(-W // max(1, size // s)) for W, s in zip(groups.windows, scales, strict=True))
    sums = x.new_empty(B, len(scales), blocks, E, dtype=torch.float32) if want_sums else None
    most = power(max(1, size // min(s for s in scales if want_sums or s > 1)))
    if want_sums or scales[0] > 1:
        table, used = _table(groups, x.device)[0], len(scales)
    else:  # the first group reads its tokens where they are
        table, used = _table(groups, x.device)[0][1:], len(scales) - 1
    launch(
        "pool", (used, blocks * -(-E // 128), B), (x, flat, sums, table),
        (N, E, used, blocks, size, most, min(128, power(E)), want_sums),
    )  # fmt: skip
    return points, sums


def _means(x: Tensor, scale: int) -> Tensor:
    """Means over windows of so many tokens; the last one may be shorter."""
    whole = x.shape[1] // scale * scale
    points = x[:, :whole].unflatten(1, (-1, scale)).mean(2) if whole else x[:, :0]
    return points if whole == x.shape[1] else torch.cat([points, x[:, whole:].mean(1, keepdim=True)], 1)


def _shift(
    sums: Tensor | None, weight: Tensor, bias: Tensor | None, beta: Tensor | None, number: float, groups: Groups
) -> tuple[Tensor, Tensor]:
    """μ and βμ, [B, H, D] each."""
    assert sums is not None
    B, H, D, E = groups.batch, groups.heads, groups.head_dim, weight.shape[1]
    of_keys = weight[E : 2 * E].contiguous()
    if not launches(weight):
        mean = sums.new_empty(B, H, D)
        for n, ((_, heads), windows) in enumerate(zip(groups.groups, groups.windows, strict=True)):
            own = of_keys.view(H, D, E)[list(heads)].to(sums.dtype)
            with torch.autocast(sums.device.type, enabled=False):  # statistics are not rounded
                mean[:, list(heads)] = torch.einsum("be,hde->bhd", sums[:, n].sum(1) / windows, own)
        if bias is not None:
            mean += bias[E : 2 * E].view(H, D)
        return mean, mean * (number if beta is None else beta[:, None])
    mean, shift = sums.new_empty(B, H, D), sums.new_empty(B, H, D)
    launch(
        "shift", (H, B, 1),
        (sums, of_keys, None if bias is None else bias[E : 2 * E], beta, _table(groups, weight.device)[1], mean, shift),
        (H, E, sums.shape[1], sums.shape[2], number, D, power(D), min(128, power(E)), min(32, power(sums.shape[2])),
         bias is not None, beta is not None),
        warps=8,
    )  # fmt: skip
    return mean, shift


def _finish(
    dflat: Tensor, dshift: Tensor | None, beta: Tensor | None, number: float, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Gradients of the points with that of μ shared out among the keys; and sums of them, [.., 2E], keys first."""
    B, H, D = groups.batch, groups.heads, groups.head_dim
    if not launches(dflat):
        sums = dflat.new_empty(B, 2, H, D, dtype=wide(dflat))
        dflat = dflat.clone()
        for (dk, dv), (_, heads), windows in zip(groups.apart(dflat), groups.groups, groups.windows, strict=True):
            if dshift is not None:
                dmean = dshift * (number if beta is None else beta[:, None])
                dk += dmean[:, list(heads)].unsqueeze(2) / windows
            sums[:, 0, list(heads)] = dk.sum(2, dtype=wide(dk))
            sums[:, 1, list(heads)] = dv.sum(2, dtype=wide(dv))
        return dflat, sums.flatten(1)
    blocks = -(-max(groups.windows) // 128)
    sums = dflat.new_empty(B, blocks, 2 * H * D, dtype=torch.float32)
    launch(
        "finish", (blocks, len(groups.groups), B),
        (dflat, dshift, beta, sums, _table(groups, dflat.device)[2], groups.order(dflat.device)),
        (H * D, blocks, number, D, 128, min(64, power(min(groups.widths))), dshift is not None, beta is not None),
    )  # fmt: skip
    return dflat, sums


def _unpool(dx: Tensor, back: Tensor, groups: Groups) -> Tensor:
    """dx and, of every pooled group, its points' gradients shared out among the tokens of each window."""
    B, N, E = dx.shape
    pooled = [scale for scale, _ in groups.groups if scale > 1]
    if not launches(dx):
        for part, scale in zip(back.split([B * -(-N // s) for s in pooled]), pooled, strict=True):
            size = torch.full((-(-N // scale),), float(scale), dtype=dx.dtype, device=dx.device)
            size[-1] = (N - 1) % scale + 1
            dx += (part.view(B, -1, E) / size[:, None]).repeat_interleave(scale, 1)[:, :N]
        return dx
    table = _table(groups, dx.device)[0][-len(pooled) :]
    launch(
        "unpool", (-(-N // 64), -(-E // 128), B), (dx, back, table), (N, E, len(pooled), 64, min(128, power(E)))
    )  # fmt: skip
    return dx
