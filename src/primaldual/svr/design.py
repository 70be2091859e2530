"""From keys to the kernel matrix of the regression: K_ij = κ(Tk_i, Tk_j) / (h(k_i) h(k_j)), un-rewritten and symmetric.

For the exponential kernel everything is kept as logarithms until it has been scaled to order 1: trained heads reach
scores at which κ, h and C themselves leave float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..dual import GroupHeadsByScale, form_of
from ..dual.form import has_sink, knows_positions, pooling_of
from ..ops import per_token, positions
from ..ops.pooling import log_sum
from ..ops.statistics import moments
from ..primal import AllKeys, Gated, LogKernel, Primal, TrainingSet


class PerQueryError(ValueError):
    """Sparse and causal heads are one regression per query; name the query with `query=`."""


@dataclass(frozen=True)
class Design:
    """The training points of every problem. Problems are batch × heads; W is the most points a head has.

    kernel is scaled so that its largest diagonal entry is 1: K = kernel · exp(log_scale).
    """

    primal: Primal  # over the points themselves: token maps and pooling are done
    keys: Tensor  # [B, H, W, D], before T's point maps
    places: Tensor  # [B, H, W]: where they stand in the sequence
    targets: Tensor  # [B, H, W, Dv]
    seen: Tensor  # bool [B, H, W]: the points that exist, over which T's statistics are taken
    visible: Tensor  # bool [B, H, W]: those of the training set; fewer where a query has its own
    kernel: Tensor  # [B, H, W, W]; rows of points that are not there are zero
    log_scale: Tensor  # [B, H]
    log_h: Tensor  # [B, H, W]: log |h(k_j)|
    sign_h: Tensor  # [B, H, W]
    owner: Tensor  # [B, H, N]: the point that each token is part of, or the first of them
    shares: (
        Tensor | None
    )  # [B, H, W, N]: how points are sums of tokens; None where they are means, and no token is part of two
    parameters: Mapping[str, Tensor]
    log_w: Tensor | None = None  # [B, H, W]: log of the points' weights, the largest of a head 1; None where all are
    gate: Tensor | None = None  # [B, H, W]: g at the points; h is that without a gate, divided by it

    def mapped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """T x and T k: queries and keys through the point maps, with the statistics of the keys."""
        keys = self.keys
        for map_ in self.primal.point_maps:
            found = moments(map_, keys, self.seen)
            x, keys = map_.apply(x, found, self.parameters), map_.apply(keys, found, self.parameters)
        return x, keys

    def per_token(self, y: Tensor) -> Tensor:
        """Numbers of tokens that pool to these of points: [B, H, W, C] to [B, H, N, C]."""
        return unpool(y, self.owner, self.shares)

    def weights(self, x: Tensor, places: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """w_j κ(Tx_i, Tk_j) / h(Tx_i): [B, H, L, D] to [B, H, L, W], for points x at `places`, [L] or [B, H, L].

        Without `places` they stand at 0, 1, …; `gate` [B, H, L] is g at x, 1 where it is not given.
        """
        places = torch.arange(x.shape[2], device=x.device) if places is None else places
        weights = self._ungated(x, places)
        return weights if gate is None else weights * gate.unsqueeze(-1)

    def _ungated(self, x: Tensor, places: Tensor) -> Tensor:
        x, keys = self.mapped(x)
        take = self.visible.unsqueeze(2)
        added = log_positions(self.primal, places, self.places, self.parameters)
        form = form_of(self.primal)
        if form.log_kernel:
            assert isinstance(self.primal.features, LogKernel)
            scores = self.primal.features.log_kernel(x, keys) + added
            scores = scores if self.log_w is None else scores + self.log_w.unsqueeze(2)
            scores = scores.masked_fill(~take, -torch.inf)
            if form.kernel_sum or form.sink:
                log_h = _log_h(self.primal, scores.logsumexp(-1, keepdim=True), self.parameters)
                return (scores - log_h).exp().where(take.any(-1, keepdim=True), 0.0)
            kernel = scores.exp()
        else:
            kernel = self.primal.features.kernel(x, keys, self.parameters) * added.exp()
            kernel = kernel.masked_fill(~take, 0.0)
            kernel = kernel if self.log_w is None else kernel * self.log_w.exp().unsqueeze(2)
        weights = kernel / self.primal.normalizer.at(x, kernel.sum(-1, keepdim=True), self.parameters)
        return weights.where(take.any(-1, keepdim=True), 0.0)


def design(
    primal: Primal,
    keys: Tensor,
    targets: Tensor,
    key_padding_mask: Tensor | None,
    query: int | None,
    is_causal: bool,
    parameters: Mapping[str, Tensor] | None,
) -> Design:
    """Check, pool and map the keys [B, H, N, D] and targets [B, H, N, Dv], and form the kernel."""
    B, H, N, D = keys.shape
    per_query = is_causal or hides_points(primal.training_set, H, N)
    if per_query and query is None:
        kind = "causal" if is_causal else "sparse"
        raise PerQueryError(
            f"{kind} heads are one regression per query: each query has its own training set. Give query=i"
        )
    if not per_query and query is not None:
        raise PerQueryError("query= picks one of the regressions of a sparse or causal head; this head has only one")
    if query is not None and not 0 <= query < N:
        raise PerQueryError(f"query must be in [0, {N}), got {query}")
    if is_causal and (reason := primal.causal_refusal(H)):
        raise ValueError(f"is_causal=True: {reason}")
    given, of_tokens = per_token.divide(dict(parameters or {}), primal, keys, keys, targets)
    if isinstance(primal.normalizer, Gated) and primal.normalizer.per == "channel":
        raise ValueError(
            f"{primal.normalizer!r} gives each output a normalizer, and so a regression, of its own: state outputs as "
            f"heads, keys [..., heads · outputs, N, D] and one output each, with per='head'; `certify` does"
        )
    start = {n: x.to(keys) for n, x in (primal.features.state(D) | primal.learned(H, D)).items()}
    of_heads = {n: x.to(keys) for n, x in primal.features.of_heads(H).items()}
    given = start | given | of_heads
    exists = torch.ones(B, N, dtype=torch.bool, device=keys.device)
    if key_padding_mask is not None:
        if key_padding_mask.shape != (B, N) or key_padding_mask.dtype != torch.bool:
            raise ValueError(
                f"key_padding_mask must be boolean [batch, keys] = {[B, N]}, got {key_padding_mask.dtype} "
                f"{list(key_padding_mask.shape)}"
            )
        exists = ~key_padding_mask
    tokens = exists
    if is_causal:
        assert query is not None
        tokens = exists & (torch.arange(N, device=keys.device) <= query)
    hidden = ~exists[:, None, :, None]
    keys, targets = keys.masked_fill(hidden, 0.0), targets.masked_fill(hidden, 0.0)
    places = torch.arange(N, device=keys.device)
    for map_ in primal.token_maps:
        keys = map_.at(keys, places, given).masked_fill(hidden, 0.0)
    values, logit = targets, None
    if isinstance(primal.normalizer, Gated):
        logit = _logit_to_pool(primal, of_tokens["gate"])
        values = torch.cat([targets, logit.expand(B, H, N, 1)], -1)
    points, values, stand, seen, visible, owner, shares = _pool(primal, keys, values, tokens, query, given)
    gate = log_w = None
    if logit is not None:  # the gate of a mean of inputs: a logit is affine in the input
        values, gate = values[..., :-1], values[..., -1].sigmoid()
    if primal.weights is not None:
        of_points = primal.weights.log_weights(of_tokens, ~exists[:, None], N)
        log_w = _weights(primal, of_points.expand(B, H, N), keys, tokens, given)
        log_w = log_w - log_w.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        log_w = log_w.masked_fill(~visible, 0.0)
    inner = replace(
        primal.ungated, inputs=primal.point_maps, training_set=AllKeys(), bias=False, residual=False, weights=None
    )
    return _with_kernel(inner, points, values, stand, seen, visible, owner, shares, given, log_w, gate)


def _logit_to_pool(primal: Primal, gate: Tensor) -> Tensor:
    """log g/(1 − g) [B, H, N, 1], of which a pooled point has the mean."""
    pooled = pooling_of(primal.training_set)
    if pooled is not None and pooled.how not in ("mean", "kmeans"):
        raise ValueError(
            f"{pooled.how} pooling gives a point that is the projection of no input, so it has no gate: "
            f"{primal.normalizer!r} is a regression with mean pooling"
        )
    return gate.logit().unsqueeze(-1)


def _weights(primal: Primal, log_w: Tensor, keys: Tensor, tokens: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """log of the sum of the weights [B, H, N] of each point's tokens: [B, H, W]."""
    B, H, N, _ = keys.shape
    scales = primal.training_set.head_scales(H)
    found = keys.new_zeros(B, H, max(primal.training_set.points(s, N) for s in scales))
    for scale, heads in GroupHeadsByScale.groups(scales):
        index = torch.tensor(heads, device=keys.device)
        of = keys[:, index]
        share = primal.training_set.reduce(of, of, tokens[:, None, None], scale, parameters).share
        if share is None:
            place = primal.training_set.coordinate(torch.arange(N, device=keys.device), scale, N)
            share = one_hot(place, primal.training_set.points(scale, N)).T[None, None, None]
        member = (share.squeeze(2) > 0) & tokens[:, None, None]
        empty = ~member.any(-1)
        total = log_sum(log_w[:, index].unsqueeze(-2), member | empty.unsqueeze(-1)).masked_fill(empty, 0.0)
        found[:, index, : total.shape[-1]] = total
    return found


def log_positions(primal: Primal, x: Tensor, y: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """log of what positions multiply κ by, for points at x [L] or [B, H, L] and y [B, H, W]; zeros for nothing."""
    if not knows_positions(primal.features):
        return y.new_zeros(())
    found = primal.features.log_positions(x.to(y.dtype).unsqueeze(-1), y.unsqueeze(-2), parameters)
    assert found is not None
    return found


def hides_points(training_set: TrainingSet, heads: int, tokens: int) -> bool:
    """Whether some head has a training set of its own for each query."""
    scales, device = set(training_set.head_scales(heads)), torch.device("cpu")
    return any(training_set.visible(scale, 1, tokens, device) is not None for scale in scales)


def unpool(y: Tensor, owner: Tensor, shares: Tensor | None) -> Tensor:
    """Numbers of tokens that pool to these of points, by `owner` and `shares` as in `Design`: [.., W, C] to [.., N, C].

    Every token has its point's, where points are means of tokens that no other has; else the smallest numbers that do.
    """
    if shares is None:
        return y.gather(-2, owner.unsqueeze(-1).expand(*owner.shape, y.shape[-1]))
    tokens = torch.linalg.pinv(shares) @ y
    if not bool(((shares @ tokens - y).abs() <= 1e-9 * y.abs().amax()).all()):
        raise ValueError(
            "points with tokens in common are not independent of one another: there are more points than their tokens "
            "can give numbers of their own, so numbers per token do not follow from those of the points"
        )
    return tokens


def in_common(shares: Tensor) -> bool:
    """Whether some token [..., N] is part of several points [..., W, N]."""
    return bool(((shares != 0).sum(-2) > 1).any())


def are_means(shares: Tensor) -> bool:
    """Whether points [..., W, N] are means of tokens, and not other sums; some have no tokens."""
    total = shares.sum(-1)
    return bool((((total - 1).abs() < 1e-9) | (total == 0)).all())


def _pool(
    primal: Primal, keys: Tensor, targets: Tensor, tokens: Tensor, query: int | None, parameters: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Points of every head, padded to the longest; where they stand; which exist; which the query's set holds; `owner`
    and `shares`."""
    B, H, N, D = keys.shape
    scales = primal.training_set.head_scales(H)
    longest = max(primal.training_set.points(s, N) for s in scales)
    points, values = keys.new_zeros(B, H, longest, D), targets.new_zeros(B, H, longest, targets.shape[-1])
    seen = torch.zeros(B, H, longest, dtype=torch.bool, device=keys.device)
    visible, stand = torch.zeros_like(seen), keys.new_zeros(B, H, longest)
    owner = torch.zeros(B, H, N, dtype=torch.long, device=keys.device)
    shares = []
    for scale, heads in GroupHeadsByScale.groups(scales):
        index = torch.tensor(heads, device=keys.device)
        reduced = primal.training_set.reduce(
            keys[:, index], targets[:, index], tokens[:, None, None], scale, parameters
        )
        count = reduced.keys.shape[3]
        if knows_positions(primal.features):
            stand[:, index, :count] = positions.of_definition(
                primal.training_set, reduced, keys[:, index], targets[:, index], tokens[:, None, None], scale
            ).squeeze(2)
        points[:, index, :count] = reduced.keys.squeeze(2)
        values[:, index, :count] = reduced.values.squeeze(2)
        seen[:, index, :count] = reduced.seen.squeeze(2).expand(B, len(heads), -1)
        subset = primal.training_set.visible(scale, N, N, keys.device)
        visible[:, index, :count] = True if subset is None or query is None else subset[query]
        place = primal.training_set.coordinate(torch.arange(N, device=keys.device), scale, N)
        share = one_hot(place, count).T.to(keys.dtype) if reduced.share is None else reduced.share.squeeze(2)
        owner[:, index] = share.argmax(-2)
        shares.append((index, share))
    own = form_of(primal).points == "own"  # the library's are means
    if not own or all(are_means(share) and not in_common(share) for _, share in shares):
        return points, values, stand, seen, visible & seen, owner, None
    whole = keys.new_zeros(B, H, longest, N)
    for index, share in shares:
        whole[:, index, : share.shape[-2]] = share.expand(B, len(index), -1, -1)
    return points, values, stand, seen, visible & seen, owner, whole


def _log_h(primal: Primal, log_sum: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """log h, where h is the sum of the kernel, or that and a sink."""
    if not has_sink(primal.normalizer):
        return log_sum
    return torch.logaddexp(log_sum, primal.normalizer.log_sink(log_sum, parameters))


def _with_kernel(
    primal: Primal, keys: Tensor, targets: Tensor, places: Tensor, seen: Tensor, visible: Tensor, owner: Tensor,
    shares: Tensor | None, parameters: Mapping[str, Tensor], log_w: Tensor | None, gate: Tensor | None,
) -> Design:  # fmt: skip
    mapped = keys
    for map_ in primal.point_maps:  # statistics over all points of the head, not over the query's subset
        mapped = map_.apply(mapped, moments(map_, mapped, seen), parameters)
    pairs = visible.unsqueeze(-1) & visible.unsqueeze(-2)
    added = log_positions(primal, places, places, parameters)
    form = form_of(primal)
    if form.log_kernel:
        assert isinstance(primal.features, LogKernel)
        log_kernel = primal.features.log_kernel(mapped, mapped) + added
        log_kernel = ((log_kernel + log_kernel.transpose(-1, -2)) / 2).masked_fill(~pairs, -torch.inf)
        weighted = log_kernel if log_w is None else log_kernel + log_w.unsqueeze(-2)
        log_total = torch.logsumexp(weighted, -1, keepdim=True).masked_fill(~visible.unsqueeze(-1), 0.0)
        if form.kernel_sum or form.sink:
            log_h = _log_h(primal, log_total, parameters).squeeze(-1).masked_fill(~visible, 0.0)
            sign = torch.ones_like(log_h)
        else:
            h = primal.normalizer.at(mapped, log_total.exp(), parameters).squeeze(-1)
            log_h, sign = h.abs().log().masked_fill(~visible, 0.0), h.sign()
        log_h = log_h if gate is None else log_h - gate.log().masked_fill(~visible, 0.0)
        log_k = log_kernel - log_h.unsqueeze(-1) - log_h.unsqueeze(-2)
        signs = sign.unsqueeze(-1) * sign.unsqueeze(-2)
    else:
        kernel = (primal.features.kernel(mapped, mapped, parameters) * added.exp()).masked_fill(~pairs, 0.0)
        weighted = kernel if log_w is None else kernel * log_w.exp().unsqueeze(-2)
        h = primal.normalizer.at(mapped, weighted.sum(-1, keepdim=True), parameters).squeeze(-1)
        h = h if gate is None else h / gate
        log_h, sign = h.abs().log().masked_fill(~visible, 0.0), h.sign()
        log_k = kernel.abs().log() - log_h.unsqueeze(-1) - log_h.unsqueeze(-2)
        signs = kernel.sign() * sign.unsqueeze(-1) * sign.unsqueeze(-2)
    largest = log_k.diagonal(dim1=-2, dim2=-1).amax(-1)
    log_scale = torch.where(largest.isfinite(), largest, 0.0)
    scaled = signs * (log_k - log_scale[..., None, None]).exp()
    targets = targets.where(visible.unsqueeze(-1), 0.0)
    return Design(
        primal, keys, places, targets, seen, visible, scaled, log_scale, log_h, sign, owner, shares, parameters, log_w,
        gate,
    )  # fmt: skip
