"""What is no tensor, of no dtype that attention computes in, or elsewhere: said by name before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..primal._spec import is_number
from ..primal.features import FeatureMap

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def inputs(**given: Any) -> None:
    """Raise unless these are tensors of a dtype that attention computes in."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {_kind(x)}")
        if x.dtype not in DTYPES:
            names = ", ".join(str(dtype)[6:] for dtype in DTYPES)
            raise ValueError(
                f"{name} must be floating point, got {x.dtype}; attention computes in {names}: convert it with "
                f"{name}.to(...)"
            )


def mask(name: str, given: Any, x: Tensor) -> None:
    """Raise unless this is None, or a tensor where the inputs are."""
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {_kind(given)}")
    if given.device != x.device:
        raise ValueError(f"{name} is on {given.device}, the inputs are on {x.device}; move it with {name}.to(...)")


def query_offset(given: Any, mixing: Sequence[object]) -> None:
    """Raise unless this is the place of the first query, and no query is mixed with those before it."""
    if isinstance(given, bool) or not isinstance(given, int | torch.SymInt) or given < 0:
        raise ValueError(
            f"query_offset must be an integer of at least 0, the place of the first query in the sequence of keys; got "
            f"{given!r}"
        )
    if given and mixing:
        raise ValueError(
            f"query_offset={given}: {mixing[0]!r} mixes a query with the tokens beside it, and those before the first "
            f"query are not given; give the queries of the whole sequence"
        )


def scale(given: Any, features: FeatureMap) -> None:
    """Raise unless this is None, or a factor that can be put on the scores of these features."""
    if given is None:
        return
    if not is_number(given) or not (given > 0 and math.isfinite(given)):
        raise ValueError(f"scale must be a positive number, the factor on the scores, or None for 1/√D; got {given!r}")
    if not features.scaled:
        raise ValueError(
            f"scale={given!r}: {features!r} has no factor on q·k that could be set; only features whose kernel is a "
            f"function of q·k/√D have one (Exponential, Taylor, RandomFeatures)"
        )


def parameters(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise unless a layer's weight and an input can be multiplied."""
    if x.device != weight.device:
        raise ValueError(
            f"{name} is on {x.device}, the layer's parameters are on {weight.device}; move one of them with .to(...)"
        )
    if x.dtype == weight.dtype:
        return
    kind, doubles = x.device.type, torch.float64 in (x.dtype, weight.dtype)
    if not doubles and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return
    autocast = "" if doubles else f"; under torch.autocast({kind!r}) both are converted for you"
    raise ValueError(
        f"{name} is {x.dtype}, the layer's parameters are {weight.dtype}; give {name}.to({weight.dtype}), or convert "
        f"the layer with layer.to({x.dtype}){autocast}"
    )


def _kind(x: Any) -> str:
    if x is None:
        return "None"
    kind = type(x)
    if kind.__module__ == "numpy":
        return f"numpy.{kind.__name__}; torch.from_numpy(...) makes a tensor of it"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
