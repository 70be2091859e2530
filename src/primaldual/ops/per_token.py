"""Numbers for every token, which a layer makes of its input: checked, and as the problem has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from ..kernels.gate import gating
from ..kernels.launching import launches, traced
from ..primal import Gated, PerToken, Primal
from .checks import DTYPES


def divide(
    given: Mapping[str, Tensor], primal: Primal, q: Tensor, k: Tensor, v: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters that are not of single tokens, and those that are, [B or 1, H, N or 1, ...]."""
    known = primal.made(q.shape[1], v.shape[-1], k.shape[1])
    tokens = {
        name: _checked(name, part, given.get(name), q if part.of == "query" else k) for name, part in known.items()
    }
    return {name: x for name, x in given.items() if name not in known}, tokens


def _checked(name: str, part: PerToken, x: Tensor | None, of: Tensor) -> Tensor:
    """One for each token of q or k; where it is not given, what a layer starts with."""
    if x is None:
        start = part.function(part.start.to(of.device, torch.promote_types(of.dtype, torch.float32))).to(of.dtype)
        return start[None, :, None]
    if not isinstance(x, Tensor):
        raise TypeError(f"parameters[{name!r}] must be a torch.Tensor, got {x!r}")
    shape = (of.shape[0], of.shape[1], of.shape[2], *part.start.shape[1:])
    if x.shape != shape or x.dtype not in DTYPES or x.device != of.device:
        raise ValueError(
            f"parameters[{name!r}] has a number for every {part.of}: it must be floating point, of shape {list(shape)} "
            f"and on {of.device}; got {x.dtype}, {list(x.shape)} on {x.device}"
        )
    return x


def gate(primal: Primal, tokens: Mapping[str, Tensor]) -> Tensor | None:
    """The gate of every output, [B or 1, H, L or 1, 1 or Dv]; None where the primal has none."""
    if not isinstance(primal.normalizer, Gated):
        return None
    found = tokens["gate"]
    return found.unsqueeze(-1) if found.dim() == 3 else found


def squashes(primal: Primal, x: Tensor) -> bool:
    """Whether outputs are multiplied by the sigmoid of what a layer makes of x in one launch, which takes it as it is.

    By exact type: the gates of a subclass may be another function. What is added beside them (h) may be one's own.
    """
    return (
        type(primal.normalizer) is Gated
        and not traced() and forward_ad._current_level < 0
        and launches(x) and not x.is_meta and x.numel() > 0
    )  # fmt: skip


def gated(
    primal: Primal, out: Tensor, weights: Tensor | None, by: Tensor, squashed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Outputs times their gates, and weights times those of heads; `squashed`: the gates are the sigmoids of `by`.

    Channels with gates of their own have the weights in common that are returned: the output is g ⊙ (weights @ v).
    """
    assert isinstance(primal.normalizer, Gated)
    if squashed:
        if weights is None and out.numel() and launches(out) and launches(by):
            return gating.gated(out, by), None
        by = by.sigmoid()
    if weights is not None and primal.normalizer.per == "head":
        weights = weights * by.to(weights.dtype)
    return out * by.to(out.dtype), weights


def log_weights(
    primal: Primal, tokens: Mapping[str, Tensor], hidden: Tensor | None, of: Tensor, alike: bool
) -> Tensor | None:
    """log w of every token of the keys `of`, [B, H, S], in at least float32; None where all weigh the same.

    Where all queries see them alike, they are relative to the largest. Else what is later would be seen in it.
    """
    length = of.shape[2]
    if primal.weights is None:
        return None
    if any(x.shape[2] == 0 for x in tokens.values()):  # no keys at all: there is one, which is hidden
        tokens = {name: pad(x, (0, length)) for name, x in tokens.items() if x.dim() == 3}
    found = primal.weights.log_weights(tokens, hidden, length)
    if alike:
        found = found - found.detach().amax(-1, keepdim=True)
    return found.to(torch.promote_types(of.dtype, torch.float32)).expand(*of.shape[:2], -1)
