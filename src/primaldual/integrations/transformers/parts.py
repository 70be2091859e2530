"""What a mechanism learns, as a submodule of a model's attention, which is saved with the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...nn.made import MadeOfInput
from ...ops import UnsupportedError
from ...primal import Primal

NAME = "primaldual"
"""Of the submodule, and of the entry in a model's config."""


class Parts(nn.Module):
    """The mechanism of one attention, its learned tensors, and what it makes of the attention's input.

    Args:
        primal: the mechanism.
        sizes: heads, key/value heads, head dimension and width of the input.
        impl: the executor, "auto" but in tests.
        factory: dtype and device.
    """

    bias: nn.Parameter | None

    def __init__(self, primal: Primal, sizes: tuple[int, int, int, int], impl: str = "auto", **factory: Any) -> None:
        super().__init__()
        heads, kv_heads, head_dim, width = sizes
        self.primal, self.impl = primal, impl
        learned = primal.learned(heads, head_dim, kv_heads)
        self.learned = nn.ParameterDict({name: nn.Parameter(x.to(**factory)) for name, x in learned.items()})
        made = primal.made(heads, head_dim, kv_heads)
        self.made = nn.ModuleDict({name: MadeOfInput(part, width, **factory) for name, part in made.items()})
        self.register_parameter("bias", nn.Parameter(torch.zeros(heads, head_dim, **factory)) if primal.bias else None)
        self.input: Tensor | None = None  # of the attention, while it runs
        self.before: str | None = None  # the implementation that it took the place of
        self.across = False  # whether that is cross-attention

    def extra_repr(self) -> str:
        return repr(self.primal)

    @property
    def looks_at_input(self) -> bool:
        """Whether it needs to know what the attention is called with."""
        return bool(self.made) or bool(self.primal.token_maps)

    def parameters_for(self, keys: int) -> dict[str, Tensor]:
        """`parameters` of `attention`."""
        found: dict[str, Tensor] = dict(self.learned.items())
        for name, made in self.made.items():
            assert isinstance(made, MadeOfInput)
            if self.input is None:
                raise UnsupportedError(f"{name!r} is made of the attention's input, and it was not called with any")
            if made.of == "key" and (self.across or self.input.shape[1] != keys):
                raise UnsupportedError(
                    f"{self.primal.weights!r} is made of the input of every key, and there are {keys} keys for "
                    f"{self.input.shape[1]} inputs; run without a cache (use_cache=False), and not in cross-attention"
                )
            found[name] = made(self.input)
        return found


def learned_names(primal: Primal, heads: int, kv_heads: int, head_dim: int) -> list[str]:
    """What a mechanism learns on an attention of this size."""
    names = [*primal.learned(heads, head_dim, kv_heads), *primal.made(heads, head_dim, kv_heads)]
    return [*names, "bias"] if primal.bias else names


def parts_of(module: nn.Module) -> Parts | None:
    """Those of an attention; None where it has none."""
    found = getattr(module, NAME, None)
    return found if isinstance(found, Parts) else None


def attach(module: nn.Module, parts: Parts) -> None:
    """Give an attention its parts."""
    module.add_module(NAME, parts)
    if parts.looks_at_input:
        module.register_forward_pre_hook(_see, with_kwargs=True)
        module.register_forward_hook(_forget)


def detach(module: nn.Module) -> None:
    """Take them away."""
    delattr(module, NAME)
    for hooks, ours in ((module._forward_pre_hooks, _see), (module._forward_hooks, _forget)):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]


def _see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parts = parts_of(module)
    assert parts is not None
    parts.input = args[0] if args else kwargs.get("hidden_states")
    other = (kwargs.get(name) for name in ("key_value_states", "encoder_hidden_states"))
    parts.across = any(x is not None for x in other)


def _forget(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    parts = parts_of(module)
    assert parts is not None
    parts.input = None
