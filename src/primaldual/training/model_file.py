"""Trained models in a file: the settings and weights of every member, and what their user needs beside them.

There is one format for what `train` leaves and what the estimators save. Everything in a file is under its checksum,
and what the settings say is held against the weights before a model of these settings is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base import tensors as files
from ..base.randomness import DrawingFrom
from ..models import MODELS
from ..primal import Spec

FORMAT = 2
"""To be raised when older files can no longer be read."""

LONGEST = 1 << 24
"""Steps that a model may have whatever its weights are: not all of them have some for every step."""

State = Mapping[str, Tensor]


class ModelFileError(ValueError):
    """A file holds no model, is damaged, or was written by another version."""


@dataclass(frozen=True, eq=False)
class Models:
    """What a file holds.

    Args:
        configs: of every member; None for a model that is not of `primaldual.models`.
        weights: of every member, by name.
        beside: other tensors.
        about: what else is said, in JSON.
    """

    configs: Sequence[Spec | None]
    weights: Sequence[State]
    beside: State = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


def write(path: Path, models: Models) -> None:
    """The whole file, or the one that was there before."""
    tensors = {f"weights.{i}.{name}": x for i, held in enumerate(models.weights) for name, x in held.items()}
    configs = [None if config is None else config.to_dict() for config in models.configs]
    head = {"format": FORMAT, "members": len(models.weights), "configs": configs}
    files.write(path, tensors | dict(models.beside), head | {"about": dict(models.about)})


def read(path: Path) -> Models:
    """What `write` wrote, or an older run left; a `ModelFileError` where it is anything else."""
    try:
        tensors, said = files.read(path, older=("config",))
    except files.DamagedFileError as error:
        raise ModelFileError(str(error)) from None
    if "format" not in said:  # a model of a run from before there were checksums: its weights, and perhaps its settings
        config = said.get("config")
        return Models([None if config is None else _config(path, config)], [tensors])
    if said["format"] != FORMAT:
        raise ModelFileError(
            f"{path} is of format {said['format']!r}; this version of primaldual reads {FORMAT}. Save the model again"
        )
    configs, about, members = (said.get(name) for name in ("configs", "about", "members"))
    if not isinstance(configs, list) or not isinstance(about, dict) or len(configs) != members or not configs:
        raise ModelFileError(f"{path} is damaged: it does not say what its members are")
    weights: list[dict[str, Tensor]] = [{} for _ in configs]
    beside: dict[str, Tensor] = {}
    for name, x in tensors.items():
        first, _, rest = name.partition(".")
        member, _, own = rest.partition(".")
        if first != "weights":
            beside[name] = x
        elif member.isascii() and member.isdigit() and len(member) < 10 and int(member) < len(weights):
            weights[int(member)][own] = x
        else:
            raise ModelFileError(f"{path} is damaged: {name} is of none of its {len(weights)} members")
    return Models([None if one is None else _config(path, one) for one in configs], weights, beside, about)


def model_of(config: Spec | None, weights: State) -> nn.Module:
    """A model with these weights, ready to predict; a `ModelFileError` where they are not those of such a model.

    Nothing is made before names and shapes agree, which a model without memory tells.
    """
    if config is None or type(config) not in MODELS:
        raise ModelFileError(
            "this is no model of primaldual.models; load its weights into one of its task, by load_model"
        )
    largest = max((x.numel() for x in weights.values()), default=0)
    for one in fields(config):  # even without memory a model of so many parts would take for ever to make
        value = getattr(config, one.name)
        if type(value) is int and value > (len(weights) if one.name in ("layers", "blocks") else max(largest, LONGEST)):
            raise ModelFileError(f"the weights are not those of a model with {one.name}={value}")
    kind: Any = MODELS[type(config)]
    try:
        with torch.device("meta"):
            expected = {name: x.shape for name, x in kind(config).state_dict().items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise ModelFileError(f"there is no such model: {error}") from None
    if {name: x.shape for name, x in weights.items()} != expected:
        raise ModelFileError(f"the weights are not those of {config!r}")
    with DrawingFrom(torch.Generator()):  # weights that are drawn for nothing take no one's random numbers
        model: nn.Module = kind(config)
    model.to(dtype_of(weights)).load_state_dict(dict(weights))
    return model.eval()


def dtype_of(weights: State) -> torch.dtype:
    """Of the first that is no integer."""
    return next((x.dtype for x in weights.values() if x.is_floating_point()), torch.float32)


def _config(path: Path, data: Any) -> Spec:
    try:
        return Spec.from_dict(data)
    except (ValueError, TypeError) as error:
        raise ModelFileError(f"{path} holds a model that cannot be made here: {error}") from None
