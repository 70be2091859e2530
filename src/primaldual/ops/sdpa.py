"""torch's fused attention, one call per distinct key length.

Softmax heads only: κ exponential, h the kernel sum. The last input map is applied to the queries alone, since row
constants cancel. A causal head pooled by s sees, at place t of its window, the complete windows before it and one
running mean: for each t that is an ordinary attention over 2⌈N/s⌉ keys, and the s of them run as one batch.

A sink is one more key, which is zero, as is its value: its score is log c. Both sides are mapped there, since the score
of a sink is no difference of scores, in which what is constant in a row cancels.

A bias on keys with a gradient (weights of points, norms of a Gaussian kernel) is no mask, of which there would be one
number for each score: it is more channels of the keys, where queries have ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from ..dual import GroupHeadsByScale, NormsOfKeysAreBias, Rewrite, form_of
from ..kernels.cudnn import attention as cudnn
from . import positions, softmax
from .pooling import CausalPool, fit_length
from .pooling import visible as visible_of
from .problem import Problem
from .softmax import CausalQueries, bias_of, one_sided, one_sided_causal, sink_of

CHANNEL = 16.0
"""What queries have in the channels of a bias in 16 bits."""

_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    if reason := softmax.refusal(
        problem, "fused attention", sinks=True, biases=True, distances=True
    ) or positions.refusal(problem):
        return reason
    if problem.is_causal and form_of(problem.primal).distance and max(problem.scales) > 1:
        return "what distances add to the scores of complete windows and running ones has no fused form"
    return None


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (*softmax.one_sided_rewrites(problem), NormsOfKeysAreBias, GroupHeadsByScale)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    return problem.by_group(lambda p: ((_causal if p.is_causal else _attend)(p), None))


def _attend(p: Problem) -> Tensor:
    q, points, take = one_sided(p)
    visible = visible_of(p)
    if visible is not None:
        take = visible[None, None] if take is None else take & visible
    out = _of_problem(p, q, points.keys, points.values, take, bias_of(p, points, take))
    return _keep_nan(out, q, p)


def _keep_nan(out: Tensor, q: Tensor, p: Problem) -> Tensor:
    """A key that is not a number makes the statistics so, and with them every mapped query and its output.

    torch's kernel for CPUs gives zeros for such a query where there are fewer than 16 keys.
    """
    if q.device.type != "cpu" or p.expansion.query_map is None:
        return out
    return out.masked_fill(q.isnan().any(-1, keepdim=True), torch.nan)


def _causal(p: Problem) -> Tensor:
    queries, points = one_sided_causal(p)
    prefix, windows = queries.prefix.shape[2], points.keys.shape[2]
    visible = visible_of(p, queries.start)
    if visible is not None:
        visible = fit_length(visible[None, None].transpose(2, 3), prefix + windows).transpose(2, 3)[0, 0]  # [·, P + W]
    if form_of(p.primal).distance:  # of tokens
        out = _tokens(p, queries, points, visible)
    else:
        out = _by_place(p, queries, points, visible)
    if not prefix:
        return _keep_nan(queries.of_problem(out, p), queries.of_problem(queries.rows.flatten(2, 3), p), p)
    head = points.prefix
    take = torch.ones(prefix, prefix, dtype=torch.bool, device=p.q.device).tril()[None, None]
    take = take if head.seen is None else take & head.seen.unsqueeze(2)
    take = take if visible is None else take & visible[:prefix, :prefix]
    bias = None if head.bias is None else head.bias.unsqueeze(2)
    alone = _of_problem(p, queries.prefix, head.keys, head.values, take, bias)
    mapped = torch.cat([queries.prefix, queries.rows.flatten(2, 3)], dim=2)
    return _keep_nan(queries.of_problem(torch.cat([alone, out], dim=2), p), queries.of_problem(mapped, p), p)


def _by_place(p: Problem, queries: CausalQueries, points: CausalPool, visible: Tensor | None) -> Tensor:
    """Outputs [B, H, (W − skipped)·s, Dv]: places fold into the batch."""
    q, skipped = queries.rows, queries.skipped
    batch, _, rows, scale, _ = q.shape
    windows, prefix = points.keys.shape[2], points.prefix.keys.shape[2]
    if scale == 1:
        return _tokens(p, queries, points, visible)

    def by_place(x: Tensor) -> Tensor:  # [B, H, W, s, ...] to [B·s, H, W, ...]
        return x.movedim(3, 1).flatten(0, 1)

    def keys_of(head: Tensor, running: Tensor) -> Tensor:  # prefix, complete windows, running means
        complete = torch.cat([head.expand(*running.shape[:2], *head.shape[2:]), running[:, :, :, -1]], dim=2)
        shared = complete.unsqueeze(1).expand(-1, scale, *complete.shape[1:]).flatten(0, 1)
        return torch.cat([shared, by_place(running)], dim=2)

    earlier = torch.ones(rows, windows, dtype=torch.bool, device=q.device).tril(skipped - 1)
    own = torch.eye(windows, dtype=torch.bool, device=q.device)[skipped:]
    take = torch.cat([own.new_ones(rows, prefix), earlier, own], dim=1)[None]  # [1, rows, P + 2W]
    if visible is not None:  # [·, P + W] to [s, rows, P + W]; a query's own window is the running one
        shown = fit_length(visible[None, None, prefix:], rows * scale)[0, 0].unflatten(0, (rows, scale))
        shown = shown.transpose(0, 1)
        take = take & torch.cat([shown, shown[:, :, prefix:]], dim=2)
    take = take.expand(scale, -1, -1).repeat(batch, 1, 1).unsqueeze(1)  # [B·s, 1, rows, P + 2W]
    if points.seen is not None:
        assert points.prefix.seen is not None
        head_seen, running_seen = (
            x.unsqueeze(-1).expand(batch, *x.shape[1:], -1) for x in (points.prefix.seen, points.seen)
        )
        take = take & keys_of(head_seen, running_seen).squeeze(-1).unsqueeze(2)
    bias = None
    if points.bias is not None:
        assert points.prefix.bias is not None
        head_bias, running_bias = points.prefix.bias.unsqueeze(-1), points.bias.unsqueeze(-1)
        bias = keys_of(head_bias, running_bias).squeeze(-1).unsqueeze(2)
    keys, values = keys_of(points.prefix.keys, points.keys), keys_of(points.prefix.values, points.values)
    out = _of_problem(p, by_place(q), keys, values, take, bias)
    return out.unflatten(0, (batch, scale)).movedim(1, 3).flatten(2, 3)


def _tokens(p: Problem, queries: CausalQueries, points: CausalPool, visible: Tensor | None) -> Tensor:
    """Plain causal attention: every window is one token."""
    q, keys, values = (x.squeeze(3) for x in (queries.rows, points.keys, points.values))
    sink, distance = sink_of(p), form_of(p.primal).distance
    if points.seen is None and points.bias is None and visible is None and not distance:
        if not queries.skipped and sink is None:
            return _fused(q, keys, values, dropout_p=p.dropout_p, is_causal=True, scale=p.score_scale)
        if q.shape[2] == 1:  # a step of decoding sees every key
            return _of_problem(p, q, keys, values, None, None)
    if points.seen is None and visible is None and not queries.skipped and not distance:
        return _triangle(q, keys, values, points.bias, p.dropout_p, p.score_scale, sink)
    take = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device).tril(queries.skipped)[None, None]
    take = take if points.seen is None else take & points.seen.squeeze(3).unsqueeze(2)
    take = take if visible is None else take & visible
    bias = None if points.bias is None else points.bias.squeeze(3).unsqueeze(2)
    if distance:
        places = torch.arange(keys.shape[2], device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        distances = positions.added(p, places[None, None, None], take)
        bias = distances if bias is None else bias + distances
    return _of_problem(p, q, keys, values, take, bias)


def _of_problem(p: Problem, q: Tensor, k: Tensor, v: Tensor, take: Tensor | None, bias: Tensor | None) -> Tensor:
    """`fused` as the problem says; what a kernel adds to the scores of keys goes into channels, where it can."""
    sink = sink_of(p)
    adds = p.log_weights is not None or p.expansion.biased_by_norms or sink is not None
    channels = adds and (bias is None or bias.shape[2] == 1)
    return fused(q, k, v, take, bias, p.dropout_p, p.score_scale, sink, channels)


def _triangle(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, scale: float | None, sink: Tensor | None
) -> Tensor:
    """Query i sees keys 0 … i, whose bias [B or 1, H or 1, N, 1] is in more channels; a sink is a key before them."""
    bias = q.new_zeros(1, 1, k.shape[2], 1) if bias is None else bias
    if sink is not None:  # and a query before the others, which is thrown away
        rows = torch.broadcast_shapes((*bias.shape[:2], 1), sink.shape[:2])
        first, bias = sink.to(bias.dtype).expand(rows[0], rows[1], 1, 1), bias.expand(rows[0], rows[1], -1, -1)
        q, k, v, bias = *(pad(x, (0, 0, 1, 0)) for x in (q, k, v)), torch.cat([first, bias], 2)
    q, k, padded, scale = _in_channels(q, k, v, bias.transpose(2, 3), scale)
    out = _fused(q, k, padded, dropout_p=dropout_p, is_causal=True, scale=scale)[..., : v.shape[-1]]
    return out if sink is None else out[:, :, 1:]


def fused(
    q: Tensor, k: Tensor, v: Tensor, take: Tensor | None, bias: Tensor | None, dropout_p: float, scale: float | None,
    sink: Tensor | None = None, channels: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention, with zeros and zero gradients where a row sees no key. `take` keeps where True.

    `sink` is the score of one more key, whose value is zero. `channels`: the bias goes into these.
    """
    if sink is not None:
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        take = None if take is None else pad(take, (0, 1), value=True)
        bias = q.new_zeros(1, 1, 1, k.shape[2] - 1) if bias is None else bias
        rows = torch.broadcast_shapes(bias.shape[:3], sink.shape[:2])
        bias = torch.cat([bias.expand(*rows, -1), sink.to(bias.dtype).expand(*rows, 1)], -1)
    if bias is not None and channels:
        q, k, padded, scale = _in_channels(q, k, v, bias, scale)
        return fused(q, k, padded, take, None, dropout_p, scale)[..., : v.shape[-1]]
    if take is None:
        mask = None if bias is None else bias.to(q.dtype)
        return _fused(q, k, v, attn_mask=_full(mask, q, k), dropout_p=dropout_p, scale=scale)
    empty = ~take.any(-1, keepdim=True)
    mask = take | empty  # such a row may see everything: its output is thrown away
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
    elif q.is_cuda:
        mask = _additive(mask, q)
    out = _fused(q, k, v, attn_mask=_full(mask, q, k), dropout_p=dropout_p, scale=scale)
    return out.masked_fill(empty, 0.0)


def _in_channels(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries and keys with more channels, whose products are b_j: s·(q·k_j + 1·b_j/s), s the factor on the scores.

    In 16 bits b/s is the sum of three numbers, so that no more of it is lost than in float32; and a multiple of it, so
    that it is in float16's range. Values are as wide as queries again, where they were: kernels for CPUs want that.
    """
    dtype, device = q.dtype, q.device.type
    if dtype != torch.float64 and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # to which fused attention casts
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    short, largest = dtype.itemsize == 2, torch.finfo(dtype).max / 2
    wanted = (bias.squeeze(2) / (scale * (CHANNEL if short else 1.0))).clamp(-largest, largest)
    parts = [wanted.to(dtype)]  # which has the gradient
    for _ in range(2 if short else 0):
        parts.append((wanted.detach() - sum(part.detach().to(wanted.dtype) for part in parts)).to(dtype))
    width = 8 if short else 4 if q.is_cuda else 1  # rows of 16 bytes, as kernels want them
    of_keys = pad(torch.stack(parts, -1).to(k.dtype), (0, width - len(parts))).expand(*k.shape[:3], -1)
    factors = q.new_full((len(parts),), CHANNEL if short else 1.0)
    of_queries = pad(factors, (0, width - len(parts))).expand(*q.shape[:3], -1)
    wide = v if q.is_cuda or v.shape[-1] != q.shape[-1] else pad(v, (0, width))
    return torch.cat([q, of_queries], -1), torch.cat([k, of_keys], -1), wide, scale


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """scaled_dot_product_attention, past what is wrong with cuDNN's backward pass.

    torch keeps its plan by the strides of q, k and v, although the plan holds those of the gradient too: of two calls
    that differ in them alone, the second would read memory that is not its own. So the gradient is made to come in as
    the output lies in memory. And some calls are left to others (`cudnn.left_to_others`).
    """
    masked, dropout_p = options.get("attn_mask") is not None, options.get("dropout_p", 0.0)
    others = cudnn.left_to_others(q, k, v, masked, dropout_p)
    with sdpa_kernel(_NOT_CUDNN) if others else nullcontext():
        out = scaled_dot_product_attention(q, k, v, **options)
    if (
        out.is_cuda
        and out.requires_grad
        and not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    ):
        out.register_hook(partial(_laid_out, out.stride()))
    return out


def _laid_out(strides: tuple[int, ...], x: Tensor) -> Tensor:
    return (
        x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    )


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    """0 and −inf at q's dtype, rows 16 bytes apart: torch takes it as it is, one for all heads, and makes no copy."""
    columns = mask.shape[-1]
    wide = pad(mask, (0, -columns % 8)) if columns % 8 else mask
    return torch.where(wide, q.new_zeros(()), -torch.inf)[..., :columns]


def _full(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:2], q.shape[2], k.shape[2])
