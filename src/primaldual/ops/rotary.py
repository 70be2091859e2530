"""What the kernel of rotary positions reads: tables of cosines and sines, those of places from 0 on kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.kept import on_device
from ..kernels.launching import power_of_2, refusal_of_device, refusal_of_dtype
from ..primal import Primal, Rotary
from .places import Places


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
