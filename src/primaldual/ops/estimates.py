"""What an executor would take: FLOPs, bytes, launches and seconds, from a few numbers about the problem.

    device = max(FLOPs/rate, bytes/bandwidth) + launches·gap
    host   = launches·cost + what the executor does besides        (a captured graph and a CPU: none)
    seconds = max(device, host)

A row of queries costs as many keys as it has plus `row`, in heads no narrower than `narrowest`. Everything measured
stands in `devices.py`; `tests/ops/test_estimates.py` holds them against the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..dual import form_of
from ..kernels.cudnn import attention as cudnn
from ..kernels.native import library as native
from ..kernels.ragged import limits
from ..primal.features import FeatureMap
from . import block_sparse, linear, mixed, softmax
from .devices import Device, device_of
from .problem import Problem

TRAINING = 3.5
"""Forward and backward over forward: FLOPs of attention, and the host's work."""

WITHOUT_CUDNN = 1.6
"""How much longer a group of heads takes where cuDNN is not to be trusted, and flash runs: 1152 and 576, batch 80."""

TRAINING_BYTES = 3.0
"""The same of what moves: four tensors, then eight."""


class Sizes(NamedTuple):
    """What an estimate depends on."""

    device: Device
    dtype: torch.dtype
    batch: int
    queries: int
    tokens: int
    head_dim: int
    value_dim: int
    groups: tuple[tuple[int, int, int], ...]  # scale, heads, points of each distinct scale
    backward: bool
    captured: bool  # into a graph, or compiled: the host's work is done once
    dropout: bool = False
    causal: bool = False
    masked: bool = False  # pairs are hidden by something beside is_causal
    maps: int = 0  # input maps that need the points
    inside: bool = True  # sdpa and ragged pool and map in kernels of their own
    compiled: bool = False  # ragged is launched by C++
    features: int = 0  # D_φ where Φ is finite
    kernel: bool = False  # linear attention has its own kernels
    pieces: int = 0  # of the sparse patterns of all groups
    piece_flops: int = 0  # forward
    plain: bool = False  # pieces run in plain torch on a GPU, where every operation writes its scores
    weights: bool = False  # they are asked for
    own_points: bool = False  # by the formula each query has its own, as pooled or mapped by statistics
    own_keys: bool = False  # and nothing cancels, so that it has them in every form
    long: int = 0  # groups that go back through cuDNN's kernels beside ours, in `mixed`
    copied: int = 0  # bytes that are moved before the attention, where query heads share keys

    @property
    def heads(self) -> int:
        """Heads of all groups."""
        return sum(heads for _, heads, _ in self.groups)

    @property
    def pooled(self) -> int:
        """Groups that are pooled."""
        return sum(scale > 1 for scale, _, _ in self.groups)

    @property
    def points(self) -> int:
        """Points of all heads."""
        return sum(heads * points for _, heads, points in self.groups)


class Estimate(NamedTuple):
    """Counted operations, and the seconds that they take on the device and keep the host."""

    flops: float
    bytes: float
    launches: int
    device: float
    host: float

    @property
    def seconds(self) -> float:
        """The longer of the two: they run side by side."""
        return max(self.device, self.host)


def sizes_of(problem: Problem, backward: bool, captured: bool) -> Sizes:
    """The numbers that the estimates of a problem depend on."""
    primal, q = problem.primal, problem.q
    training_set, features, form = primal.training_set, primal.features, form_of(primal)
    batch, _, queries, dim = q.shape
    tokens, scales = problem.k.shape[2], problem.scales
    groups = tuple(
        (scale, scales.count(scale), training_set.points(scale, tokens) if scale > 1 else tokens)
        for scale in sorted(set(scales))
    )
    maps, scaled = primal.point_maps, groups[-1][0] > 1
    subset, masked = form.subset != "all", problem.key_hidden is not None or problem.attn_hidden is not None
    running = limits.takes_running_means(problem.scales, queries, tokens)
    finite, known = features.finite, type(features).dim is not FeatureMap.dim
    kept = (
        block_sparse.estimate(problem) if form.subset == "pattern" and form.softmax and form.points != "own" else None
    )
    return Sizes(
        device_of(q.device), q.dtype, batch, queries, tokens, dim, problem.v.shape[-1], groups, backward, captured,
        compiled=q.is_cuda and not torch.compiler.is_compiling() and native.library() is not None,
        dropout=problem.dropout_p > 0,
        causal=problem.is_causal,
        masked=masked or subset or form.distance,
        maps=len(maps),
        inside=(form.simple or (form.softmax and not form.weighted and form.maps != "other" and not scaled))
        and not masked
        and not (problem.is_causal and (len(maps) > 0 or (scaled and not running))),
        features=(features.dim(dim) if known else dim) if finite else 0,
        kernel=finite and linear._has_kernel(problem),
        pieces=0 if kept is None else kept.pieces,
        piece_flops=0 if kept is None else kept.flops,
        plain=kept is not None and q.is_cuda and not block_sparse._flex_runs(problem),
        weights=problem.need_weights,
        own_points=(problem.is_causal or problem.attn_hidden is not None)
        and (scaled or any(map_.needs != "nothing" for map_ in maps)),
        own_keys=softmax.would_need_own_keys(problem) is not None,
        long=mixed.long_groups(problem),
        copied=problem.copied,
    )  # fmt: skip


def estimate(impl: str, sizes: Sizes) -> Estimate:
    """What an executor takes for these sizes; whether it can do it is not asked here."""
    return _total(sizes, _COUNTS[impl](sizes))


class _Count(NamedTuple):
    """Of the forward pass, but for `back`, the launches of the backward one."""

    efficiency: str
    flops: float
    bytes: float
    launches: int
    back: int
    parts: int = 0  # whatever the host goes through one by one
    busy: float | None = None  # FLOPs that the time is spent on, where more than those needed
    beside: float = 0.0  # bytes of passes that input maps make over queries and keys, before the attention and after it


def _total(sizes: Sizes, count: _Count) -> Estimate:
    device, efficiency = sizes.device, sizes.device.efficiencies[count.efficiency]
    share = efficiency.share if sizes.backward else efficiency.forward or efficiency.share
    rate = share * device.rates.get(sizes.dtype, device.rates[torch.float32])
    more, more_bytes = (TRAINING, TRAINING_BYTES) if sizes.backward else (1.0, 1.0)
    launches = count.launches + (count.back if sizes.backward else 0)
    busy = (count.flops if count.busy is None else count.busy) * (efficiency.dropout if sizes.dropout else 1.0)
    busy *= efficiency.causal if sizes.causal and sizes.pooled else 1.0
    beside = (2.0 if sizes.backward else 1.0) * (count.beside + sizes.copied)
    on_device = max(more * busy / rate, more_bytes * count.bytes / (efficiency.bandwidth * device.bandwidth))
    on_device += beside / device.bandwidth + launches * device.gap
    host = 0.0
    if device.host and not sizes.captured:
        host = launches * device.host + (efficiency.call + efficiency.part * count.parts) * more / TRAINING
    return Estimate(more * count.flops, more_bytes * count.bytes + beside, launches, on_device, host)


def _attention(sizes: Sizes, keys: float, row: int = 0, narrowest: int = 0) -> float:
    """FLOPs of scoring and summing, where a query has so many keys in all of its heads together."""
    width = max(sizes.head_dim, narrowest) + max(sizes.value_dim, narrowest)
    return 2.0 * sizes.batch * sizes.queries * (keys + sizes.heads * row) * width


def _rows(sizes: Sizes) -> float:
    """Bytes of reading queries and points and writing the output; pooling reads the tokens and writes the points."""
    pooling = sum(heads * (sizes.tokens + points) for scale, heads, points in sizes.groups if scale > 1)
    rows = sizes.heads * sizes.queries + sizes.points + pooling
    return float(sizes.batch * rows * (sizes.head_dim + sizes.value_dim) * sizes.dtype.itemsize)


def _pass(sizes: Sizes) -> float:
    """Bytes of reading all queries, or writing them."""
    return float(sizes.batch * sizes.heads * sizes.queries * sizes.head_dim * sizes.dtype.itemsize)


def _mixed(sizes: Sizes) -> _Count:
    """Ours forward; backward three kernels of cuDNN's for a long group and one that puts in place, beside ours.

    Causal heads over the tokens themselves are cuDNN's both ways.

    Re-centring adds a sum over rows. Ours, and cuDNN's where it must, come after a copy of their log-sum-exps.
    """
    ours, efficiency = _ragged(sizes), sizes.device.efficiencies["mixed"]
    if not sizes.backward:
        return ours._replace(launches=ours.launches + 1)  # the same, and of equals ours is to be taken
    busy = _attention(sizes, sizes.points * (0.5 if sizes.causal else 1.0), efficiency.row, efficiency.narrowest)
    groups = len(sizes.groups)
    if sizes.causal:  # forward cuDNN's and a copy beside our two; three of its kernels and a copy beside our two, back
        return ours._replace(efficiency="mixed", launches=4, back=6 + (not cudnn.STRIDED), busy=busy)
    each = 4 + sizes.maps + (not cudnn.STRIDED)
    back = each * sizes.long + (ours.back + 1 if sizes.long < groups else 0)
    return ours._replace(efficiency="mixed", back=back, parts=groups, busy=busy)


def _sdpa(sizes: Sizes) -> _Count:
    """A kernel per scale forward and three backward. Beside it pooling, and with several scales putting in place."""
    groups, keys = len(sizes.groups), float(sizes.points)
    masked = sizes.masked or (sizes.causal and sizes.pooled > 0)
    if sizes.causal:  # pooled: complete windows and running means, under a mask
        alone = 1.0 if masked else 0.5
        keys = sum(heads * points * (2.0 if scale > 1 else alone) for scale, heads, points in sizes.groups)
    forward, back = groups + sizes.pooled, 3 * groups
    if groups > 1:
        forward, back = forward + groups, back + 3 * groups
    if masked:
        forward, back = forward + 4 * groups, back + groups
    if not sizes.inside or sizes.causal:
        forward, back = forward + 3 * sizes.pooled, back + 3 * sizes.pooled
    forward, back = forward + 3 * groups * sizes.maps, back + 4 * groups * sizes.maps
    name = "masked" if masked else "sdpa"
    efficiency = sizes.device.efficiencies[name]
    spent = keys
    if sizes.backward and sizes.device.host and sizes.dtype.itemsize == 2 and not masked:
        odd = sum(heads * points for _, heads, points in sizes.groups if cudnn.wrong_gradients(points))
        spent += (WITHOUT_CUDNN - 1.0) * odd
    busy = _attention(sizes, spent, efficiency.row, efficiency.narrowest)
    parts, beside = groups if groups > 1 else 0, 3.0 * sizes.maps * _pass(sizes)
    return _Count(name, _attention(sizes, keys), _rows(sizes), forward, back, parts, busy, beside)


def _recentred(sizes: Sizes) -> _Count:
    """As `sdpa`, but for the operators of the re-centring, which are three launches fewer on the way back."""
    found = _sdpa(sizes)
    return found._replace(back=found.back - 3)


def _ragged(sizes: Sizes) -> _Count:
    """All heads in one launch forward, two backward, after one that pools; outside of these torch pools and joins.

    Re-centring adds a sum over rows each way, and backward a pass over the gradients of the keys.
    """
    name = "compiled" if sizes.compiled and sizes.inside and not sizes.pieces else "ragged"
    efficiency, keys = sizes.device.efficiencies[name], sizes.points * (0.5 if sizes.causal else 1.0)
    forward, back = 1 + (sizes.pooled > 0), 2
    if sizes.inside:
        forward, back = forward + sizes.maps, back + 2 * sizes.maps
    else:
        groups = len(sizes.groups)
        forward, back = forward + groups * (6 + 3 * sizes.maps), back + groups * (6 + 4 * sizes.maps)
    busy = _attention(sizes, keys, efficiency.row, efficiency.narrowest) * (efficiency.pattern if sizes.pieces else 1.0)
    beside = 2.5 * sizes.maps * _pass(sizes)
    return _Count(name, _attention(sizes, keys), _rows(sizes), forward, back, busy=busy, beside=beside)


def _block_sparse(sizes: Sizes) -> _Count:
    """An attention per piece, and the merge of their outputs in float32; in plain torch 40 passes over the scores."""
    merged = 4 * sizes.batch * sizes.heads * sizes.queries * sizes.value_dim * 3
    pieces, groups, flops = sizes.pieces, len(sizes.groups), float(sizes.piece_flops)
    moved = max(1.0, pieces / groups) * (_rows(sizes) + merged)
    if sizes.plain:
        moved += 40 * 4 * flops / (2 * (sizes.head_dim + sizes.value_dim))
        return _Count("pieces", flops, moved, 40 * pieces, 60 * pieces, pieces)
    narrowest = sizes.device.efficiencies["block_sparse"].narrowest
    wide = max(sizes.head_dim, narrowest) + max(sizes.value_dim, narrowest)
    busy = flops * wide / (sizes.head_dim + sizes.value_dim)
    return _Count("block_sparse", flops, moved, 6 * pieces, 10 * pieces, pieces, busy)


def _linear(sizes: Sizes) -> _Count:
    """Keys into a state, queries through it; without kernels Φ is written and read several times."""
    groups, F, C = len(sizes.groups), sizes.features, sizes.value_dim + 1
    rows = sizes.heads * sizes.queries
    flops = 2.0 * sizes.batch * (rows + sizes.points) * F * C
    if sizes.causal:  # keys once more, and a dense product inside each chunk
        flops += 2.0 * sizes.batch * rows * (F * C + linear.CHUNK * (F + C))
    moved = _rows(sizes) * (1.5 if sizes.causal else 1.0)
    if sizes.kernel:
        forward, back = 3, 5
    else:
        forward, back = 12, 20
        moved += 6.0 * sizes.batch * (rows + sizes.points) * F * sizes.dtype.itemsize
    forward, back = groups * (forward + 3 * sizes.maps), groups * (back + 4 * sizes.maps)
    return _Count("linear", flops, moved, forward + 2 * sizes.pooled, back + 2 * sizes.pooled, groups - 1)


def _dense(sizes: Sizes) -> _Count:
    """Scores are written, read and written again by the softmax, read; masks are three passes more, each two ways.

    The weights of pooled heads are spread over tokens, and heads put in order: eight passes over those."""
    groups = len(sizes.groups)
    per_query = sizes.batch * sizes.queries * sizes.dtype.itemsize
    spread = 8.0 * sizes.heads * sizes.tokens if sizes.weights and sizes.pooled else 0.0
    each_score = 10.0 if sizes.masked or sizes.causal else 4.0
    if sizes.own_keys:  # mapped key by key for every query, and Φ of them; on the way back once more
        again = 1.5 if sizes.backward else 1.0
        each_score += (4.0 * sizes.maps + 8.0 * (sizes.features > 0)) * sizes.head_dim * again
    moved = _rows(sizes) + per_query * (each_score * sizes.points + spread)
    each, beside = 8 + 3 * sizes.maps, 3.0 * sizes.maps * _pass(sizes)
    if sizes.causal:  # running sums of the keys, at twice their width
        beside *= 4.0
    flops = _attention(sizes, sizes.points)
    return _Count("dense", flops, moved, groups * each, 2 * groups * each, groups - 1, beside=beside)


def _reference(sizes: Sizes) -> _Count:
    """Every score is written and read about ten times; and all points, where each query has its own."""
    groups = len(sizes.groups)
    each_point = 10.0
    if sizes.own_points:
        each_point += 2.0 * (sizes.head_dim + sizes.value_dim) * (1 + sizes.maps)
        each_point += 2.0 * sizes.tokens if sizes.weights and sizes.pooled else 0.0
    scores = each_point * sizes.batch * sizes.queries * sizes.points * sizes.dtype.itemsize
    each = 15 + 5 * sizes.maps
    flops = _attention(sizes, sizes.points)
    return _Count("reference", flops, _rows(sizes) + scores, groups * each, 2 * groups * each, groups - 1)


_COUNTS: dict[str, Callable[[Sizes], _Count]] = {
    "linear": _linear,
    "block_sparse": _block_sparse,
    "recentred": _recentred,
    "sdpa": _sdpa,
    "ragged": _ragged,
    "mixed": _mixed,
    "dense": _dense,
    "reference": _reference,
}
