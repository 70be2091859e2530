"""The points of the key/value heads of one scale: a key and a value for every window, and what makes the next one.

Token t is in point w = t before the prefix ends at P, else in window w = P + ⌊(t − P)/s⌋ at place p = (t − P) mod s. Of
the current window its running sum is kept, u ← u + k (u = 0 at p = 0), in at least float32; the point is u/(p + 1), and
stands in its slot like those of complete windows. The same of values. The logarithm of a point's weight is
log Σ_t exp(−c_t) over its tokens, in float64, where points have weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .held import Held
from .last import after, before, joined
from .rows import Piece, Rows, Spots


class Running(NamedTuple):
    """The points that new tokens are in, up to each of them."""

    keys: Tensor  # [B, G, L, D], mapped
    values: Tensor  # [B, G, L, Dv]
    log_weights: Tensor | None  # [B, G, L]


class Points(Held):
    """Keys and values [B, G, slots, ·] of G heads of one scale. The last slot holds nothing that is ever seen."""

    def __init__(
        self, rows: Rows, scale: int, prefix: int, heads: int, dims: tuple[int, int], dtype: torch.dtype,
        weighted: bool,
    ) -> None:  # fmt: skip
        super().__init__(rows.static)
        self.rows, self.scale, self.prefix = rows, scale, prefix if scale > 1 else 0
        self.wide = torch.promote_types(dtype, torch.float32)
        self.widest = torch.float32 if rows.device.type == "mps" else torch.float64
        slots, self.split = self.count(rows.room) + 1, list(dims)
        self.slotted = {"keys": dtype, "values": dtype} | ({"weights": self.widest} if weighted else {})
        B = rows.batch
        for name, dim in zip(("keys", "values"), dims, strict=True):
            self.add(name, (B, heads, slots, dim), dtype, rows.device)
        if weighted:
            self.add("weights", (B, heads, slots), self.widest, rows.device)
            self.add("decay", (B, heads, 1), self.widest, rows.device)
        if scale > 1:
            self.add("sum", (B, heads, 1, sum(dims)), self.wide, rows.device)
            if weighted:
                self.add("log_sum", (B, heads, 1), self.widest, rows.device, -torch.inf)
        if rows.rewind:  # the tokens of a window that crop may come back into
            kept = rows.rewind + scale
            if scale > 1:
                self.add("last", (B, heads, kept, sum(dims)), dtype, rows.device)
            if weighted:
                self.add("last_weights", (B, heads, kept), self.widest, rows.device)

    def count(self, tokens: int) -> int:
        """How many points so many tokens become."""
        prefix = min(self.prefix, tokens)
        return prefix + -(-(tokens - prefix) // self.scale)

    def make_room(self) -> None:
        """Slots for as many tokens as rows have room for."""
        slots = self.count(self.rows.room) + 1
        if slots > self.tensors["keys"].shape[2]:
            for name in self.slotted:
                self.widen(name, slots)

    def seen(self, name: str, piece: Piece) -> Tensor:
        """The slots that the new tokens may see, a view."""
        x = self.tensors[name]
        return x[:, :, : x.shape[2] - 1 if piece.end is None else self.count(piece.end)]

    def push(
        self, k: Tensor, v: Tensor, log_weights: Tensor | None, lead: Callable[[Tensor], Tensor], piece: Piece
    ) -> Running:
        """New keys and values [B, G, L, ·] into their slots; `lead` maps points before they are kept.

        `log_weights` [B, G, L] are what each token adds to −c.
        """
        self.make_room()
        if log_weights is not None:
            log_weights = self._decayed(log_weights, piece)
        if self.scale == 1:
            running = Running(lead(k), v, log_weights)
            self._write(running, self._own_slots(piece))
            return running
        x = torch.cat([k, v], -1)
        if "last" in self.tensors:
            last = self.tensors["last"]
            self._put("last", after(last, joined(last, x), piece))
        made = self._one if piece.length == 1 else self._many
        return made(x, log_weights, lead, piece)

    def _decayed(self, added: Tensor, piece: Piece) -> Tensor:
        """−c of every new token, [B, G, L]."""
        valid = piece.valid
        added = added.to(self.widest)
        added = added if valid is None else added.masked_fill(~valid[:, None], 0.0)
        found = self.tensors["decay"] + added.cumsum(-1)
        self.tensors["decay"].copy_(found[..., -1:])
        if "last_weights" in self.tensors:
            last = self.tensors["last_weights"]
            self._put("last_weights", after(last, joined(last, found), piece))
        return found

    def _one(self, x: Tensor, log_weights: Tensor | None, lead: Callable[[Tensor], Tensor], piece: Piece) -> Running:
        """A single token of every row."""
        valid, key = piece.valid, ("window", self.scale, self.prefix)
        if (found := piece.shared.get(key)) is None:
            inside = piece.spots(self.scale, self.prefix).inside[:, None]
            found = piece.shared[key] = inside == 0, (inside + 1).unsqueeze(-1)
        begins, many = found  # [B or 1, 1, 1], [B or 1, 1, 1, 1]
        kept = self.tensors["sum"]
        total = kept.masked_fill(begins[..., None], 0.0) + x
        kept.copy_(total if valid is None else total.where(valid[:, None, :, None], kept))
        if log_weights is not None:
            before = self.tensors["log_sum"]
            log_weights = torch.logaddexp(before.masked_fill(begins, -torch.inf), log_weights)
            before.copy_(log_weights if valid is None else log_weights.where(valid[:, None], before))
        running = self._running(total / many, x.dtype, log_weights, lead)
        self._write(running, self._own_slots(piece))
        return running

    def _many(self, x: Tensor, log_weights: Tensor | None, lead: Callable[[Tensor], Tensor], piece: Piece) -> Running:
        """Several: laid out by window, [windows, places], where a running sum is a cumulative one."""
        s, P, L, device = self.scale, self.prefix, piece.length, x.device
        spots, first = piece.spots(s, P), piece.places[:, :1]  # [B or 1, 1]
        window = (first - P).clamp(min=0) // s  # the first one
        several = (L + s - 1) // s + 1
        places = P + (window + torch.arange(several, device=device)).unsqueeze(-1) * s + torch.arange(s, device=device)
        index = places - first.unsqueeze(-1)  # [B or 1, windows, s]: which token stands there
        counts = piece.counts
        some = L if counts is None else counts.view(-1, 1, 1)
        inside = (index >= 0) & (index < some)
        grid = _laid_out(x, index.clamp(0, L - 1)).to(self.wide)
        grid = grid.masked_fill(~inside[:, None, ..., None], 0.0)
        begun = ((first - P) % s != 0) & (first > P)  # whether the first window holds tokens already
        carried = self.tensors["sum"].masked_fill(~begun[:, None, :, None], 0.0)
        sums = grid.cumsum(3)
        sums = torch.cat([sums[:, :, :1] + carried.unsqueeze(2), sums[:, :, 1:]], 2)
        means = sums / torch.arange(1, s + 1, device=device)[:, None]
        own = torch.where(
            (piece.places < P)[:, None, :, None], x.to(self.wide), _picked(means, spots, window, P)
        )  # fmt: skip
        whole = first + (L if counts is None else counts.view(-1, 1))  # [B or 1, 1], tokens from now on
        held = (whole - places[..., 0]).clamp(0, s)  # [B or 1, windows]: how many of each window there are
        ends = sums[:, :, :, -1] / held.clamp(min=1)[:, None, :, None]
        current = ((whole - 1 - P).clamp(min=0) // s - window).clamp(0, several - 1)  # [B or 1, 1]
        final = of_ends = None
        if log_weights is not None:
            grid_w = _laid_out(log_weights.unsqueeze(-1), index.clamp(0, L - 1)).squeeze(-1)
            grid_w = grid_w.masked_fill(~inside[:, None], -torch.inf).logcumsumexp(3)
            before = self.tensors["log_sum"].masked_fill(~begun[:, None], -torch.inf)
            grid_w = torch.cat([torch.logaddexp(grid_w[:, :, :1], before.unsqueeze(-1)), grid_w[:, :, 1:]], 2)
            final = torch.where(
                (piece.places < P)[:, None], log_weights, _picked(grid_w.unsqueeze(-1), spots, window, P).squeeze(-1)
            )
            of_ends = grid_w[..., -1].masked_fill((held == 0)[:, None], 0.0)
            self.tensors["log_sum"].copy_(_at(grid_w[..., -1:], current).squeeze(-1))
        self.tensors["sum"].copy_(_at(sums[:, :, :, -1], current))
        slots = P + window + torch.arange(several, device=device)
        self._write(self._running(ends, x.dtype, of_ends, lead), self._aside(slots, held > 0))
        running = self._running(own, x.dtype, final, lead)
        if P:
            before_windows = piece.places < P
            shown = before_windows if piece.valid is None else before_windows & piece.valid
            self._write(running, self._aside(piece.places, shown))
        return running

    def _running(
        self, x: Tensor, dtype: torch.dtype, log_weights: Tensor | None, lead: Callable[[Tensor], Tensor]
    ) -> Running:
        keys, values = x.to(dtype).split(self.split, -1)
        return Running(lead(keys), values, log_weights)

    def _own_slots(self, piece: Piece) -> Tensor:
        """The slot of every new token, [B or 1, L]."""
        key = ("slots", self.scale, self.prefix, self.tensors["keys"].shape[2])
        if (found := piece.shared.get(key)) is None:
            slots = self._aside(piece.spots(self.scale, self.prefix).slot, piece.valid)
            found = piece.shared[key] = (slots,)
        return found[0]

    def _aside(self, slots: Tensor, shown: Tensor | None) -> Tensor:
        """Slots [B or 1, n], those of what is not to be kept the last one, and so all that are beyond."""
        last = self.tensors["keys"].shape[2] - 1
        slots = slots.clamp(max=last)
        return slots if shown is None else slots.where(shown, last)

    def _write(self, points: Running, slots: Tensor) -> None:
        given = {"keys": points.keys, "values": points.values, "weights": points.log_weights}
        for name in self.slotted:
            into, x = self.tensors[name], given[name]
            assert x is not None
            index = slots.view(slots.shape[0], 1, -1, *(1,) * (x.dim() - 3))
            into.scatter_(2, index.expand(x.shape), x.to(into.dtype))

    def crop_refusal(self, removed: Tensor) -> str | None:
        """Why this scale cannot be cropped without the last tokens; None where it can."""
        after = self.rows.lengths - self.prefix
        between = (after > 0) & (after % self.scale != 0) & (removed > 0)
        if self.scale > 1 and bool(between.any()):
            return f"a head of scale {self.scale} keeps the mean of a window, and not its tokens"
        if "weights" in self.tensors and bool((removed > 0).any()):
            return "the decay of the tokens that are left is not kept"
        return None

    def crop(self, removed: Tensor) -> None:
        """Back to the lengths that rows have now, where `removed` [B] tokens of each are gone."""
        after = (self.rows.lengths - self.prefix).clamp(min=0)
        if "last" in self.tensors:
            self._put("last", before(self.tensors["last"], removed))
        if "last_weights" in self.tensors:
            self._put("last_weights", before(self.tensors["last_weights"], removed))
            self.tensors["decay"].copy_(self.tensors["last_weights"][..., -1:])
        if self.scale > 1 and "last" in self.tensors:
            last = self.tensors["last"]
            kept = last.shape[2]
            current = torch.arange(kept, device=last.device) >= kept - (after % self.scale).view(-1, 1)
            total = last.to(self.wide).masked_fill(~current[:, None, :, None], 0.0).sum(2, keepdim=True)
            self.tensors["sum"].copy_(total)
            if "log_sum" in self.tensors:
                weights = self.tensors["last_weights"].masked_fill(~current[:, None], -torch.inf)
                self.tensors["log_sum"].copy_(weights.logsumexp(-1, keepdim=True))

    def complete(self) -> Tensor:
        """Boolean [B, slots]: those of complete points."""
        after = self.rows.lengths - self.prefix
        many = self.rows.lengths.clamp(max=self.prefix) + after.clamp(min=0) // self.scale
        return torch.arange(self.tensors["keys"].shape[2], device=many.device) < many[:, None]


def _laid_out(x: Tensor, index: Tensor) -> Tensor:
    """[B, G, L, C] to [B, G, windows, s, C]."""
    flat = index.flatten(1)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])
    return x.gather(2, flat).unflatten(2, index.shape[1:])


def _picked(grid: Tensor, spots: Spots, window: Tensor, prefix: int) -> Tensor:
    """Of [B, G, windows, s, C] what stands at the window and place of each token, [B, G, L, C]."""
    slot, inside = spots.slot, spots.inside
    index = ((slot - prefix - window).clamp(min=0) * grid.shape[3] + inside)[:, None, :, None]
    flat = grid.flatten(2, 3)
    return flat.gather(2, index.expand(*flat.shape[:2], -1, flat.shape[3]))


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Of [B, G, windows, C] one window for every row, [B, G, 1, C]."""
    return x.gather(2, index[:, None, :, None].expand(*x.shape[:2], 1, x.shape[3]))
