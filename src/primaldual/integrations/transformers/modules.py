"""The attentions of a model of transformers: which modules ask the interface, and their sizes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Every module, by name, whose forward pass asks transformers' attention interface."""
    asking = {kind for kind in {type(module) for module in model.modules()} if _asks(kind)}
    return {name: module for name, module in model.named_modules() if type(module) in asking}


def _asks(kind: type[nn.Module]) -> bool:
    """As transformers itself finds out: by the source."""
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False


def sizes(name: str, module: nn.Module) -> tuple[int, int, int, int]:
    """Heads, key/value heads, head dimension and width of the input."""
    config = module.config
    heads = _first(module, ("num_heads", "num_attention_heads", "n_heads"), config, ("num_attention_heads",))
    groups = _first(module, ("num_key_value_groups",), None, ())
    width = _first(module, ("embed_dim", "hidden_size", "d_model"), config, ("hidden_size",))
    if heads is None or width is None:
        raise ValueError(
            f"{name} ({type(module).__name__}) does not say how many heads it has, and how wide its input is; expected "
            f"num_heads and embed_dim, or num_attention_heads and hidden_size in its config"
        )
    dim = _first(module, ("head_dim", "attention_head_size", "key_value_proj_dim"), config, ("head_dim",))
    return heads, heads // (groups or 1), dim or width // heads, width


def _first(module: Any, names: tuple[str, ...], config: Any, of_config: tuple[str, ...]) -> int | None:
    found = [getattr(module, name, None) for name in names] + [getattr(config, name, None) for name in of_config]
    return next((int(x) for x in found if isinstance(x, int)), None)
