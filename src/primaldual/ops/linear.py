"""Re-associated attention for a finite Φ: O(N), and causal in chunks.

    out_i = Φ(Tq_i)ᵀ (Σ_j Φ(Tk_j) v_jᵀ) / h(Tq_i)

Causal: query i, at place t of window w, sums over the windows before w and the running mean of its own. The windows
before come as the state of all earlier chunks and a small dense product inside its own chunk.

On a GPU elu + 1 and random features run in the kernels of `kernels.linear`, which read every tensor once.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from ..dual import GroupHeadsByScale, Reassociate, Rewrite, form_of
from ..dual.form import is_affine, is_kernel_sum, kernel_of
from ..kernels.launching import exporting
from ..kernels.linear import limits
from ..primal import Moments, Polynomial
from .pooling import Pool, causal_pool, fit_length, in_blocks, pool, relative
from .problem import Problem, accumulated, require
from .statistics import moments

CHUNK = 64
"""Windows per chunk of the causal form."""


def refusal(problem: Problem) -> str | None:
    """Why this executor cannot compute the problem; None when it can."""
    if reason := Reassociate.refusal(problem.primal):
        return reason
    features = problem.primal.features
    if type(features) is Polynomial and (reason := features.refusal(problem.q.shape[-1])):
        return reason
    if problem.attn_hidden is not None:
        return "an attn_mask gives every query its own keys, so the sum does not re-associate"
    if problem.is_causal and form_of(problem.primal).points == "own":
        return f"only {problem.primal.training_set!r} knows its points where every query has its own keys"
    if problem.is_causal and problem.log_weights is not None:
        return "weights are taken relative to the largest that a query sees, which changes from row to row"
    if problem.need_weights:
        return "the re-associated form has no weights"
    return None


def rewrites(problem: Problem) -> tuple[type[Rewrite], ...]:
    """The identities that this executor makes use of."""
    return (Reassociate, GroupHeadsByScale)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, L, Dv]; no weights."""
    require(problem.expansion, Reassociate)
    if problem.is_causal and problem.query_offset:  # the sums of all tokens before the first query are needed anyway
        start = pad(problem.q, (0, 0, problem.query_offset, 0))
        out, _ = run(replace(problem, q=start, query_offset=0))
        return out[:, :, problem.query_offset :], None
    return problem.by_group(_attend_group)


def _attend_group(p: Problem) -> tuple[Tensor, Tensor | None]:
    """The kernels accumulate in float32; torch's products would round their sums."""
    if _has_kernel(p) and (p.scale == 1 or not p.is_causal):
        return _fused(p, _seen_by_queries(p) if p.is_causal else _points(p)), None
    return accumulated(p, lambda p: ((_causal if p.is_causal else _attend)(p), None))


def _seen_by_queries(p: Problem) -> Pool:
    """Keys up to the last query; no later one is seen."""
    seen = None if p.key_hidden is None else ~p.key_hidden
    return Pool(*(None if x is None else x[:, :, : p.q.shape[2]] for x in (p.k, p.v, seen, p.key_bias)))  # type: ignore[arg-type]


def _points(p: Problem) -> Pool:
    """Those that every query sees; weights relative to the largest, which h cancels."""
    points = pool(p)
    if p.log_weights is None or points.bias is None:
        return points
    return points._replace(bias=relative(points.bias, points.seen))


def _features(p: Problem, x: Tensor) -> Tensor:
    """Φ of mapped queries or keys; half of a scale that was asked for lies on either."""
    x = x if p.relative_scale == 1.0 else x * math.sqrt(p.relative_scale)
    return p.primal.features.map(x, p.parameters)


def _attend(p: Problem) -> Tensor:
    points = _points(p)
    q, keys = p.q, points.keys
    for map_ in p.primal.point_maps:
        found = moments(map_, keys, points.seen)
        q, keys = map_.apply(q, found, p.parameters), map_.apply(keys, found, p.parameters)
    phi_k = _weigh(_features(p, keys), points.seen, points.bias)
    total, kernel_sum = Reassociate.expand(_features(p, q), phi_k, points.values)
    sees = None if points.seen is None else points.seen.any(-1)[:, :, None, None]
    return _finish(p, q, total, kernel_sum, sees)


def _causal(p: Problem) -> Tensor:
    points = causal_pool(p)
    prefix, windows, scale = points.prefix.keys.shape[2], points.keys.shape[2], p.scale
    none = Moments(None, None)
    first_k, running_k, q = points.prefix.keys, points.keys, p.q
    for map_ in p.primal.point_maps:  # causal maps need no statistics here
        q, first_k, running_k = (map_.apply(x, none, p.parameters) for x in (q, first_k, running_k))

    phi_q = _features(p, q)
    rest = in_blocks(phi_q[:, :, prefix:], windows, scale)
    phi_running = _weigh(_features(p, running_k), points.seen, points.bias)
    phi_first = _weigh(_features(p, first_k), points.prefix.seen, points.prefix.bias)
    # one more value, 1, makes the kernel sum come out beside the sum
    values, first_values = _with_one(points.values), _with_one(points.prefix.values)
    start = phi_first.transpose(-1, -2) @ first_values
    sums = fit_length(_chunked(rest, phi_running, values, start).flatten(2, 3), q.shape[2] - prefix)
    if prefix:
        alone = _chunked(
            phi_q[:, :, :prefix].unsqueeze(3),
            phi_first.unsqueeze(3),
            first_values.unsqueeze(3),
            torch.zeros_like(start),
        )
        sums = torch.cat([alone.flatten(2, 3), sums], dim=2)
    sees = None
    if points.seen is not None:
        shown = points.seen.flatten(2, 3)
        if prefix:
            assert points.prefix.seen is not None
            shown = torch.cat([points.prefix.seen, shown], dim=2)
        sees = fit_length((shown.cumsum(2) > 0).unsqueeze(3), q.shape[2])
    return _finish(p, q, sums[..., :-1], sums[..., -1:], sees)


def _has_kernel(p: Problem) -> bool:
    """Whether the kernels of `kernels.linear` compute this."""
    features, projection = p.primal.features, p.parameters.get("projection")
    if not is_kernel_sum(p.primal.normalizer):
        return False
    if kernel_of(features) not in ("elu + 1", "random features") or (
        projection is not None and projection.requires_grad
    ):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # they have no rule for vmap and its kin
        return False
    if p.relative_scale != 1.0:
        return False
    dim, value_dim = p.q.shape[-1], p.v.shape[-1]
    return limits.refusal(p.q.dtype, p.q.device, p.is_causal, dim, features.dim(dim), value_dim) is None


def _fused(p: Problem, points: Pool) -> Tensor:
    from ..kernels.linear.attention import linear_attention

    q, keys, values = p.q, points.keys, points.values
    shift = scale = omega = weight = None
    for i, map_ in enumerate(p.primal.point_maps):
        found = moments(map_, keys, points.seen)
        last = i == len(p.primal.point_maps) - 1
        form = map_.affine(found, p.parameters) if last and is_affine(map_) else None
        if form is None:
            q, keys = map_.apply(q, found, p.parameters), map_.apply(keys, found, p.parameters)
        else:  # the last map is applied where the points are read
            shape = (*q.shape[:2], q.shape[3])
            shift = form[0].float().squeeze(2).expand(shape).contiguous()
            scale = torch.ones_like(shift) if form[1] is None else form[1].float().squeeze(2).expand(shape).contiguous()
    if points.bias is not None:
        weight = points.bias.float().exp()
    if points.seen is not None:
        weight = points.seen.float() if weight is None else weight.where(points.seen, 0.0)
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, keys, values = (x.to(torch.get_autocast_dtype(device)) for x in (q, keys, values))
    if kernel_of(p.primal.features) == "random features":
        omega = (p.parameters["projection"] / q.shape[-1] ** 0.25).to(q).contiguous()
    out, _ = linear_attention(q, keys, values, shift, scale, omega, weight, p.is_causal)
    return dropout(out, p.dropout_p)


def _chunked(phi_q: Tensor, phi_k: Tensor, values: Tensor, start: Tensor) -> Tensor:
    """Σ over earlier windows plus the running one: [B, H, W, s, F], same, [B, H, W, s, C], [B, H, F, C]."""
    windows = phi_q.shape[2]
    own = (phi_q * phi_k).sum(-1, keepdim=True) * values
    blocks = (windows + CHUNK - 1) // CHUNK
    if exporting():  # whether there is one alone, here or before the last, would be settled for all
        blocks = windows // CHUNK + 3

    def chunks(x: Tensor) -> Tensor:  # [B, H, W, s, C] to [B, H, n, CHUNK, s, C]
        return in_blocks(x, blocks, CHUNK)

    q, k, v = (
        chunks(phi_q).flatten(3, 4),
        chunks(phi_k[:, :, :, -1:]).flatten(3, 4),
        chunks(values[:, :, :, -1:]).flatten(3, 4),
    )
    states = k.transpose(-1, -2) @ v  # [B, H, n, F, C]
    before = torch.cat([start.unsqueeze(2), states[:, :, :-1]], dim=2).cumsum(2)
    w = torch.arange(CHUNK, device=q.device)
    earlier = (w < w.repeat_interleave(phi_q.shape[3])[:, None]).to(q.dtype)
    inside = (q @ k.transpose(-1, -2) * earlier) @ v
    sums = fit_length((q @ before + inside).flatten(2, 3), windows * phi_q.shape[3])
    return sums.unflatten(2, phi_q.shape[2:4]) + own


def _weigh(phi: Tensor, seen: Tensor | None, bias: Tensor | None) -> Tensor:
    """Φ(k_j) times exp(bias_j), and zero where the point does not exist."""
    if bias is not None:
        phi = phi * bias.to(phi.dtype).exp().unsqueeze(-1)
    return phi if seen is None else phi.where(seen.unsqueeze(-1), 0.0)


def _with_one(values: Tensor) -> Tensor:
    return pad(values, (0, 1), value=1.0)


def _finish(p: Problem, q: Tensor, total: Tensor, kernel_sum: Tensor, sees: Tensor | None) -> Tensor:
    if sees is not None:  # before h, whose slope at zero may be infinite
        kernel_sum = torch.where(sees, kernel_sum, 1.0)
    h = p.primal.normalizer.at(q, kernel_sum, p.parameters)
    if sees is not None:
        h = torch.where(sees, h, 1.0)
    return dropout(total / h, p.dropout_p)
