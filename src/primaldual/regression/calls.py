"""What the attention layers of a model see: projected queries, keys and values of every call in one forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.multihead import MultiheadAttention
from ..ops import masks
from ..ops.layer import separate
from ..primal import Primal


class NoAttentionError(ValueError):
    """The model has no attention layer, or its forward pass reached none."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of one attention layer, after projection and head split; `number` counts the calls of a shared layer."""

    layer: str
    number: int
    primal: Primal
    queries: Tensor  # [B, H, L, D]
    keys: Tensor  # [B, H, S, D]; a learned or zero key stands after the tokens
    values: Tensor  # [B, H, S, Dv]
    tokens: int  # keys that are tokens: S, less the learned and the zero key
    padding: Tensor | None  # [B, S], boolean or float
    mask: Tensor | None  # [L, S] or [B or 1, H or 1, L, S], boolean or float; None beside is_causal
    is_causal: bool
    parameters: Mapping[str, Tensor]
    query_padding: Tensor | None  # [B, L], boolean or float; as the layer has it, that of the keys where it serves
    query_offset: int
    scale: float | None  # the factor on the scores; None for 1/√D
    gate: Tensor | None = None  # [B, H, S], or [B, H, S, Dv]: g at the keys, where these come of the queries' input

    def parameters_of(self, cases: slice) -> dict[str, Tensor]:
        """What is learned, and what there is for every key of these cases."""
        made = self.primal.made(1, 1)
        return {name: x[cases] if name in made else x for name, x in self.parameters.items()}


def attention_calls(model: nn.Module, batch: Any, *, solved: bool = False) -> list[AttentionCall]:
    """Run the model once, in evaluation mode and without gradients, and record every call of an attention layer.

    Args:
        model: contains `primaldual.MultiheadAttention` or `torch.nn.MultiheadAttention` layers; the latter are softmax
            heads. It is left as it was.
        batch: what the model is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        solved: also layers that solve for their values; what is recorded of these are targets.
    """
    kinds = MultiheadAttention | nn.MultiheadAttention
    found = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
    layers = {name: m for name, m in found.items() if solved or getattr(m, "learns_values", True)}
    if not layers:
        raise NoAttentionError(
            f"{type(model).__name__} has no attention layer: expected a primaldual.MultiheadAttention or a "
            f"torch.nn.MultiheadAttention among its modules"
        )
    calls: list[AttentionCall] = []
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(_evaluating(model))
        for name, layer in layers.items():
            hook = _Recorder(name, layer, calls)
            stack.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*(batch if isinstance(batch, tuple) else (batch,)))
    if not calls:
        raise NoAttentionError(f"the forward pass of {type(model).__name__} called none of {', '.join(layers)}")
    return calls


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and torch's fused encoder, which calls no attention layer, switched off."""
    training = [module for module in model.modules() if module.training]
    fused = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module in training:
            module.training = True


class _Recorder:
    """A forward hook: after the call, so that the layer's own errors come first; at once, before inputs can change."""

    def __init__(self, name: str, layer: nn.Module, calls: list[AttentionCall]) -> None:
        self.name, self.calls, self.number = name or type(layer).__name__, calls, 0
        self.signature = inspect.signature(layer.forward)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        given = self.signature.bind(*args, **kwargs)
        given.apply_defaults()
        a = given.arguments
        if a["query"].is_nested:  # the layer calls itself with a padded tensor, which is recorded
            return
        ours = layer if isinstance(layer, MultiheadAttention) else adapted(layer)
        self.calls.append(
            _call(
                self.name, self.number, ours, a["query"], a["key"], a["value"], a["key_padding_mask"],
                a.get("query_padding_mask"), a["attn_mask"], a["is_causal"], a.get("query_offset", 0),
            )
        )  # fmt: skip
        self.number += 1


def adapted(layer: nn.Module) -> MultiheadAttention:
    """torch's attention as ours: softmax heads with the same weights."""
    assert isinstance(layer, nn.MultiheadAttention)
    weight = layer.out_proj.weight
    made = MultiheadAttention(
        layer.embed_dim, layer.num_heads, bias=layer.in_proj_bias is not None, add_bias_kv=layer.bias_k is not None,
        add_zero_attn=layer.add_zero_attn, kdim=layer.kdim, vdim=layer.vdim, batch_first=layer.batch_first,
        device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    made.load_state_dict(layer.state_dict())
    return made.eval()


def _call(
    name: str, number: int, layer: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor,
    padding: Tensor | None, query_padding: Tensor | None, mask: Tensor | None, is_causal: bool, query_offset: int,
) -> AttentionCall:  # fmt: skip
    """Inputs to heads by the layer's own steps; what was one tensor stays one, as the layer has it."""
    p = layer.state(query, key, value, padding, False, mask, is_causal, query_padding, query_offset)
    if is_causal and p.mask is not None:
        if max(p.scales) > 1:
            p = p._replace(mask=None)  # the layer took it, so it says no more than is_causal
        else:
            assert p.mask is not None
            both = masks.beside_causal(p.mask, query_offset)
            p = p._replace(mask=both, is_causal=both is None)
    queries, keys, values, padding, mask, is_causal = separate.heads(p)
    return AttentionCall(
        name, number, layer.primal, queries, keys, values, p.key.shape[1], padding, mask, is_causal, p.parameters,
        p.query_padding, query_offset, layer.scale,
        layer.made["gate"](p.key) if "gate" in layer.made and p.x is p.key else None,
    )  # fmt: skip
