"""A trained model with another attention: `convert`, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ...nn.names import name_of
from ...ops import EXECUTORS, CausalFormError, UnsupportedError
from ...primal import Primal, as_primal
from ...primal.shared_keys import of_queries
from . import registry
from .modules import attentions, sizes
from .parts import NAME, Parts, attach, detach, learned_names, parts_of

assert registry  # it registers the attention of converted models


class Conversion(NamedTuple):
    """What `convert` did."""

    model: str
    """The class of the model."""
    mechanism: str
    """By its name, where it has one."""
    attentions: tuple[str, ...]
    """The modules that compute it now."""
    added: dict[str, tuple[int, ...]]
    """The shape of every parameter that is new, by its name in the state dict."""

    def __str__(self) -> str:
        new = sum(torch.Size(shape).numel() for shape in self.added.values())
        added = f"{len(self.added)} parameters of {new:,} numbers" if self.added else "no parameters"
        return (
            f"{self.model}: {len(self.attentions)} attentions are {self.mechanism} now; {added} added, "
            f"every other weight as it was"
        )


def convert(model: PreTrainedModel, mechanism: str | Primal, *, impl: str = "auto") -> Conversion:
    """Let every attention of a model compute a mechanism, and add what the mechanism learns to the model.

    Weights stay as they are. What is learned is under `primaldual` of every attention, with its initial values: in
    `model.parameters()`, in the state dict, and in what `save_pretrained` writes, which `load` reads. A mechanism that
    differs from softmax needs a short training to heal.

    Args:
        model: a model of transformers, whose attentions ask its `AttentionInterface`.
        mechanism: a name of `primaldual.mechanisms()`, or a `Primal`.
        impl: "auto", or the executor to use, as in `primaldual.attention`.

    Returns:
        What was changed and added; as text, a line for a reader.
    """
    primal = as_primal(mechanism)
    if impl != "auto" and impl not in EXECUTORS:
        raise ValueError(f"impl must be one of auto, {', '.join(EXECUTORS)}; got {impl!r}")
    found = _checked(model, primal)
    _check_saved(model, found)
    before = {name: _implementation(module) for name, module in found.items()}
    whole = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if deaf := [name for name, module in found.items() if _implementation(module) != NAME]:
        model.set_attn_implementation(whole)
        raise UnsupportedError(
            f"{type(model).__name__}: set_attn_implementation does not reach {', '.join(deaf)}, whose config is none "
            f"of the model's; share the config with the model"
        )
    add(model, primal, impl)
    for name, module in found.items():
        _parts(module).before = before[name]
    state = model.state_dict()
    added = {name: tuple(x.shape) for name, x in state.items() if f".{NAME}." in name}
    return Conversion(type(model).__name__, name_of(primal), tuple(found), added)


def add(model: PreTrainedModel, primal: Primal, impl: str = "auto") -> None:
    """Give every attention its parts, and the config the mechanism."""
    for name, module in attentions(model).items():
        own = next((p for p in module.parameters() if p.is_floating_point()), None)
        factory = {} if own is None else {"dtype": own.dtype, "device": own.device}
        attach(module, Parts(primal, sizes(name, module), impl, **factory))
    setattr(model.config, NAME, {"mechanism": primal.to_dict()})
    if primal.mixing_maps or primal.weights is not None:
        model.register_forward_pre_hook(_refuse_cache, with_kwargs=True)


def revert(model: PreTrainedModel) -> None:
    """Undo `convert`: the model computes what it did before, with the weights that it has now."""
    found = {name: parts for name, module in attentions(model).items() if (parts := parts_of(module)) is not None}
    if not found:
        raise ValueError(f"{type(model).__name__} is not converted: none of its attentions has a mechanism")
    modules = attentions(model)
    before = {parts.before for parts in found.values()}
    model.set_attn_implementation((before.pop() if len(before) == 1 else None) or "sdpa")
    for name in found:
        detach(modules[name])
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is _refuse_cache]:
        del model._forward_pre_hooks[key]
    delattr(model.config, NAME)


def _checked(model: PreTrainedModel, primal: Primal) -> dict[str, nn.Module]:
    """The attentions of a model that can compute the mechanism."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a model of transformers (PreTrainedModel), got {type(model).__name__}")
    found = attentions(model)
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} computes its attention itself and never asks transformers' AttentionInterface, so "
            f"no other can be put in its place; take a model that does, such as BERT, ViT or Llama"
        )
    if any(parts_of(module) is not None for module in found.values()):
        raise ValueError(f"{type(model).__name__} is converted already; call revert(model) first")
    if primal.residual:
        raise UnsupportedError(f"{primal!r}: a model of transformers adds its residual itself; give residual=False")
    for name, module in found.items():
        heads, kv_heads = sizes(name, module)[:2]
        of_queries(primal.training_set, heads, kv_heads).head_scales(heads)  # raises when scales and heads disagree
        causal = getattr(module, "is_causal", False) and getattr(module.config, "is_causal", True) is not False
        if causal and (reason := primal.causal_refusal(heads)):
            raise CausalFormError(f"{name} of {type(model).__name__} is causal: {reason}")
    return found


def _parts(module: nn.Module) -> Parts:
    parts = parts_of(module)
    assert parts is not None
    return parts


def _implementation(module: nn.Module) -> str | None:
    config: Any = module.config
    return config._attn_implementation


def _check_saved(model: PreTrainedModel, found: dict[str, nn.Module]) -> None:
    """Raise where the config says that a mechanism was saved, and what it learned is not here."""
    saved = getattr(model.config, NAME, None)
    if saved is None:
        return
    primal = Primal.from_dict(saved["mechanism"])
    lost = {each for name, module in found.items() for each in learned_names(primal, *sizes(name, module)[:3])}
    if lost:
        raise ValueError(
            f"{type(model).__name__} was saved with a mechanism that learned {', '.join(sorted(lost))}, which "
            f"from_pretrained left out; use load(path), or begin anew after: del model.config.{NAME}"
        )


def _refuse_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("past_key_values") is not None:
        raise UnsupportedError(
            f"{type(model).__name__}: the mechanism needs the input of all tokens, and a cache keeps keys and values "
            f"alone; call generate(..., use_cache=False)"
        )
