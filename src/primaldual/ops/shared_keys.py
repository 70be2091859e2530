"""Grouped queries, brought into a form in which every executor computes them: as many query heads as key heads.

    out^h_i = Σ_{j∈S_g} κ(T q^h_i, T k^g_j) v^g_j / h(T q^h_i),   g = ⌊h / r⌋

Where neither a query's place nor its head matters to its sum, the r heads of a group are one head with r times as
many queries: nothing is repeated, keys are pooled, mapped and read once for a group, and their gradients come out
summed. Otherwise (causal heads, patterns, masks for each query, numbers of each query head) keys and values are
repeated for the heads of a group: B·S·(D + Dv) elements are read for every key/value head and written for every query
head, and the other way round for their gradients. A single causal query that sees every key, a step of decoding, is of
the first kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..dual import Expansion, form_of
from ..primal import (
    BatchNorm,
    EluPlusOne,
    Exponential,
    KernelSum,
    PointMap,
    Primal,
    RandomFeatures,
    Recenter,
    RmsNorm,
    Taylor,
    Unit,
)
from ..primal.shared_keys import of_keys, of_queries

if TYPE_CHECKING:
    from .problem import Problem


def with_as_many_heads(p: Problem, kv_heads: int) -> Problem:
    """A problem whose keys have fewer heads than its queries, as one where they are equally many."""
    if p.is_causal and not torch.compiler.is_exporting() and p.q.shape[2] == 1 and p.query_offset + 1 >= p.k.shape[2]:
        p = replace(p, is_causal=False)
    return _repeated(p, kv_heads) if _refusal(p, kv_heads) else _folded(p, kv_heads)


def fold(q: Tensor, kv_heads: int) -> Tensor:
    """The queries of a group one after the other: [B, H, L, D] to [B, kv_heads, r·L, D]."""
    return q.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def unfold(x: Tensor, each: int) -> Tensor:
    """The other way, of outputs or weights."""
    return x.unflatten(2, (each, -1)).flatten(1, 2)


def repeat(x: Tensor, each: int) -> Tensor:
    """Keys or values of every query head: [B, kv_heads, S, D] to [B, H, S, D]."""
    return x.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2).contiguous()


def repeat_learned(
    primal: Primal, parameters: Mapping[str, Tensor], heads: int, kv_heads: int, head_dim: int
) -> dict[str, Tensor]:
    """What is learned for each key/value head, for each query head."""
    every = replace(primal, training_set=of_queries(primal.training_set, heads, kv_heads))
    return written_out(parameters, primal.learned(heads, head_dim, kv_heads), every.learned(heads, head_dim))


def written_out(
    parameters: Mapping[str, Tensor], few: Mapping[str, Tensor], many: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What has the shapes of `few`, those of some heads, with those of `many`: each head's for all of its group."""
    found = dict(parameters)
    for name in few.keys() & found.keys():
        for dim, (one, all_) in enumerate(zip(few[name].shape, many[name].shape, strict=True)):
            if one != all_:
                found[name] = found[name].repeat_interleave(all_ // one, dim)
    return found


def _refusal(p: Problem, kv_heads: int) -> str | None:
    """Why the queries of a group are not to be taken for those of one head; None where they are."""
    primal, form = p.primal, form_of(p.primal)
    if p.is_causal or p.attn_hidden is not None or p.attn_bias is not None:
        return "each query has its own keys"
    if form.subset != "all" or form.points == "own":
        return "points may depend on places of queries"
    if primal.normalizer not in _NORMALIZERS or any(getattr(primal, n) != x for n, x in _UNKNOWN.items()):
        return "it says more than is known here"
    if type(primal.features) not in _FEATURES:
        return "features may depend on the head"
    if any(not _same_for_heads(map_) for map_ in primal.point_maps):
        return "input maps may depend on the head"
    if not p.parameters.keys() <= {*primal.learned(p.q.shape[1], p.q.shape[3], kv_heads), *primal.features.fixed}:
        return "there are tensors that are not known here"
    return None


_FEATURES, _NORMALIZERS = (Exponential, EluPlusOne, RandomFeatures, Taylor), (KernelSum(), Unit())
_KNOWN = {"features", "normalizer", "inputs", "training_set", "bias", "residual"}
_UNKNOWN = {f.name: getattr(Primal(), f.name) for f in fields(Primal) if f.name not in _KNOWN}
"""What else a primal may say, and what it says where it says nothing."""


def _same_for_heads(map_: PointMap) -> bool:
    return type(map_) is RmsNorm or (type(map_) in (Recenter, BatchNorm) and not map_.learned(1, 1))


def _folded(p: Problem, kv_heads: int) -> Problem:
    heads, queries = p.q.shape[1:3]
    stated = p.expansion.primal
    primal = replace(stated, training_set=of_keys(stated.training_set, heads, kv_heads))
    copied = p.copied
    if p.q.stride(1) != queries * p.q.stride(2):
        copied += 2 * p.q.numel() * p.q.dtype.itemsize
    return replace(
        p, expansion=Expansion(primal), q=fold(p.q, kv_heads), group=heads // kv_heads, copied=copied
    )  # fmt: skip


def _repeated(p: Problem, kv_heads: int) -> Problem:
    heads = p.q.shape[1]
    each = heads // kv_heads
    stated = p.expansion.primal
    primal = replace(stated, training_set=of_queries(stated.training_set, heads, kv_heads))
    k, v = (repeat(x, each) for x in (p.k, p.v))
    copied = p.copied + (1 + each) * (p.k.numel() + p.v.numel()) * p.k.dtype.itemsize
    return replace(
        p, expansion=Expansion(primal), k=k, v=v, copied=copied,
        log_weights=None if p.log_weights is None else p.log_weights.repeat_interleave(each, 1),
        parameters=repeat_learned(p.primal, p.parameters, heads, kv_heads, p.q.shape[3]),
    )  # fmt: skip
