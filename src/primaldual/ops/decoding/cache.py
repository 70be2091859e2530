"""The cache of one attention: its heads by scale, and one call for new queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...dual.form import form_of, kernel_of
from ...primal import BatchNorm, Moments, PointMap, Primal, Recenter, RmsNorm
from ...primal.features import Parameters
from ...primal.shared_keys import check_groups, of_keys, of_queries
from .. import checks, per_token, shared_keys
from .._attention import attention
from .attend import Call, by_kernel, by_scores
from .held import Held
from .maps import Maps
from .points import Points, Running
from .refusals import check
from .rows import Piece, Rows
from .running import Statistics

Heads = slice | Tensor
"""Some heads: those that stand side by side, or the indices of others."""


class Group(NamedTuple):
    """The heads of one scale, and what is kept for them."""

    of_keys: Heads
    of_queries: Heads
    points: Points
    statistics: Statistics | None


class AttentionCache:
    """What attention keeps of the tokens so far, head by head: each has a key and a value for each of its points.

    Args:
        primal: the primal layer; what cannot be decoded is refused, with the reason.
        rows: lengths of the rows, which layers of a model share.
        heads, kv_heads: of queries, and of keys and values.
        head_dim, value_dim: channels of a key, and of a value.
        dtype: of keys and values.
        scale: the factor on the scores, 1/√head_dim unless given.
    """

    def __init__(
        self, primal: Primal, rows: Rows, heads: int, kv_heads: int, head_dim: int, value_dim: int,
        dtype: torch.dtype, scale: float | None = None,
    ) -> None:  # fmt: skip
        check_groups(heads, kv_heads)
        checks.scale(scale, primal.features)
        stated = replace(primal.ungated, bias=False, residual=False)
        self.gated = primal
        self.primal = replace(stated, training_set=of_queries(stated.training_set, heads, kv_heads))
        check(self.primal, heads)
        self.rows, self.heads, self.kv_heads, self.head_dim = rows, heads, kv_heads, head_dim
        self.value_dim, self.scale = value_dim, scale
        self.each = heads // kv_heads
        self.factor = head_dim**-0.5 if scale is None else scale
        self.maps = Maps(self.primal, rows, (heads, kv_heads), head_dim, dtype)
        self.unmapped = replace(self.primal, inputs=self.primal.point_maps)
        lead = 0
        while lead < len(self.primal.point_maps) and type(self.primal.point_maps[lead]) is RmsNorm:
            lead += 1
        self.lead, self.tail = self.primal.point_maps[:lead], self.primal.point_maps[lead:]
        self.form = form_of(self.primal)
        self.by_head = self.primal.by_head - {"conv_kernel"}
        self.on_queries = kernel_of(self.primal.features) == "exponential" or self.form.distance
        self.on_queries &= not self.tail or (len(self.tail) == 1 and type(self.tail[0]) in (Recenter, BatchNorm))
        scales = of_keys(self.primal.training_set, heads, kv_heads).head_scales(kv_heads)
        over = getattr(self.primal.training_set, "over", self.primal.training_set)
        self.groups: list[Group] = []
        order: list[int] = []
        for s in sorted(set(scales)):
            mine = tuple(g for g, scale in enumerate(scales) if scale == s)
            of_q = tuple(g * self.each + i for g in mine for i in range(self.each))
            points = Points(
                rows, s, getattr(over, "prefix", 0), len(mine), (head_dim, value_dim), dtype,
                self.primal.weights is not None,
            )  # fmt: skip
            needs = self.tail[0].needs if self.tail and self.on_queries else "nothing"
            statistics = None if needs == "nothing" else Statistics(rows, points, needs == "variance")
            self.groups.append(Group(_heads(mine, rows.device), _heads(of_q, rows.device), points, statistics))
            order += of_q
        back = sorted(range(heads), key=order.__getitem__)
        self.back = None if order == sorted(order) else torch.tensor(back, device=rows.device)
        wide = torch.promote_types(dtype, torch.float32)
        known = self.primal.features.state(head_dim) | self.primal.features.of_heads(heads)
        known |= self.primal.learned(heads, head_dim, kv_heads)
        self.start = {name: x.to(rows.device, wide) for name, x in known.items()}

    @property
    def held(self) -> list[Held]:
        """All that is kept."""
        found: list[Held] = [self.maps]
        for _, _, points, statistics in self.groups:
            found += [points] if statistics is None else [points, statistics]
        return found

    @property
    def bytes(self) -> int:
        """That are allocated."""
        return sum(one.bytes for one in self.held)

    @property
    def full_bytes(self) -> int:
        """Of a cache that has room for as many tokens, and keeps a key and a value of each for every head."""
        keys = self.groups[0].points.tensors["keys"]
        return self.rows.batch * self.kv_heads * self.rows.room * (self.head_dim + self.value_dim) * keys.element_size()

    @torch.no_grad()
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, parameters: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Outputs [B, H, L, Dv] of new tokens, which are in the cache then; `rows.advance(piece)` ends the step.

        `parameters` are those of `primaldual.attention`; what a layer makes of tokens, of the new ones.
        """
        given, tokens = per_token.divide(dict(parameters or {}), self.gated, q, k, v)
        given = self.start | given
        of_q = given
        if self.primal.token_maps and self.each > 1:
            of_q = shared_keys.repeat_learned(self.primal, given, self.heads, self.kv_heads, self.head_dim)
        q, k = self.maps("q", q, piece, of_q), self.maps("k", k, piece, given)
        added = None
        if self.primal.weights is not None:
            added = -tokens["log_forget"].expand(k.shape[0], -1, k.shape[2])
        if piece.first and piece.length > 1:  # hidden tokens come last, so that causality hides them
            known = {n: x for n, x in given.items() if n not in ("conv_kernel", *self.primal.features.by_head)}
            known |= {n: x.expand(k.shape[0], -1, k.shape[2]) for n, x in tokens.items() if n == "log_forget"}
            whole = attention(q, k, v, self.unmapped, is_causal=True, parameters=known, scale=self.scale)
            assert isinstance(whole, Tensor)
            for group in self.groups:
                self._push(group, k, v, added, piece, given)
        elif piece.length > 1 and self.one_by_one:
            whole = self._in_turn(q, k, v, added, piece, given)
        else:
            whole = self._at_once(q, k, v, added, piece, given)
        gate = per_token.gate(self.gated, tokens)
        whole = whole.to(q.dtype)
        return whole if gate is None else per_token.gated(self.gated, whole, None, gate)[0]

    def _at_once(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, piece: Piece, given: Parameters
    ) -> Tensor:  # fmt: skip
        parts = [self._of_group(group, q, k, v, added, piece, given) for group in self.groups]
        whole = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return whole if self.back is None else whole.index_select(1, self.back)

    def _in_turn(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, piece: Piece, given: Parameters
    ) -> Tensor:  # fmt: skip
        """Keys are mapped by statistics that are each token's own."""
        parts = []
        for i in range(piece.length):
            one_q, one_k, one_v = (x[:, :, i : i + 1] for x in (q, k, v))
            one_added = None if added is None else added[:, :, i : i + 1]
            parts.append(self._at_once(one_q, one_k, one_v, one_added, piece.single(i), given))
        return torch.cat(parts, 2)

    def _push(
        self, group: Group, k: Tensor, v: Tensor, added: Tensor | None, piece: Piece, given: Parameters
    ) -> tuple[Running, Moments]:  # fmt: skip
        heads, _, points, statistics = group
        k, v = (_of(x, 1, heads) for x in (k, v))
        added = None if added is None else _of(added, 1, heads)
        running = points.push(k, v, added, lambda x: _mapped(self.lead, x, given), piece)
        found = Moments(None, None) if statistics is None else statistics.push(running.keys, piece, self.form.cancels)
        return running, found

    def _of_group(
        self, group: Group, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, piece: Piece, given: Parameters
    ) -> Tensor:  # fmt: skip
        mine = {n: _of(x, 0, group.of_queries) if n in self.by_head else x for n, x in given.items()}
        running, found = self._push(group, k, v, added, piece, given)
        call = Call(
            self.primal, self.tail, _mapped(self.lead, _of(q, 1, group.of_queries), given), group.points, running,
            piece, mine, self.factor, self.form,
        )  # fmt: skip
        return by_scores(call, found) if self.on_queries else by_kernel(call)

    @property
    def one_by_one(self) -> bool:
        """Whether several tokens are taken in turn: keys are mapped by statistics, which are each token's own."""
        return not self.on_queries and any(map_.needs != "nothing" for map_ in self.tail)

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index_b was."""
        for one in self.held:
            one.reorder(index)

    def reset(self) -> None:
        """Without tokens."""
        for one in self.held:
            one.reset()

    def crop_refusal(self, removed: Tensor) -> str | None:
        """Why tokens beyond `rewind` cannot be taken off; None where they can."""
        if self.maps.mixes:
            return "the inputs of a convolution before the tokens that are left are not kept"
        return next((reason for _, _, p, _ in self.groups if (reason := p.crop_refusal(removed))), None)

    def crop(self, removed: Tensor) -> None:
        """Back to the lengths that rows have now."""
        self.maps.crop(removed)
        for _, _, points, statistics in self.groups:
            points.crop(removed)
            if statistics is not None:
                statistics.crop()


def _mapped(maps: tuple[PointMap, ...], x: Tensor, parameters: Parameters) -> Tensor:
    for map_ in maps:
        x = map_.apply(x, Moments(None, None), parameters)
    return x


def _heads(heads: tuple[int, ...], device: torch.device) -> Heads:
    side_by_side = heads == tuple(range(heads[0], heads[0] + len(heads)))
    return slice(heads[0], heads[0] + len(heads)) if side_by_side else torch.tensor(heads, device=device)


def _of(x: Tensor, dim: int, heads: Heads) -> Tensor:
    """These heads of x; a view where they stand side by side."""
    if isinstance(heads, slice):
        return x[heads] if dim == 0 else x[:, heads]
    return x.index_select(dim, heads)
