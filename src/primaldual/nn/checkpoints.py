"""State dicts of other layers' projections, brought into the names and sizes of a layer's own before they are loaded.

Names: torch's `in_proj_weight` or `q_proj_weight`, `k_proj_weight`, `v_proj_weight`, with `in_proj_bias`; or those of
one linear map each, `q_proj.weight`, `q_proj.bias`, …, `o_proj.weight`. Sizes: keys and values of as many heads as the
layer has key/value heads; of fewer, where each serves a group of the layer's; or of more, where those of a group are
equal to one another, and so one serves them all.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

PARTS = ("q", "k", "v")


class Projections(Protocol):
    """What a layer says of its projections."""

    embed_dim: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    shared: bool
    in_proj_weight: Any
    k_proj_weight: Any
    in_proj_bias: Any


def load_projections(layer: Projections, state: dict[str, Any], prefix: str, error_messages: list[str]) -> None:
    """Rename and resize what is there, in place; what does not fit is left as it is, and torch says so."""
    if layer.shared:
        return
    for ending in ("weight", "bias"):
        if f"{prefix}o_proj.{ending}" in state:
            state[f"{prefix}out_proj.{ending}"] = state.pop(f"{prefix}o_proj.{ending}")
    if _its_own(layer, state, prefix):
        return
    weights = _read(layer, state, prefix, "weight")
    if not weights or weights["q"].shape != (layer.embed_dim, layer.embed_dim):
        return
    for kind, found in (("weight", weights), ("bias", _read(layer, state, prefix, "bias"))):
        if not found:
            continue
        for name in _names(prefix, kind):
            state.pop(name, None)
        parts = [_fit(layer, found[part], part, prefix, error_messages) for part in PARTS]
        if kind == "bias" or layer.in_proj_weight is not None:
            state[f"{prefix}in_proj_{kind}"] = torch.cat(parts)
        else:
            state.update({f"{prefix}{part}_proj_weight": x for part, x in zip(PARTS, parts, strict=True)})
    for name in ("bias_k", "bias_v"):
        if isinstance(extra := state.get(prefix + name), Tensor) and extra.dim() == 3:
            state[prefix + name] = _fit(layer, extra[0, 0], name[-1], prefix, error_messages)[None, None]


def _its_own(layer: Projections, state: dict[str, Any], prefix: str) -> bool:
    """Whether names and sizes are the layer's own."""
    own = {name: getattr(layer, name) for name in ("in_proj_weight", "k_proj_weight", "in_proj_bias")}
    return all(prefix + n in state and state[prefix + n].shape == x.shape for n, x in own.items() if x is not None)


def _names(prefix: str, kind: str) -> list[str]:
    """That a tensor of projections may have."""
    each = [f"{prefix}{part}_proj{mark}{kind}" for part in PARTS for mark in "_."]
    return [f"{prefix}in_proj_{kind}", *each]


def _read(layer: Projections, state: dict[str, Any], prefix: str, kind: str) -> dict[str, Tensor]:
    """What a state dict holds for each part; nothing where one is missing, or does not come apart."""
    if (packed := state.get(f"{prefix}in_proj_{kind}")) is not None:
        return _split(layer, packed)
    for mark in "_.":
        names = {part: f"{prefix}{part}_proj{mark}{kind}" for part in PARTS}
        if all(name in state for name in names.values()):
            return {part: state[name] for part, name in names.items()}
    return {}


def _split(layer: Projections, packed: Tensor) -> dict[str, Tensor]:
    """Queries, keys and values after one another; the latter two have equally many rows."""
    E, rest = layer.embed_dim, packed.shape[0] - layer.embed_dim
    if rest <= 0 or rest % 2:
        return {}
    return dict(zip(PARTS, packed.split([E, rest // 2, rest // 2]), strict=True))


def _fit(layer: Projections, x: Tensor, part: str, prefix: str, error_messages: list[str]) -> Tensor:
    """Rows of as many key/value heads as the layer has."""
    wanted, (heads, rest) = layer.num_kv_heads, divmod(x.shape[0], layer.head_dim)
    if part == "q" or heads == wanted or rest or not heads:
        return x
    by_head = x.unflatten(0, (heads, layer.head_dim))
    if wanted % heads == 0:
        return by_head.repeat_interleave(wanted // heads, dim=0).flatten(0, 1)
    if heads % wanted:
        return x
    groups = by_head.unflatten(0, (wanted, heads // wanted))
    if not bool((groups == groups[:, :1]).all()):
        error_messages.append(
            f"{prefix}{part}_proj: {heads} key/value heads do not fit a layer with num_kv_heads={wanted}, since heads "
            f"of a group differ from one another, and a group shares one; load them into a layer with "
            f"num_kv_heads={heads}, or average each group of {heads // wanted} and train on"
        )
        return x
    return groups[:, 0].flatten(0, 1)
