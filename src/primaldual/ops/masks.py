"""The masks of a call in one form: what is hidden (True), and what is added to the scores.

Whether a mask may be given beside `is_causal=True`, or beside a map that mixes tokens, depends on its values. They are
looked at once for a tensor and its version, so that the layers of a model, and its steps where the mask stays, wait for
the device once. A compiler and a CUDA graph cannot look, and what they make runs on other values later: there nothing
depends on them, but for an assertion on the device where the mask has to be harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..primal import TokenMap
from .checks import DTYPES


def padding(name: str, mask: Tensor | None, shape: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """(hidden [B, 1, N], bias [B, 1, N] or None) of a padding mask [B, N]."""
    if mask is None:
        return None, None
    check_padding(name, mask, shape)
    return _split(mask.unsqueeze(1))


def check_padding(name: str, mask: Tensor, shape: tuple[int, int]) -> None:
    """Raise unless this is a padding mask for (batch, length)."""
    if mask.shape != shape:
        raise ValueError(f"{name} must be [batch, length] = {list(shape)}, got {list(mask.shape)}")
    _check_dtype(name, mask)


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens [B, N, C] or [B, H, N, C] with zeros where a padding mask [B, N] hides them."""
    if mask is None:
        return x
    hidden = _split(mask)[0].unsqueeze(-1)
    return x.masked_fill(hidden if x.dim() == 3 else hidden.unsqueeze(1), 0.0)


def per_query(
    mask: Tensor, shape: tuple[int, int, int, int], scales: Sequence[int], token_maps: Sequence[TokenMap],
    is_causal: bool, offset: int = 0,
) -> tuple[Tensor | None, Tensor | None, bool]:  # fmt: skip
    """(hidden, bias, is_causal) of an attn_mask; hidden and bias are [B or 1, H or 1, L, S].

    The first query stands at token `offset` of the keys, here and below.

    Beside `is_causal` a mask that says no more than it is taken as torch's hint and left out. Where that cannot be
    known the future is hidden by the mask too: right, and slower than `is_causal=True` alone.
    """
    _check_shape(mask, shape)
    refuse_mixing(mask, token_maps)
    if any(scale > 1 for scale in scales):
        if not is_causal:
            raise ValueError(
                f"attn_mask hides single keys, but heads of scales {tuple(scales)} are fitted to pooled ones; give "
                f"key_padding_mask, is_causal=True, or scales of 1"
            )
        more = (
            f"attn_mask says more than is_causal=True: it hides keys that are not in the future, or adds to their "
            f"scores. Heads of scales {tuple(scales)} are fitted to pooled keys and have no such form; give "
            f"is_causal=True alone, key_padding_mask, or scales of 1"
        )
        if mask.requires_grad:  # whatever it adds now
            raise ValueError(more)
        _refuse(mask, ("past", "bias"), more, offset)
        return None, None, True
    if is_causal:
        both = beside_causal(mask, offset)
        if both is None:
            return None, None, True
        mask = both
    return *_split(mask if mask.dim() == 4 else mask[None, None]), False


def beside_causal(mask: Tensor, offset: int = 0) -> Tensor | None:
    """A mask for itself and `is_causal=True`: it hides the future too. None where it is known to say no more than that.

    The latter is what an executor has a faster form of.
    """
    if not mask.requires_grad and torch._C._functorch.peek_interpreter_stack() is None and _can_look(mask):
        says = _look(mask, offset)
        if not (says.past or says.bias):
            return None
    return with_future(mask, offset)


def with_future(mask: Tensor, offset: int = 0) -> Tensor:
    """A mask that hides the future too."""
    future = _future(mask, offset)
    return mask | future if mask.dtype == torch.bool else mask.masked_fill(future, -torch.inf)


def refuse_mixing(mask: Tensor, token_maps: Sequence[object]) -> None:
    """Raise where what a mask hides from a query would reach it in other tokens, which a map has mixed it into.

    A causal map mixes nothing into a token that a mask of the future leaves.
    """
    leaking = [m for m in token_maps if not isinstance(m, TokenMap) or m.causal_refusal() is not None]
    if leaking:
        _refuse(
            mask, ("hides",),
            f"attn_mask hides tokens that {leaking[0]!r} mixes into others, so they would be seen through these; hide "
            f"padding with key_padding_mask, or take a mechanism that does not mix tokens",
        )  # fmt: skip
    elif token_maps:
        _refuse(
            mask, ("past", "gaps"),
            f"attn_mask hides tokens that {token_maps[0]!r} mixes into later ones, so they would be seen through "
            f"these; a mask beside it can hide the future alone, and a token only with all that follow",
        )  # fmt: skip


def _future(mask: Tensor, offset: int) -> Tensor:
    """Boolean [L, S]: the keys after each query's own position."""
    return torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1 + offset)


HIDES = -1e4
"""From here down, what is added to a score leaves no weight: −10⁴, −10⁹ and a dtype's lowest number stand for −inf.

To scores it is added as it is. But a map that mixes tokens would show them in spite of it.
"""


class _Says(NamedTuple):
    """What the values of an attn_mask say."""

    hides: bool  # a key from a query, by −inf or by a number that leaves it no weight
    past: bool  # and one that is not in its future
    gaps: bool  # and one after which there are others that it leaves
    bias: bool  # it adds to the score of a key that is not in the future


def _read(mask: Tensor, offset: int) -> Tensor:
    """`_Says` as a tensor."""
    hidden, bias = _split(mask)
    seen = ~_future(mask, offset)
    adds = torch.zeros_like(seen) if bias is None else (bias != 0) & seen
    hidden = hidden if bias is None else hidden | (bias <= HIDES)
    gaps = hidden[..., :-1] & ~hidden[..., 1:]
    return torch.stack([x.any() for x in (hidden, hidden & seen, gaps, adds)])


def _refuse(mask: Tensor, what: tuple[str, ...], message: str, offset: int = 0) -> None:
    """Raise where a mask says one of these; on the device, when it runs, where the values cannot be looked at."""
    if _can_look(mask):
        says = _look(mask, offset)
        if any(getattr(says, name) for name in what):
            raise ValueError(message)
    elif not mask.is_meta:
        says_it = _read(mask, offset)[[_Says._fields.index(name) for name in what]]
        torch._assert_async(~says_it.any(), message)


def _can_look(mask: Tensor) -> bool:
    return not (
        torch.compiler.is_compiling()
        or mask.is_meta
        or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    )  # fmt: skip


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By tensor (of a view, the one it is a view of): its version, and what was found for each view."""


def _look(mask: Tensor, offset: int) -> _Says:
    mask = _of_all(mask)
    if mask.is_inference():  # such a tensor does not count its versions
        return _Says(*_read(mask, offset).tolist())
    owner = mask if mask._base is None else mask._base
    version, found = _known.get(owner, (None, {}))
    if version != mask._version:
        version, found = mask._version, {}
        _known[owner] = version, found
    place = (mask.shape, mask.stride(), mask.storage_offset(), mask.dtype, offset)
    if place not in found:
        found[place] = _Says(*_read(mask.detach(), offset).tolist())
    return found[place]


def _of_all(mask: Tensor) -> Tensor:
    """Of a mask inside `torch.vmap` the masks of all calls."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(mask):
        place = functorch.maybe_get_bdim(mask) if functorch.is_batchedtensor(mask) else 0
        mask = functorch.get_unwrapped(mask).movedim(place, 0)
    return mask


def _check_shape(mask: Tensor, shape: tuple[int, int, int, int]) -> None:
    B, H, L, S = shape
    fits = mask.dim() in (2, 4) and mask.shape[-2:] == (L, S)
    if mask.dim() == 4:
        fits = fits and mask.shape[0] in (1, B) and mask.shape[1] in (1, H)
    if not fits:
        raise ValueError(
            f"attn_mask must be [queries, keys] = {[L, S]} or [batch or 1, heads or 1, queries, keys] = {list(shape)}, "
            f"got {list(mask.shape)}"
        )
    _check_dtype("attn_mask", mask)


def _check_dtype(name: str, mask: Tensor) -> None:
    if mask.dtype not in (torch.bool, *DTYPES):
        raise ValueError(f"{name} must be boolean (True hides) or floating point (added), got {mask.dtype}")


def _split(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A boolean mask hides where True; in a float mask −inf hides and finite values are added to the scores."""
    if mask.dtype == torch.bool:
        return mask, None
    hidden = mask == -torch.inf
    return hidden, mask.masked_fill(hidden, 0.0)
