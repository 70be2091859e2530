"""Maps of tokens at their places; rotary positions of queries and keys in one launch, where the kernel takes them.

By exact type: a map of one's own, a subclass of `Rotary` too, is called as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels.kept import on_device
from ..kernels.launching import launches, power_of_2, refusal_of_device, refusal_of_dtype, traced
from ..kernels.rotary.turning import turned
from ..primal import Primal, Rotary
from ..primal.features import Parameters


class Places(NamedTuple):
    """Where tokens stand: one after the other from `first` on, or as given, [batch, length]."""

    first: int
    length: int
    given: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """[length], or [batch, length]."""
        return torch.arange(self.length, device=device) + self.first if self.given is None else self.given


def on_tokens(
    primal: Primal, q: Tensor, k: Tensor, q_places: Places, k_places: Places, of_q: Parameters, of_k: Parameters
) -> tuple[Tensor, Tensor]:
    """Queries and keys through the token maps, each with what its maps have learned."""
    if not any(
        turns(map_, q, k) for map_ in primal.token_maps
    ):  # every length may be another one, where it is exported
        of_queries, of_keys = q_places.on(q.device), k_places.on(k.device)
        return primal.on_tokens(q, of_queries, of_q), primal.on_tokens(k, of_keys, of_k)
    for map_ in primal.token_maps:
        if turns(map_, q, k):
            assert isinstance(map_, Rotary)
            q, k = turned(q, k, *(table(map_, x.shape[-1], at, x.device) for x, at in ((q, q_places), (k, k_places))))
        else:
            q, k = map_.at(q, q_places.on(q.device), of_q), map_.at(k, k_places.on(k.device), of_k)
    return q, k


def turns(map_: object, q: Tensor, k: Tensor) -> bool:
    """Whether the kernel computes this map of these."""
    return (
        type(map_) is Rotary
        and not traced() and forward_ad._current_level < 0
        and launches(q) and launches(k) and not q.is_meta and q.numel() > 0 and k.numel() > 0
    )  # fmt: skip


def alone(primal: Primal) -> bool:
    """Whether tokens are mapped by rotary positions and nothing else."""
    return len(primal.token_maps) == 1 and type(primal.token_maps[0]) is Rotary


def map_of(primal: Primal) -> Rotary:
    """The map of a primal whose tokens have rotary positions alone."""
    (map_,) = primal.token_maps
    assert type(map_) is Rotary
    return map_


def refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel does not turn tokens of this dtype here; None where it does."""
    reason = refusal_of_dtype(dtype) or refusal_of_device(device)
    return None if reason is None else f"the kernel that turns {reason}"


def table(map_: Rotary, head_dim: int, places: Places, device: torch.device) -> Tensor:
    """Cosines, then sines of the angles of each place, [1 or batch, length, r] in float32."""
    if places.given is not None:
        return torch.cat(map_.turns(places.given, head_dim), -1).to(torch.float32)
    end = places.first + places.length
    return _kept_table(map_, head_dim, power_of_2(end), device)[:, places.first : end]


@on_device(most=64, from_host=False)
def _kept_table(map_: Rotary, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Of so many places from 0 on."""
    return torch.cat(map_.turns(torch.arange(length, device=device), head_dim), -1).to(torch.float32).unsqueeze(0)
