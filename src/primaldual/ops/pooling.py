"""From tokens to the points of a head, without the dense membership matrix of the definition.

Tokens are laid out by window, [windows, places], so that pooling is a reduction over the places. The causal form
keeps every running mean of a window: the last of them is the mean of the complete window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..dual.form import form_of, pattern_of, pooling_of
from ..kernels.kept import on_device
from ..kernels.launching import exporting
from ..primal import Pooled, TrainingSet
from ..primal.features import Parameters
from ..primal.grids import grid_of
from .problem import Problem, UnsupportedError


class Pool(NamedTuple):
    """The points of a group of heads, the same for every query."""

    keys: Tensor  # [B, H, W, D]
    values: Tensor  # [B, H, W, Dv]
    seen: Tensor | None  # bool [B, H or 1, W]; None when all are
    bias: Tensor | None  # [B, H, W]


class CausalPool(NamedTuple):
    """The running means of every window, up to the last query's token; unpooled tokens come first."""

    prefix: Pool  # the first tokens, P of them
    keys: Tensor  # [B, H, W, s, D]: the mean of window w up to its place t
    values: Tensor  # [B, H, W, s, Dv]
    seen: Tensor | None  # bool [B, 1, W, s]
    bias: Tensor | None  # [B, H, W, s]


def pool(p: Problem) -> Pool:
    """The points that every query of the group sees."""
    points = _pool(p)
    return points if p.log_weights is None else points._replace(bias=_plus(points.bias, _weights_of_points(p)))


def _pool(p: Problem) -> Pool:
    if (points := form_of(p.primal).points) == "tokens" or (p.scale == 1 and points != "own"):
        return Pool(p.k, p.v, None if p.key_hidden is None else ~p.key_hidden, p.key_bias)
    values = p.v if p.key_bias is None else torch.cat([p.v, _bias_value(p)], dim=-1)
    seen = None if p.key_hidden is None else ~p.key_hidden
    pooled = pooling_of(p.primal.training_set)
    if pooled is None or pooled.how == "kmeans":
        everything = torch.ones(1, 1, p.k.shape[2], dtype=torch.bool, device=p.k.device) if seen is None else seen
        own = p.primal.training_set.reduce(p.k, values, everything.unsqueeze(2), p.scale, p.parameters)
        if own.keys.shape[2] != 1 or own.seen.shape[2] != 1:
            raise UnsupportedError(
                f"{p.primal.training_set!r}: reduce gave points [batch, heads, {own.keys.shape[2]}, points, dim] for "
                f"tokens that all queries see, where a 1 is expected; impl='reference' takes points for each query"
            )
        keys, values, seen = own.keys.squeeze(2), own.values.squeeze(2), own.seen.squeeze(2)
    elif seen is None:
        keys, _ = pool_tokens(p.k, None, pooled, p.scale, p.parameters)
        values, _ = pool_tokens(values, None, pooled, p.scale, p.parameters)
    else:  # side by side, so that the valid tokens are counted once
        both, seen = pool_tokens(torch.cat([p.k, values], dim=-1), seen, pooled, p.scale, p.parameters)
        keys, values = (x.contiguous() for x in both.split([p.k.shape[-1], values.shape[-1]], dim=-1))
    if p.key_bias is None:
        return Pool(keys, values, seen, None)
    return Pool(keys, values[..., :-1], seen, values[..., -1])


def pool_tokens(
    x: Tensor, seen: Tensor | None, pooled: Pooled, scale: int, parameters: Parameters
) -> tuple[Tensor, Tensor | None]:
    """Pool [B, H, S, C] to [B, H, W, C] by windows; hidden tokens are zero on entry. Also which points exist."""
    if scale == 1:
        return x, seen
    prefix, tokens = min(pooled.prefix, x.shape[2]), x.shape[2]
    grid = None if pooled.grid is None else grid_of("Pooled", tokens, pooled.grid, pooled.prefix)
    windows, whole = _lay_out(x[:, :, prefix:], scale, grid)
    if seen is None and whole:
        valid = count = None
    else:
        tokens_seen = x.new_ones(1, 1, tokens, dtype=torch.bool) if seen is None else seen
        valid, _ = _lay_out(tokens_seen[:, :, prefix:].unsqueeze(-1), scale, grid)  # [B, 1, W, s, 1]
        count = valid.sum(3).clamp(min=1).to(_wide(x))
    points = _reduce(windows, valid, count, pooled.how, parameters.get(f"pool_kernel_{scale}"))
    if prefix:
        points = torch.cat([x[:, :, :prefix], points], dim=2)
    if seen is None or valid is None:
        return points, seen
    exists = valid.any(3).squeeze(-1)
    return points, torch.cat([seen[:, :, :prefix], exists], dim=2) if prefix else exists


def log_sum(x: Tensor, where: Tensor) -> Tensor:
    """log Σ exp over the last dimension, of what stands where True; some does in every row."""
    return x.masked_fill(~where, -torch.inf).logsumexp(-1)


def relative(bias: Tensor, seen: Tensor | None) -> Tensor:
    """A bias less the largest that a query sees, which h cancels; 0 where it sees none."""
    if seen is None:
        return bias - bias.detach().amax(-1, keepdim=True)
    largest = bias.detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    return (bias - largest.masked_fill(largest == -torch.inf, 0.0)).masked_fill(~seen, 0.0)


def _plus(bias: Tensor | None, more: Tensor) -> Tensor:
    return more if bias is None else bias + more


def _weights_of_points(p: Problem) -> Tensor:
    """log of the sum of the weights of each point's tokens, those that exist: [B or 1, H or 1, W]."""
    x, points, pooled = p.log_weights, form_of(p.primal).points, pooling_of(p.primal.training_set)
    assert x is not None
    if points == "tokens" or (p.scale == 1 and points != "own"):
        return x
    tokens = x.shape[2]
    seen = x.new_ones(1, 1, tokens, dtype=torch.bool) if p.key_hidden is None else ~p.key_hidden
    if pooled is None or pooled.how == "kmeans":
        own = p.primal.training_set.reduce(p.k, p.v, seen.unsqueeze(2), p.scale, p.parameters)
        if own.share is None:
            raise UnsupportedError(f"{p.primal.training_set!r} does not say which tokens its points are of")
        member = (own.share.squeeze(2) > 0) & seen.unsqueeze(-2)
        empty = ~member.any(-1)
        return log_sum(x.unsqueeze(-2), member | empty.unsqueeze(-1)).masked_fill(empty, 0.0)
    prefix = min(pooled.prefix, tokens)
    grid = None if pooled.grid is None else grid_of("Pooled", tokens, pooled.grid, pooled.prefix)
    windows, valid = (_lay_out(t[:, :, prefix:].unsqueeze(-1), p.scale, grid)[0].squeeze(-1) for t in (x, seen))
    empty = ~valid.any(-1)
    windows = log_sum(windows, valid | empty.unsqueeze(-1)).masked_fill(empty, 0.0)
    return torch.cat([x[:, :, :prefix].expand(*windows.shape[:2], -1), windows], dim=2) if prefix else windows


def causal_pool(p: Problem) -> CausalPool:
    """The causal form: what every query sees of the windows before its own, and of its own."""
    points = _causal_pool(p)
    if p.log_weights is None:
        return points
    prefix, (windows, scale) = points.prefix.keys.shape[2], points.keys.shape[2:4]
    x = fit_length(p.log_weights.unsqueeze(-1), prefix + windows * scale).squeeze(-1)
    head = points.prefix._replace(bias=_plus(points.prefix.bias, x[:, :, :prefix]))
    weights = x[:, :, prefix:].unflatten(2, (windows, scale)).unsqueeze(-2)  # [B, H, W, 1, s]
    member = torch.ones(scale, scale, dtype=torch.bool, device=x.device).tril()
    if points.seen is not None:
        valid = points.seen.new_ones(1, 1, p.k.shape[2]) if p.key_hidden is None else ~p.key_hidden
        valid = fit_length(valid.unsqueeze(-1), prefix + windows * scale).squeeze(-1)
        member = member & valid[:, :, prefix:].unflatten(2, (windows, scale)).unsqueeze(-2)
    empty = ~member.any(-1)
    running = log_sum(weights, member | empty.unsqueeze(-1)).masked_fill(empty, 0.0)
    return points._replace(prefix=head, bias=_plus(points.bias, running))


def _causal_pool(p: Problem) -> CausalPool:
    pooled = pooling_of(p.primal.training_set)
    queries = p.query_offset + p.q.shape[2]
    prefix = min(pooled.prefix, queries) if pooled is not None and p.scale > 1 else 0
    values = p.v if p.key_bias is None else torch.cat([p.v, _bias_value(p)], dim=-1)
    keys, values = (fit_length(x, queries) for x in (p.k, values))  # later tokens are never seen
    seen = None
    if (
        p.key_hidden is not None or exporting()
        or p.k.shape[2] < queries or (queries - prefix) % p.scale
    ):  # fmt: skip
        seen = p.k.new_ones(1, 1, p.k.shape[2], dtype=torch.bool) if p.key_hidden is None else ~p.key_hidden
        seen = fit_length(seen.unsqueeze(-1), queries).squeeze(-1)

    def split_bias(x: Tensor) -> tuple[Tensor, Tensor | None]:
        return (x, None) if p.key_bias is None else (x[..., :-1], x[..., -1])

    first_values, first_bias = split_bias(values[:, :, :prefix])
    first = Pool(keys[:, :, :prefix], first_values, None if seen is None else seen[:, :, :prefix], first_bias)
    k, v = (_lay_out(x[:, :, prefix:], p.scale, None)[0] for x in (keys, values))
    if seen is None:
        count = torch.arange(1, p.scale + 1, device=k.device, dtype=_wide(k))[:, None]
        running = None
    else:
        count = _lay_out(seen[:, :, prefix:].unsqueeze(-1), p.scale, None)[0].cumsum(3).to(_wide(k))  # [B, 1, W, s, 1]
        running = (count > 0).squeeze(-1)
        count = count.clamp(min=1)
    if p.scale > 1:
        k, v = ((x.cumsum(3, dtype=_wide(x)) / count).to(x.dtype) for x in (k, v))
    v, bias = split_bias(v)
    return CausalPool(first, k, v, running, bias)


REMEMBERED = 1 << 22
"""Pairs of the largest pattern that is kept on a GPU."""


def visible(p: Problem, first: int | None = None) -> Tensor | None:
    """`Problem.visible`. On a GPU small ones are remembered."""
    training_set, end = p.primal.training_set, p.query_offset + p.q.shape[2]
    if not (p.q.is_cuda and pattern_of(training_set) is not None) or torch.compiler.is_compiling():
        return p.visible(first)
    if end * p.k.shape[2] > REMEMBERED:
        return p.visible(first)
    shown = _kept_visible(training_set, p.scale, end, p.k.shape[2], p.q.device)
    return shown if shown is None else shown[p.query_offset if first is None else first :]


@on_device(most=64, from_host=False)
def _kept_visible(sparse: TrainingSet, scale: int, queries: int, tokens: int, device: torch.device) -> Tensor | None:
    return sparse.visible(scale, queries, tokens, device)


def fit_length(x: Tensor, length: int) -> Tensor:
    """Cut or zero-pad dimension 2."""
    if exporting():
        return _taken(x, torch.arange(length, device=x.device))
    return x[:, :, :length] if x.shape[2] >= length else pad(x, (0, 0) * (x.dim() - 3) + (0, length - x.shape[2]))


def in_blocks(x: Tensor, count: int, size: int) -> Tensor:
    """[B, H, N, ...] to [B, H, count, size, ...], cut or zero-padded."""
    if exporting():
        first = torch.arange(count, device=x.device) * size
        return _taken(x, first[:, None] + torch.arange(size, device=x.device))
    return fit_length(x, count * size).unflatten(2, (count, size))


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """What is exported serves every length, and nothing that is true of one may be settled: so no slice, no padding."""
    exists = (index < x.shape[2]).view(*index.shape, *(1,) * (x.dim() - 3))
    return x[:, :, index.clamp(max=x.shape[2] - 1)].where(exists, torch.zeros((), dtype=x.dtype, device=x.device))


def _bias_value(p: Problem) -> Tensor:
    assert p.key_bias is not None
    return p.key_bias.to(p.v.dtype).unsqueeze(-1).expand(-1, p.v.shape[1], -1, -1)


def _lay_out(x: Tensor, scale: int, grid: tuple[int, int] | None) -> tuple[Tensor, bool]:
    """[B, H, N, C] to [B, H, windows, places, C], zero-padded; and whether nothing had to be padded."""
    if grid is None:
        whole = not exporting() and x.shape[2] % scale == 0
        return in_blocks(x, (x.shape[2] + scale - 1) // scale, scale), whole
    x = x.unflatten(2, grid)
    below, right = -grid[0] % scale, -grid[1] % scale
    x = pad(x, (0, 0, 0, right, 0, below)) if below or right else x
    x = x.unflatten(2, (x.shape[2] // scale, scale)).unflatten(4, (x.shape[3] // scale, scale))
    return x.transpose(3, 4).flatten(4, 5).flatten(2, 3), not (below or right)


def _reduce(windows: Tensor, valid: Tensor | None, count: Tensor | None, how: str, kernel: Tensor | None) -> Tensor:
    """Reduce the places of [B, H, W, s, C]; valid and count are None when every place is taken."""
    places = windows.shape[3]
    if how == "max":
        if valid is None:
            return windows.amax(3)
        return windows.masked_fill(~valid, -torch.inf).amax(3).masked_fill(~valid.any(3), 0.0)
    if how == "conv" and kernel is not None:  # [H, s]
        windows = windows * (kernel.to(windows.dtype) * places)[:, None, :, None]
    if count is None:
        return windows.mean(3)
    total = windows.sum(3, dtype=_wide(windows)) if windows.dtype == torch.float16 else windows.sum(3)
    return (total / count).to(windows.dtype)


def _wide(x: Tensor) -> torch.dtype:
    """What is summed in: sums of 16 bits leave their range, or their precision, where their means do not."""
    return torch.promote_types(x.dtype, torch.float32)
