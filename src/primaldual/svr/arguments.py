"""Keys and what goes with them, as a caller gives them: checked once, and brought into the shapes of `design`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops import checks
from ..primal import Primal
from .design import Design, design


def check_tensors(keys: Any, name: str, pairs: Any, key_padding_mask: Any) -> None:
    """Raise unless these are tensors that a regression can be of."""
    checks.inputs(**{"keys": keys, name: pairs})
    checks.mask("key_padding_mask", key_padding_mask, keys)
    if not keys.numel():
        raise ValueError(f"keys must hold at least one point of one head, got {tuple(keys.shape)}")


def designed(
    primal: Primal, keys: Tensor, name: str, pairs: Tensor, key_padding_mask: Tensor | None, query: int | None,
    is_causal: bool, parameters: Mapping[str, Tensor] | None,
) -> Design:  # fmt: skip
    """The design of keys [..., N, D] and `pairs` [..., N, Dv], their targets or values, in float64."""
    leading = tuple(keys.shape[:-2])
    if keys.dim() < 2 or pairs.dim() != keys.dim() or pairs.shape[:-1] != keys.shape[:-1]:
        raise ValueError(
            f"keys must be [..., N, D] and {name} [..., N, Dv] with the same leading dimensions, got "
            f"{tuple(keys.shape)} and {tuple(pairs.shape)}"
        )
    hidden = None
    if key_padding_mask is not None:
        if key_padding_mask.dtype != torch.bool or key_padding_mask.shape[-1:] != keys.shape[-2:-1]:
            raise ValueError(
                f"key_padding_mask must be boolean [..., N] = {[*leading[:-1], keys.shape[-2]]} (no heads), got "
                f"{key_padding_mask.dtype} {list(key_padding_mask.shape)}"
            )
        hidden = key_padding_mask.expand(*leading[:-1], -1)
    check_numbers("keys", keys, hidden)
    check_numbers(name, pairs, hidden)
    keys, pairs = (four_d(x, leading, n).double() for n, x in (("keys", keys), (name, pairs)))
    mask = None if hidden is None else hidden.reshape(-1, hidden.shape[-1])
    given = double(parameters)
    for name, part in primal.made(keys.shape[1], pairs.shape[-1]).items():  # [..., N], or [..., N, channels]
        if name in given:
            given[name] = _of_tokens(name, given[name], leading, keys, part.start.shape[1:])
    return design(primal, keys, pairs, mask, query, is_causal, given)


def _of_tokens(name: str, x: Tensor, leading: tuple[int, ...], keys: Tensor, more: tuple[int, ...]) -> Tensor:
    """Numbers for every key [..., N, …] as [batch, heads, N, …]."""
    if tuple(x.shape) != (*leading, keys.shape[2], *more):
        raise ValueError(
            f"parameters[{name!r}] has a number for every key: expected shape {[*leading, keys.shape[2], *more]}, got "
            f"{list(x.shape)}"
        )
    return x.reshape(-1, keys.shape[1], keys.shape[2], *more)


def check_numbers(name: str, x: Tensor, hidden: Tensor | None) -> None:
    """Raise unless `x` [..., N, C] is finite, but for what a mask [..., N] hides."""
    wrong = ~x.isfinite()
    if hidden is not None:
        wrong = wrong & ~(hidden.unsqueeze(-2) if x.dim() > 2 else hidden).unsqueeze(-1)
    if count := int(wrong.sum()):
        place = wrong.nonzero()[0].tolist()
        more = f" and {count - 1} more such numbers" if count > 1 else ""
        raise ValueError(
            f"{name} must be finite, got {float(x[tuple(place)].detach())} at {place}{more}; hide tokens that are not "
            f"there with key_padding_mask"
        )


def four_d(x: Tensor, leading: tuple[int, ...], name: str) -> Tensor:
    """[..., N, D] as [batch, heads, N, D]."""
    if tuple(x.shape[:-2]) != leading:
        raise ValueError(f"{name} must have the leading dimensions {list(leading)}, got shape {list(x.shape)}")
    heads = leading[-1] if leading else 1
    return x.reshape(-1, heads, *x.shape[-2:])


def double(parameters: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """What is learned, in float64."""
    return {name: x.double() for name, x in (parameters or {}).items()}
