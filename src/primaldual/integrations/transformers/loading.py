"""A converted model, from what `save_pretrained` wrote."""

from __future__ import annotations

import os
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

from ...primal import Primal
from .conversion import add
from .parts import NAME


def load(
    path: str | os.PathLike[str], model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """The model that `save_pretrained` of a converted one wrote: its mechanism, and what that learned.

    Args:
        path: as in `from_pretrained`.
        model_class: such as `LlamaForCausalLM`; the class that was saved unless given.
        options: of `from_pretrained`, such as `dtype` or `device_map`.
    """
    config = AutoConfig.from_pretrained(path)
    stated = getattr(config, NAME, None)
    if not isinstance(stated, dict) or "mechanism" not in stated:
        raise ValueError(
            f"{path}: config.json names no mechanism of primaldual; convert a model and save it with save_pretrained, "
            f"or load this one with from_pretrained"
        )
    primal = Primal.from_dict(stated["mechanism"])
    kind = _class_of(config, path) if model_class is None else model_class

    def begin(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        add(self, primal)

    # the class whose weights transformers reads has the parts from the start, so that they are read like all others
    with_parts: Any = type(kind.__name__, (kind,), {"__init__": begin, "__module__": kind.__module__})
    options = {"attn_implementation": NAME} | options
    model, report = with_parts.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(name for name in report["missing_keys"] if f".{NAME}." in name):
        raise ValueError(f"{path}: the weights lack what the mechanism learned: {', '.join(missing)}")
    model.__class__ = kind
    return model


def _class_of(config: Any, path: Any) -> type[PreTrainedModel]:
    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise ValueError(
            f"{path}: config.json names the class {names}, which transformers does not have; give model_class"
        )
    return found
