"""One call of `attention`, checked once at the edge and brought into one form for every executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..base.suggestions import did_you_mean
from ..dual import Expansion, Rewrite, RowConstantsCancel
from ..dual.form import form_of, pooling_of
from ..kernels.kept import on_device
from ..primal import PointMap, Primal, TrainingSet
from ..primal.features import FeatureMap, Parameters
from ..primal.shared_keys import check_groups, of_queries
from . import checks, masks, per_token, shared_keys, token_maps
from .places import Places, Start, first_of, start_of


class UnsupportedError(ValueError):
    """The executor that was asked for cannot compute this; the message says why, and which one can."""


class CausalFormError(ValueError):
    """The mechanism has no causal form; the message says why."""


@dataclass(frozen=True)
class Problem:
    """An expansion, and the tensors that are bound to it: after the token maps, with every mask in one form.

    Hidden means True. Hidden keys and values are zero. On the heads of one group, `scale` is theirs. Keys are tokens
    0 … S − 1 of a sequence, queries tokens `query_offset` … `query_offset` + L − 1 of it.
    """

    expansion: Expansion
    q: Tensor  # [B, H, L, D]
    k: Tensor  # [B, H, S, D]
    v: Tensor  # [B, H, S, Dv]
    key_hidden: Tensor | None = None  # bool [B, 1, S]
    key_bias: Tensor | None = None  # [B, 1, S], finite
    attn_hidden: Tensor | None = None  # bool [B or 1, H or 1, L, S]
    attn_bias: Tensor | None = None  # [B or 1, H or 1, L, S], finite
    is_causal: bool = False
    dropout_p: float = 0.0
    parameters: Parameters = field(default_factory=dict)
    need_weights: bool = False
    repeat_weights: bool = False  # each token has the whole weight of its pooled point, not a share of it
    scale: int = 1
    query_offset: int = 0
    score_scale: float | None = None  # the factor on the scores; None for 1/√D
    log_weights: Tensor | None = None  # [B, H, S], of the tokens; those of a pooled point add up
    gate: Tensor | None = None  # [B, H, L, 1 or Dv], what the output is multiplied by; executors know nothing of it
    group: int = 1  # query heads whose queries each head holds, one head's after the other's
    start: Start | None = None  # how rows were rolled, so that all begin with their first valid token
    copied: int = 0  # bytes that were moved to bring rows, and groups of query heads, into this form

    def given_back(self, out: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Outputs and weights as the caller's queries and keys stand."""
        if self.group > 1:
            out, weights = (x if x is None else shared_keys.unfold(x, self.group) for x in (out, weights))  # type: ignore[assignment]
        if self.start is not None:
            out, weights = self.start.back(out), None if weights is None else self.start.weights_back(weights)
        return out, weights

    @property
    def primal(self) -> Primal:
        """What an executor computes: what was stated, but for a gate on the output."""
        return self.expansion.primal.ungated

    @property
    def token_bias(self) -> Tensor | None:
        """What is added to the scores of tokens that are points, [B or 1, H or 1, S]: log w, and that of a mask."""
        if self.log_weights is None or self.key_bias is None:
            return self.key_bias if self.log_weights is None else self.log_weights
        return self.log_weights + self.key_bias

    @property
    def relative_scale(self) -> float:
        """The factor on the scores, as a multiple of 1/√D."""
        return 1.0 if self.score_scale is None else self.score_scale * math.sqrt(self.q.shape[-1])

    def visible(self, first: int | None = None) -> Tensor | None:
        """Boolean [queries, points], what the training set shows to each query of this scale; None where that is all.

        The queries are the problem's, or those that stand from token `first` on.
        """
        end = self.query_offset + self.q.shape[2]
        shown = self.primal.training_set.visible(self.scale, end, self.k.shape[2], self.q.device)
        return shown if shown is None else shown[self.query_offset if first is None else first :]

    def seen_tokens(self) -> Tensor:
        """Boolean [B or 1, H or 1, L or 1, S]: the tokens that exist for each query; patterns are not looked at."""
        queries, tokens, device = self.q.shape[2], self.k.shape[2], self.q.device
        seen = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=device)
        if self.key_hidden is not None:
            seen = seen & ~self.key_hidden.unsqueeze(2)
        if self.attn_hidden is not None:
            seen = seen & ~self.attn_hidden
        if self.is_causal:
            i, j = torch.arange(queries, device=device) + self.query_offset, torch.arange(tokens, device=device)
            seen = seen & (j <= i[:, None])
        return seen

    def weights_refusal(self) -> str | None:
        """Why the weights that are asked for are not those of tokens; None where they are, or none are asked for."""
        pooled = pooling_of(self.primal.training_set)
        if self.need_weights and pooled and pooled.how in ("max", "conv") and any(s > 1 for s in self.scales):
            return f"{pooled.how} pooling has no weights over tokens"
        return None

    @property
    def scales(self) -> tuple[int, ...]:
        """The scale of every head."""
        return self.primal.training_set.head_scales(self.q.shape[1])

    def by_group(self, run: Callable[[Problem], tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
        """Run the heads of each call of the expansion, and put them back in order."""
        groups = self.expansion.calls(self.q.shape[1])
        if len(groups) == 1:
            scale = groups[0][0]
            return run(self if self.scale == scale else replace(self, scale=scale))
        results = [run(part) for part in self.parts(groups)]
        heads_of = [heads for _, heads in groups]
        weights = [w for _, w in results if w is not None]
        return in_order([out for out, _ in results], heads_of), in_order(weights, heads_of) if weights else None

    def parts(self, groups: Sequence[tuple[int, tuple[int, ...]]]) -> list[Problem]:
        """The problems of the heads of each call."""
        whole = [heads for _, heads in groups]
        q, k, v = (_divide(x, whole) for x in (self.q, self.k, self.v))
        return [
            replace(self._masks_of(heads), q=q[i], k=k[i], v=v[i], scale=scale)
            for i, (scale, heads) in enumerate(groups)
        ]

    def _masks_of(self, heads: tuple[int, ...]) -> Problem:
        by_head = self.primal.by_head

        def mask(m: Tensor | None) -> Tensor | None:
            return m if m is None or m.shape[1] == 1 else pick(m, 1, heads)

        return replace(
            self,
            attn_hidden=mask(self.attn_hidden),
            attn_bias=mask(self.attn_bias),
            log_weights=mask(self.log_weights),
            parameters={n: pick(p, 0, heads) if n in by_head else p for n, p in self.parameters.items()},
        )


def state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    primal: Primal,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    parameters: Mapping[str, Tensor] | None = None,
    need_weights: bool = False,
    query_offset: int = 0,
    scale: float | None = None,
    left_padding: bool = True,
) -> Problem:
    """Check the arguments of `attention` and bring them into one form."""
    _check_tensors(q, k, v)
    if q.shape[1] != (kv_heads := k.shape[1]):
        primal = replace(primal, training_set=of_queries(primal.training_set, q.shape[1], kv_heads))
    checks.query_offset(query_offset, primal.mixing_maps)
    checks.scale(scale, primal.features)
    checks.mask("key_padding_mask", key_padding_mask, q)
    checks.mask("query_padding_mask", query_padding_mask, q)
    checks.mask("attn_mask", attn_mask, q)
    B, H, L, D = q.shape
    S = k.shape[2]
    if primal.residual:
        raise ValueError(
            "attention() cannot add the residual of Primal(residual=True): x is the input of the layer, before its "
            "projections. Use primaldual.MultiheadAttention, or residual=False."
        )
    scales = primal.training_set.head_scales(H)
    given, tokens = per_token.divide(dict(parameters or {}), primal, q, k, v)
    if S == 0:  # no keys at all: one that is hidden, so that every query sees none
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        key_padding_mask, attn_mask = q.new_ones(B, 1, dtype=torch.bool), None
        S = 1
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p!r}")
    if is_causal and (reason := primal.causal_refusal(H)):
        raise CausalFormError(f"is_causal=True: {reason}")
    start = _start if torch.compiler.is_compiling() else _kept_start
    if any(name not in given for name in primal.features.fixed):
        wide = torch.promote_types(q.dtype, torch.float32)
        given = start(primal.features, "state", (D,), wide, q.device) | given
    learned = primal.learned(H, D, kv_heads)
    given = _check_parameters(given, learned, primal.features.fixed)
    if learned.keys() - given.keys():
        given = start(primal, "learned", (H, D, kv_heads), q.dtype, q.device) | given
    if primal.features.by_head:
        given |= start(primal.features, "of_heads", (H,), torch.promote_types(q.dtype, torch.float32), q.device)

    key_hidden, key_bias = masks.padding("key_padding_mask", key_padding_mask, (B, S))
    query_hidden, _ = masks.padding("query_padding_mask", query_padding_mask, (B, L))
    attn_hidden = attn_bias = None
    if attn_mask is not None:
        attn_hidden, attn_bias, is_causal = masks.per_query(
            attn_mask, (B, H, L, S), scales, primal.mixing_maps, is_causal, query_offset
        )
    if attn_bias is not None:
        _check_added(primal.training_set, scales, S)
    if key_hidden is not None:
        k, v = (x.masked_fill(key_hidden.unsqueeze(-1), 0.0) for x in (k, v))
        if is_causal and L == 1 and form_of(primal).subset == "all" and attn_hidden is None:
            # a single query sees all keys up to its own, and the last window is then the running one
            key_hidden, is_causal = key_hidden | (torch.arange(S, device=k.device) > query_offset), False
    first = None
    if key_hidden is not None and left_padding:
        first = start_of(primal, scales, key_hidden.squeeze(1), is_causal, L, query_offset)
    if first is not None:
        k, v, q = first.of_keys(k, 2), first.of_keys(v, 2), first.of_queries(q, 2)
        key_hidden, key_bias = (x if x is None else first.of_keys(x, 2) for x in (key_hidden, key_bias))
        query_hidden = None if query_hidden is None else first.of_queries(query_hidden, 2)
        attn_hidden, attn_bias = (m if m is None else first.of_pairs(m) for m in (attn_hidden, attn_bias))
        made = primal.made(H, v.shape[-1], kv_heads)
        tokens = {n: first.of_keys(x, 2) if made[n].of == "key" and x.shape[2] == S else x for n, x in tokens.items()}
        if first.queries is not None:
            L, query_offset = q.shape[2], 0
    if primal.mixing_maps and query_hidden is not None:
        q = q.masked_fill(query_hidden.unsqueeze(-1), 0.0)
    of_q = given
    if primal.token_maps and kv_heads != H:
        of_q = shared_keys.repeat_learned(primal, given, H, kv_heads, D)
    if primal.token_maps:
        hidden = key_hidden if left_padding else None
        q, k = token_maps.on_tokens(primal, q, k, *_places(primal, q, L, S, query_offset, hidden, first), of_q, given)
    if primal.token_maps and key_hidden is not None:
        k = k.masked_fill(key_hidden.unsqueeze(-1), 0.0)
    stated = Problem(
        Expansion(primal), q, k, v, key_hidden, key_bias, attn_hidden, attn_bias, is_causal, dropout_p, given,
        need_weights, query_offset=query_offset, score_scale=scale, start=first,
        copied=0 if first is None else first.copied(q, k, v),
        log_weights=per_token.log_weights(primal, tokens, key_hidden, k, not (is_causal or attn_mask is not None)),
        gate=per_token.gate(primal, tokens),
    )  # fmt: skip
    return stated if kv_heads == H else shared_keys.with_as_many_heads(stated, kv_heads)


def _places(
    primal: Primal, q: Tensor, queries: int, keys: int, offset: int, hidden: Tensor | None, start: Start | None
) -> tuple[Places, Places]:
    """Where queries and keys stand in their sequences, which may begin apart."""
    of_q, of_k = Places(offset, queries), Places(0, keys)
    if hidden is None or len(primal.mixing_maps) == len(primal.token_maps):
        return of_q, of_k
    if start is None:
        first = first_of(hidden.squeeze(1))
        return of_q._replace(given=of_q.on(q.device) - first), of_k._replace(given=of_k.on(q.device) - first)
    return (of_q._replace(given=of_q.on(q.device) - start.first) if start.queries is None else of_q), of_k


def require(expansion: Expansion, *rewrites: type[Rewrite]) -> None:
    """Raise where an identity was not applied without which an executor computes nothing."""
    for rewrite in rewrites:
        if rewrite not in expansion.rewrites:
            applied = ", ".join(repr(known.name) for known in expansion.rewrites) or "none"
            raise UnsupportedError(
                f"this computes the sum as it is after the rewrite {rewrite.name!r} alone, and was given one with "
                f"{applied}; bind the expansion of its plan"
            )


def query_map_alone(expansion: Expansion) -> PointMap | None:
    """The map of the queries, for an executor that leaves keys as they are; raises where some map acts on both."""
    if expansion.maps:
        require(expansion, RowConstantsCancel)
        raise UnsupportedError(f"{expansion.maps[0]!r} maps keys too, which stay as they are here")
    return expansion.query_map


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    checks.inputs(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, length, head_dim], got shape {tuple(x.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q, k and v must agree in batch, q and k in head_dim, k and v in length and heads; got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[1] != k.shape[1]:
        check_groups(q.shape[1], k.shape[1])
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise ValueError(
            f"q, k and v must share dtype and device, got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
            f"{v.dtype} on {v.device}"
        )


def _check_added(training_set: TrainingSet, scales: tuple[int, ...], tokens: int) -> None:
    """Raise where scores of tokens are added to, and points are others; what is hidden from a query is not pooled."""
    for scale in sorted(set(scales)):
        if (points := training_set.points(scale, tokens)) != tokens:
            raise ValueError(
                f"attn_mask adds to the scores of {tokens} single keys, but {training_set!r} has {points} points of "
                f"them; give a boolean mask, which hides keys from its points"
            )


def _check_parameters(given: dict[str, Tensor], known: dict[str, Tensor], fixed: tuple[str, ...]) -> dict[str, Tensor]:
    for name, value in given.items():
        if name in fixed:
            continue
        if name not in known:
            takes = ", ".join(f"{n} {tuple(p.shape)}" for n, p in known.items()) or "none"
            raise ValueError(f"parameters: this primal has no {name!r}{did_you_mean(name, known)} It takes: {takes}")
        if not isinstance(value, Tensor):
            raise TypeError(f"parameters[{name!r}] must be a torch.Tensor, got {value!r}")
        if value.shape != known[name].shape:
            raise ValueError(
                f"parameters[{name!r}] must have shape {tuple(known[name].shape)}, got {tuple(value.shape)}"
            )
    return given


def _start(
    part: Primal | FeatureMap, of: str, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The tensors that a part begins with, "learned", "state" or "of_heads", where the caller gives no others."""
    return {name: x.to(device, dtype) for name, x in getattr(part, of)(*sizes).items()}


_kept_start = on_device(most=64)(_start)


def accumulated(p: Problem, run: Callable[[Problem], tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """What `run` gives in at least float32, rounded back: sums of many keys leave the range of float16.

    Autocast would round every product; here it says what the result is rounded to.
    """
    device, dtype = p.q.device.type, p.q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    autocast = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    if wide == dtype and not autocast:
        return run(p)
    target = torch.get_autocast_dtype(device) if autocast and dtype != torch.float64 else dtype
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        tensors: dict[str, Any] = {n: _floats(getattr(p, n), wide) for n in _FLOATS}
        learned: dict[str, Any] = {n: _floats(x, wide) for n, x in p.parameters.items()}
        out, weights = run(replace(p, **tensors, parameters=learned))
    return out.to(target), None if weights is None else weights.to(target)


_FLOATS = ("q", "k", "v", "key_bias", "attn_bias", "log_weights")


def _floats(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None else x.to(torch.promote_types(x.dtype, dtype))


def with_usual_scale(p: Problem) -> Problem:
    """The same with 1/√D on the scores, queries and keys stretched alike: exact with one `Recenter`, or none."""
    if p.relative_scale == 1.0:
        return p
    root = math.sqrt(p.relative_scale)
    return replace(p, q=p.q * root, k=p.k * root, score_scale=None)


def pick(x: Tensor, dim: int, heads: tuple[int, ...]) -> Tensor:
    """These heads of x; a view when they stand side by side."""
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        return x.narrow(dim, heads[0], len(heads))
    return _stack(x.unbind(dim), dim, heads)


def _divide(x: Tensor, heads_of: list[tuple[int, ...]]) -> list[Tensor]:
    """The heads of each group. Where groups stand side by side, one split: its gradient is one concatenation."""
    if [h for heads in heads_of for h in heads] == list(range(x.shape[1])):
        return list(x.split([len(heads) for heads in heads_of], dim=1))
    each = x.unbind(1)
    return [_stack(each, 1, heads) for heads in heads_of]


def in_order(parts: list[Tensor], heads_of: list[tuple[int, ...]]) -> Tensor:
    """Concatenate along dimension 1, and put the heads that each part holds back in their places."""
    order = [h for heads in heads_of for h in heads]
    if order == sorted(order):
        return torch.cat(parts, dim=1)
    each = [x for part in parts for x in part.unbind(1)]
    return _stack(each, 1, sorted(range(len(order)), key=order.__getitem__))


def _stack(each: Sequence[Tensor], dim: int, heads: Sequence[int]) -> Tensor:
    """No index tensor, which a captured graph could not take from the host; one launch, and one for the gradient."""
    return torch.stack([each[h] for h in heads], dim)
