"""Queries and keys through the maps of the token sequence: by a kernel where there is one for the map, by exact type.

A map of one's own, a subclass of one of these too, is called as it is.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad

from ..kernels.convolution import depthwise
from ..kernels.launching import launches, traced
from ..kernels.rotary.turning import turned
from ..primal import DepthwiseConv1d, Primal, Rotary
from ..primal.features import Parameters
from .places import Places
from .rotary import table


def on_tokens(
    primal: Primal, q: Tensor, k: Tensor, q_places: Places, k_places: Places, of_q: Parameters, of_k: Parameters
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each with what its maps have learned."""
    kernels = launched(q) and launched(k)
    if not kernels:  # every length may be another one, where it is exported
        of_queries, of_keys = q_places.on(q.device), k_places.on(k.device)
        return primal.on_tokens(q, of_queries, of_q), primal.on_tokens(k, of_keys, of_k)
    for map_ in primal.token_maps:
        if type(map_) is Rotary:
            q, k = turned(q, k, *(table(map_, x.shape[-1], at, x.device) for x, at in ((q, q_places), (k, k_places))))
        elif type(map_) is DepthwiseConv1d and map_.size <= depthwise.MOST_TAPS:
            q, k = (convolved(map_, x, learned) for x, learned in ((q, of_q), (k, of_k)))
        else:
            q, k = map_.at(q, q_places.on(q.device), of_q), map_.at(k, k_places.on(k.device), of_k)
    return q, k


def launched(x: Tensor) -> bool:
    """Whether kernels map tokens like these."""
    return not traced() and forward_ad._current_level < 0 and launches(x) and not x.is_meta and x.numel() > 0


def convolved(map_: DepthwiseConv1d, x: Tensor, learned: Parameters) -> Tensor:
    """What `map_.tokens` gives, in one launch."""
    heads, dim = x.shape[1], x.shape[-1]
    kernel = learned.get("conv_kernel")
    kernel = map_.learned(1, 1)["conv_kernel"].to(x.device) if kernel is None else kernel
    left = map_.size - 1 if map_.causal else (map_.size - 1) // 2
    return depthwise.convolved(x, kernel.expand(heads, dim, map_.size), left)
