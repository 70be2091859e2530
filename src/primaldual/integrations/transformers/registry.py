"""Mechanisms by name in transformers: `attn_implementation="primaldual-sh"`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...ops import EXECUTORS, UnsupportedError
from ...primal import Primal, as_primal, mechanisms
from .call import attend
from .masks import mask_of
from .parts import NAME, parts_of

_TAKEN = ("eager", "sdpa", "flash", "flex_attention", "paged")
"""What transformers looks for in a name."""


@dataclass(frozen=True)
class _Named:
    """The attention of one mechanism."""

    primal: Primal
    impl: str

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        return attend(module, query, key, value, attention_mask, self.primal, self.impl, **given)


def register(name: str | None = None, primal: Primal | str | None = None, *, impl: str = "auto") -> tuple[str, ...]:
    """Let models of transformers take a mechanism as `attn_implementation`.

    Without arguments every name of `primaldual.mechanisms()` is registered, "sh" as "primaldual-sh". What a mechanism
    learns is not on a model that only names it: `convert` adds it.

    Args:
        name: the name to register; needs a `primal`.
        primal: the mechanism, a `Primal` or a name of one.
        impl: "auto", or the executor to use, as in `primaldual.attention`.

    Returns:
        The names that models now take.

    >>> "primaldual-bn+sh" in register()
    True
    """
    if (name is None) != (primal is None):
        raise ValueError(f"give both a name and a mechanism, or neither; got name={name!r}, primal={primal!r}")
    if impl != "auto" and impl not in EXECUTORS:
        raise ValueError(f"impl must be one of auto, {', '.join(EXECUTORS)}; got {impl!r}")
    if name is None or primal is None:
        named = {f"{NAME}-{each}": as_primal(each) for each in mechanisms()}
    else:
        _check(name)
        named = {name: as_primal(primal)}
    for each, of in named.items():
        if of.residual:
            raise UnsupportedError(f"{of!r}: a model of transformers adds its residual itself; give residual=False")
        AttentionInterface.register(each, _Named(of, impl))
        AttentionMaskInterface.register(each, mask_of)
    return tuple(named)


def _check(name: str) -> None:
    if not re.fullmatch(r"[\w.+-]+", name) or any(word in name for word in _TAKEN) or name == NAME:
        raise ValueError(
            f"name must be of letters, digits and .+-_, must not be {NAME!r}, and must not contain "
            f"{', '.join(_TAKEN)}, which transformers gives a meaning; got {name!r}"
        )
    known = AttentionInterface()
    if name in known.valid_keys() and not isinstance(known[name], _Named):
        raise ValueError(f"transformers has an attention of the name {name!r} already; give another name")


def _converted(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention of converted models: the mechanism is on the module."""
    parts = parts_of(module)
    if parts is None:
        raise UnsupportedError(
            f"{type(module).__name__} has no mechanism; attn_implementation={NAME!r} is set by convert(model, "
            f"mechanism), and {NAME}-NAME names one"
        )
    return attend(module, query, key, value, attention_mask, parts.primal, parts.impl, **given)


AttentionInterface.register(NAME, _converted)
AttentionMaskInterface.register(NAME, mask_of)
